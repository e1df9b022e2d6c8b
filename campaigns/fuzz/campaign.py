"""Run one input after the other, each with a limit on CPU seconds, and record the outcome."""

from __future__ import annotations

import random
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from rlhf_core.errors import RlhfError

Fate = Literal["clear error", "right", "traceback", "hang"]
FATES: tuple[Fate, ...] = ("clear error", "right", "traceback", "hang")
PATIENCE = 30
"""Factor of wall time over CPU time, because a busy machine gives each process only a part of its time."""
ROOT = Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """An input was accepted with a wrong result."""


class Target(Protocol):
    """Code under test that receives damaged inputs; it works in a separate folder."""

    def attempt(self, rng: random.Random) -> None:
        """Create one input and use it. Returns if the result is right; RlhfError is clear, the rest are findings."""


@dataclass(frozen=True)
class Result:
    """The fate of one input. `where` identifies findings: the error's class and the last project line it passed."""

    number: int
    fate: Fate
    where: str = ""
    detail: str = ""


def run(
    name: str, make: Callable[[Path], Target], *, seed: int, first: int, count: int, limit_s: float
) -> Iterator[Result]:
    """Yield results of inputs `first` to `first + count - 1`; each depends only on `name`, `seed` and its number."""
    with tempfile.TemporaryDirectory(prefix="rlhf-fuzz-") as folder:
        target = make(Path(folder))
        for number in range(first, first + count):
            yield _attempted(target, random.Random(f"{name}/{seed}/{number}"), number, limit_s)


def _attempted(target: Target, rng: random.Random, number: int, limit_s: float) -> Result:
    try:
        with _limited(limit_s):
            target.attempt(rng)
    except RlhfError:
        return Result(number, "clear error")
    except _Late as error:
        return Result(number, "hang", _where(error), traceback.format_exc())
    except Exception as error:
        return Result(number, "traceback", _where(error), traceback.format_exc())
    return Result(number, "right")


class _Late(BaseException):
    """Derives from BaseException so that handlers of Exception do not catch it."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_Late` in the block after `seconds` of CPU time, or after `PATIENCE` times as long in wall time."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise _Late

    before = {one: signal.signal(one, late) for one in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, handler in before.items():
            signal.signal(one, handler)


def _where(error: BaseException) -> str:
    """The error's class and the last project line in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if Path(frame.filename).is_relative_to(ROOT) and "site-packages" not in frame.filename
    ]
    last = (ours or frames)[-1]
    file = Path(last.filename)
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    return f"{type(error).__name__} at {shown}:{last.lineno} in {last.name}"
