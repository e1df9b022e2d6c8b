"""Mathematical answers, compared by their meaning: 1/2, 0.5 and \\frac{1}{2} are equal (math-verify)."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from types import FrameType
from typing import Any

from rlhf_core.errors import RewardError, explain
from rlhf_core.rewards.library.labels import against_labels, expected_texts, needed
from rlhf_core.text import fold

logger = logging.getLogger(__name__)

_POWER = re.compile(r"-?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")


def math_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    timeout_s: float = 5.0,
    **columns: Any,
) -> list[float | None]:
    r"""Score 1.0 if the answer's final expression equals the label's, else 0.0.

    The label is LaTeX or plain, in `\boxed{}` or `$...$` or bare. None where the label is missing, where it is a table
    or a list of texts or cannot be read as mathematics, and where reading or comparing takes longer than `timeout_s` (a
    comparison that never ends inside one C call ends with the process's own deadline). RewardError outside the main
    thread: the deadline is a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RewardError(
            explain("math_reward", threading.current_thread().name, "runs in the main thread alone", "call it there")
        )
    math_verify = needed("math_verify", "math-verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it keeps no time; we do

    def judge(text: str, label: str) -> float | None:
        try:
            with _deadline(timeout_s):
                expected = _read_label(label, math_verify.parse)
                return float(_equal(expected, text, math_verify)) if expected else None
        except _Expired:
            logger.warning("not judged within %g s: label %r, answer ...%r", timeout_s, label[:80], text[-80:])
            return None

    return against_labels(completions, labels, judge)


class _Expired(BaseException):
    """Not an Exception, because math-verify and sympy catch those and continue."""


def _read_label(label: str, parse: Callable[..., list[Any]]) -> list[Any]:
    for text in map(fold, expected_texts(label)[-1:]):
        if "\\boxed" in text or "$" in text:
            return parse(text, parsing_timeout=None)
        text = text.strip().rstrip(".")
        text = f"{Decimal(text):f}" if _POWER.fullmatch(text) else text  # math-verify takes the e for Euler's number
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return []


def _equal(expected: list[Any], text: str, math_verify: Any) -> bool:
    return bool(math_verify.verify(expected, math_verify.parse(fold(text), parsing_timeout=None), timeout_seconds=None))


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
