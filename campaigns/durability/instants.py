"""Kill or stop a process at an instant: at a time, before its n-th change of a file, or inside a call.

In all cases but the first, the process does this itself. Changes of files are observed through Python's audit events
(and a wrapped `os.fsync`, which has none). Libraries that write from C++ (safetensors, torch.save, pyarrow, SQLite)
raise no events; instants inside calls and random times cover their writes.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

CALLS: Mapping[str, tuple[str, str, str]] = {
    "updating a model": ("rlhf_core.training.trainer", "LocalTrainer", "optim_step"),
    "saving a model": ("rlhf_core.training.trainer", "LocalTrainer", "save"),
    "restoring a model": ("rlhf_core.training.trainer", "LocalTrainer", "load"),
    "syncing weights": ("rlhf_core.sampling.hf_sampler", "HFSampler", "load_weights"),
    "sampling": ("rlhf_core.sampling.hf_sampler", "HFSampler", "generate"),
    "committing": ("rlhf_core.store.artifacts", "ArtifactStore", "commit"),
}
"""Operations in which a process may be killed: module, class, method."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class AtTime:
    """This many seconds after the process began; the parent sends the signal to the whole group."""

    seconds: float


@dataclass(frozen=True)
class AtOperation:
    """Before the `number`-th change (from 1) of a file with one purpose; not reached if the run has fewer changes."""

    purpose: str
    number: int


@dataclass(frozen=True)
class InCall:
    """`delay_s` after the start of the `number`-th call of a name in `CALLS`; not reached if the process ends first."""

    name: str
    number: int
    delay_s: float


@dataclass(frozen=True)
class InStage:
    """Before the `number`-th change of any file while the stage `label` runs."""

    label: str
    number: int


Instant: TypeAlias = AtTime | AtOperation | InCall | InStage


@dataclass
class Census:
    """Statistics of an undisturbed run: changes of files by purpose and by stage, calls and seconds, total seconds."""

    operations: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    calls: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0


def draw(source: random.Random, census: Census, *, reach: float, done: Collection[str]) -> Instant:
    """Draw an instant within the first `reach` (0 to 1) of a run like `census`, or in a stage that is not in `done`."""
    kind = source.choices(("time", "operation", "call", "stage"), weights=(0.25, 0.3, 0.2, 0.25))[0]
    share = source.uniform(0.0, min(1.0, reach))
    to_come = [label for label in census.stages if label and label not in done]
    if kind == "time":
        return AtTime(share * census.seconds)
    if kind == "stage" and to_come:
        label = source.choice(to_come)
        return InStage(label, source.randint(1, census.stages[label]))
    if kind == "call":
        name = source.choice(list(CALLS))
        # An undisturbed run never restores; the instant is the first call in a resumed run.
        seconds = census.calls.get(name) or [0.02]
        typical = sorted(seconds)[len(seconds) // 2]
        return InCall(name, 1 + int(share * len(seconds)), source.uniform(0.0, 1.2 * typical))
    # Draw the purpose first, since commits have few instants and checkpoints have many.
    what = source.choice(sorted(census.operations))
    return AtOperation(what, 1 + int(share * census.operations[what]))


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    """Stop this process and its whole group until someone sends SIGCONT."""
    os.killpg(os.getpgrp(), signal.SIGSTOP)


def obey(
    instant: Instant | None,
    root: Path,
    stage: Callable[[], str],
    last_words: Callable[[str], None],
    act: Callable[[], None] = die,
) -> None:
    """Make this process die, or call `act`, at `instant`, after passing the interrupted operation to `last_words`.

    `root` is the state folder; `stage` returns the label of the running stage, "" between stages.
    """

    def strike(what: str) -> None:
        last_words(what)
        act()

    match instant:
        case AtOperation(what, number):
            _strike_at_operation(lambda purpose: purpose == what, number, str(root), strike)
        case InStage(label, number):
            _strike_at_operation(lambda _: stage() == label, number, str(root), strike)
        case InCall(name, number, delay_s):
            _strike_in_call(name, number, delay_s, strike)


def count(root: Path, stage: Callable[[], str], census: Census) -> None:
    """Make this process count its changes of files below `root` and time its calls, for the rest of its life."""

    def changed(what: str) -> None:
        census.operations[what] = census.operations.get(what, 0) + 1
        census.stages[stage()] = census.stages.get(stage(), 0) + 1

    def called(name: str, run: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return run()
        finally:
            census.calls.setdefault(name, []).append(time.monotonic() - began)

    watch_files(str(root), changed)
    for name in CALLS:
        _wrap(name, functools.partial(called, name))


def purpose(path: str) -> str:
    """The purpose of a file, by its path below the state folder.

    >>> purpose("store/tables/keys/abcd.json")
    'table of a key'
    """
    parts = path.split("/")
    if parts[0] != "store" or len(parts) < 2:
        return "tracking" if parts[0].startswith("ml") else "logs"
    if parts[1] == "attempts" and len(parts) > 3:
        inside = parts[4:] if parts[3].startswith("work-") and len(parts) > 4 else parts[3:]
        return _purpose_in_attempt(inside[0], "/".join(inside[1:]))
    if parts[1] == "tables" and len(parts) > 2:
        return "table of a key" if parts[2] == "keys" else "labels and pins"
    return "commit: object" if parts[1] == "objects" else parts[1]


def _purpose_in_attempt(name: str, rest: str) -> str:
    if name.startswith("out-"):
        return "artifact"
    if name.startswith("work-"):
        return "work folder: taken over"
    if name == "ckpt":
        return "checkpoint" if not rest.startswith("step-") else "checkpoint: rename and evict"
    return "metrics" if name.startswith("metrics") else "shards"


# ---------------------------------------------------------------- striking


def _strike_at_operation(counts: Callable[[str], bool], number: int, root: str, strike: Callable[[str], None]) -> None:
    left = number

    def changed(what: str) -> None:
        nonlocal left
        left -= counts(what)
        if left == 0:
            left = -1  # `strike` may change files itself
            strike(what)

    watch_files(root, changed)


def _strike_in_call(name: str, number: int, delay_s: float, strike: Callable[[str], None]) -> None:
    left = number

    def called(run: Callable[[], Any]) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            threading.Timer(delay_s, strike, (name,)).start()
        return run()

    _wrap(name, called)


def _wrap(name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replace the callable of that name by `around(call)`."""
    module, owner_name, method = CALLS[name]
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(lambda: original(*args, **kwargs))

    setattr(owner, method, wrapped)


# ---------------------------------------------------------------- changes of files


def watch_files(root: str, changed: Callable[[str], None]) -> None:
    """Call `changed` with the purpose of a file before every change below `root`. It cannot be undone."""
    below = root.rstrip("/") + "/"

    def audit(event: str, args: tuple[Any, ...]) -> None:
        path = _changed_path(event, args)
        if path is not None and path.startswith(below):
            what = purpose(path[len(below) :])
            if what != "logs":
                changed(what)

    sys.addaudithook(audit)
    fsync = os.fsync

    def watched_fsync(fd: Any) -> None:
        audit("os.fsync", (fd if isinstance(fd, int) else fd.fileno(),))
        fsync(fd)

    os.fsync = watched_fsync


def _changed_path(event: str, args: tuple[Any, ...]) -> str | None:
    """The absolute path that an audit event is about to change; None if the event changes no file."""
    match event, args:
        case "open", (path, _, int(flags)) if flags & _WRITING:
            return _absolute(path, -1)
        case "os.rename", (_, target, _, folder):
            return _absolute(target, folder)
        case "os.link", (_, target, _, folder):
            return _absolute(target, folder)
        case (("os.remove" | "os.rmdir"), (path, folder)):
            return _absolute(path, folder)
        case (("os.mkdir" | "os.chmod"), (path, _, folder)):
            return _absolute(path, folder)
        case "os.utime", (path, _, _, folder):
            return _absolute(path, folder)
        case "os.truncate", (path, _):
            return _absolute(path, -1)
        case "os.fsync", (int(descriptor),):
            return _absolute(descriptor, -1)
    return None


def _absolute(path: Any, folder: int) -> str | None:
    try:
        if isinstance(path, int):
            return str(Path(f"/proc/self/fd/{path}").readlink())
        text = os.fsdecode(path)
        if text.startswith("/") or folder < 0:
            return text
        return str(Path(f"/proc/self/fd/{folder}").readlink() / text)
    except (OSError, TypeError):  # a pipe, or a descriptor that is already closed: not a file of the run
        return None
