"""The history of the attempts at a key: their number, how each ended, and the work that the next can resume from.

Each attempt works in its own folder. The next attempt takes over the work of the last by one rename. So a process that
lost its lease without noticing, and runs on for a step, finds its folder gone and cannot touch its successor's files.
"""

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.layout import (
    CHECKPOINTS,
    make_folder,
    remove_tree,
    temporary_for,
)
from rlhf_core.store.leases import Lease, name_of
from rlhf_core.store.protocol import Store

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
FAILURES = "failures.jsonl"
"""Numbers of failed answers (`rlhf_core.stage.failures`)."""
UNSEEN = "unseen.jsonl"
"""Reads of user code beyond the key."""
_MOST_DIGITS = 10  # of the number of an attempt in the name of its folder

Status = Literal["running", "failed", "interrupted", "committed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a key. `status` stays `running` if the process is killed; `failure` is the class and text of the
    error, or the reason why it was stopped.

    `code` holds the digest of each module of the stage as the attempt ran it; it is empty in files of older versions.
    """

    number: int
    started: str
    host: str
    pid: int
    resumed_from: int | None
    status: Status
    failure: str
    seconds: float
    code: Mapping[str, str] = field(default_factory=dict)
    forced: bool = False
    """Whether it was to replace a result, or to start over."""
    halted: bool = False
    """Whether it has saved its work and waits for people, time or money: the same command resumes it."""
    inputs: Sequence[str] = ()
    """Uris of its inputs; empty in files of older versions."""
    continues: bool = False
    """Whether it resumes a forced attempt that has halted: if it is killed, the next one does so too."""


_ATTEMPTS = TypeAdapter(list[Attempt])  # unknown fields of other versions are ignored


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The attempts at a key: the history that all nodes share, and this node's folder of their files.

    Only the holder of the lease writes the history.
    """

    store: Store
    key: str
    path: Path
    lease: Lease | None = None


def history(folder: AttemptFolder) -> list[Attempt]:
    """Load the attempts recorded in `folder` (attempts/<key>), oldest first."""
    return _read(folder)[1]


def begin(
    folder: AttemptFolder,
    *,
    label: str,
    resumed_from: int | None,
    code: Mapping[str, str],
    inputs: Sequence[str] = (),
    forced: bool = False,
    continues: bool = False,
) -> Attempt:
    """Record a new attempt and create its folders; the caller holds the lease, inside `Lease.undisturbed`.

    The output of killed attempts is removed; the work that they can be resumed from moves to the new work folder.
    """
    past = history(folder)
    attempt = Attempt(
        number=max([0, *(item.number for item in past[-1:]), *work_numbers(folder), *_numbered(folder, "out")]) + 1,
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        host=socket.gethostname(),
        pid=os.getpid(),
        resumed_from=resumed_from,
        status="running",
        failure="",
        seconds=0.0,
        code=dict(code),
        inputs=tuple(inputs),
        forced=forced,
        continues=continues,
    )
    left = [folder.path / f"out-{number}" for number in _numbered(folder, "out")]
    earlier = latest_work(folder) if work_numbers(folder) else None
    _write(folder, label, [*past, attempt])  # fenced: the folders moved below were chosen while the lease was ours
    for out in left:
        _remove_output(out)
    if earlier is not None:
        earlier.rename(work(folder, attempt))
    make_folder(work(folder, attempt))
    output(folder, attempt).mkdir()
    return attempt


def end(
    folder: AttemptFolder,
    attempt: Attempt,
    *,
    label: str,
    status: Status,
    failure: str,
    seconds: float,
    halted: bool = False,
) -> None:
    """Record how the attempt ended and remove its output folder, if it still exists."""
    _remove_output(output(folder, attempt))
    past = {item.number: item for item in history(folder)}
    ended = past.pop(attempt.number, attempt)  # as recorded, because another process may have marked it
    ended = replace(ended, status=status, failure=failure, seconds=round(seconds, 3), halted=halted)
    _write(folder, label, [*past.values(), ended])


def _remove_output(out: Path) -> None:
    """Remove an output folder. A process that was taken over may be moving it now: only one gets all of it."""
    gone = temporary_for(out)
    with suppress(FileNotFoundError):
        out.rename(gone)
    remove_tree(gone)


def abandon(folder: AttemptFolder, *, committed: bool) -> tuple[str, Attempt] | None:
    """Mark the attempt still recorded as running as killed; return its label and the attempt, or None if there is none.

    The caller holds the lease, so no process is working there. `committed`: whether it had written its record.
    """
    label, past = _read(folder)
    if not past or past[-1].status != "running":
        return None
    failure = f"process {past[-1].pid} on {past[-1].host} ended without reporting a result"
    status: Status = "committed" if committed else "interrupted"
    end(folder, past[-1], label=label, status=status, failure=failure, seconds=past[-1].seconds)
    return label, replace(past[-1], status=status, failure=failure)


def output(folder: AttemptFolder, attempt: Attempt) -> Path:
    """The folder into which the attempt writes its artifact."""
    return folder.path / f"out-{attempt.number}"


def work(folder: AttemptFolder, attempt: Attempt) -> Path:
    """The folder of reusable work: checkpoints, shards, metrics, failures, logs."""
    return folder.path / f"work-{attempt.number}"


def latest_work(folder: AttemptFolder) -> Path:
    """The work folder of the last attempt; it may not exist."""
    return folder.path / f"work-{max(work_numbers(folder), default=0)}"


def checkpoints(folder: AttemptFolder) -> Path:
    """The folder of the last attempt's checkpoints; it may not exist."""
    return latest_work(folder) / CHECKPOINTS


def metrics(folder: AttemptFolder) -> Path:
    """The metrics file of all attempts that resumed from one another; it may not exist.

    If a later attempt on another node has stored it in the bucket, it is fetched from there.
    """
    if isinstance(folder.store, BucketStore) and folder.lease is None:
        found = folder.store.recent(name_of(folder.key))
        work = {} if found is None else found.value.get("work") or {}
        if METRICS in work.get("files", {}) and work["attempt"] > max(work_numbers(folder), default=0):
            return folder.store.gather(folder.key, {METRICS: work["files"][METRICS]}) / METRICS
    return latest_work(folder) / METRICS


def stored_metrics(folder: AttemptFolder, number: int) -> dict[str, Any]:
    """Upload the metrics file of an attempt; returns the entry that stays in the table of its result, {} on a disk."""
    work = folder.path / f"work-{number}"
    if not (isinstance(folder.store, BucketStore) and folder.lease and (work / METRICS).exists()):
        return {}
    last = folder.lease.latest().value.get("work") or {}
    return folder.store.save_work(folder.key, folder.lease.token, work, last, [METRICS]) | {"attempt": number}


def unfinished_work(folder: AttemptFolder) -> list[str]:
    """Names of the files besides checkpoints (shards, tables) from which a stage can resume."""
    return _unfinished(latest_work(folder))


def clear(folder: AttemptFolder, *, keep_metrics: bool, until: Attempt | None = None) -> None:
    """Remove checkpoints, unfinished work and its failures; history and logs stay, and on request the metrics.

    `until` limits this to the files of that attempt and earlier ones: a later attempt may belong to another process.
    """
    numbers = [number for number in work_numbers(folder) if until is None or number <= until.number]
    for number in numbers:
        if number != max(numbers):  # written by a process after another one had taken over
            remove_tree(folder.path / f"work-{number}")
    if numbers:
        left = folder.path / f"work-{max(numbers)}"
        names = [CHECKPOINTS, FAILURES, UNSEEN, *_unfinished(left), *(() if keep_metrics else (METRICS,))]
        for path in (left / name for name in names):
            remove_tree(path)
    for number in _numbered(folder, "out"):
        if until is None or number <= until.number:
            _remove_output(folder.path / f"out-{number}")


def drop_replaced(folder: AttemptFolder) -> None:
    """Remove the work on this node that an attempt, perhaps on another node, has not gone on with but started over."""
    replaced = [
        before
        for before, after in pairwise(history(folder))
        if before.status == "committed" or (after.forced and not after.continues)
    ]
    if replaced:
        clear(folder, keep_metrics=False, until=replaced[-1])


def is_resumable(folder: AttemptFolder, finished: int) -> bool:
    """Whether work continues beyond attempt `finished`, whose result misfits and is to be replaced."""
    past = history(folder)
    return bool(past) and past[-1].number > finished and past[-1].status != "committed" and not past[-1].forced


def give_way(folder: AttemptFolder, attempt: Attempt) -> None:
    """Remove the files that an attempt wrote after a later attempt took over its work; nothing reads them.

    Without a later work folder they stay: the later attempt may be recorded and not yet have moved them.
    """
    if max(work_numbers(folder), default=0) > attempt.number:
        remove_tree(work(folder, attempt))
        _remove_output(output(folder, attempt))


def work_numbers(folder: AttemptFolder) -> list[int]:
    """Numbers of the attempts that have a work folder."""
    return _numbered(folder, "work")


def _numbered(folder: AttemptFolder, kind: str) -> list[int]:
    found = (path.name.removeprefix(f"{kind}-") for path in folder.path.glob(f"{kind}-*"))
    return [int(number) for number in found if number.isdecimal() and len(number) <= _MOST_DIGITS]


def _unfinished(left: Path) -> list[str]:
    if not left.is_dir():
        return []
    return sorted(path.name for path in left.iterdir() if not _is_ours(path.name) and not path.name.endswith(".log"))


def _is_ours(name: str) -> bool:
    return name in (METRICS, FAILURES, UNSEEN, CHECKPOINTS) or name.startswith(".")


def _read(folder: AttemptFolder) -> tuple[str, list[Attempt]]:
    """The label and the attempts in the table of a key."""
    found = folder.lease.latest() if folder.lease is not None else folder.store.recent(name_of(folder.key))
    value = {} if found is None else found.value
    try:
        return str(value.get("label", "")), _ATTEMPTS.validate_python(value.get("attempts", []))
    except ValidationError:
        logger.warning("the history of %s cannot be read; counting attempts from 1", folder.key[:12])
        return "", []


def _write(folder: AttemptFolder, label: str, attempts: list[Attempt]) -> None:
    """Write the history while the lease is ours. Raises Lost otherwise."""
    assert folder.lease is not None
    listed = json.loads(json.dumps([asdict(item) for item in attempts]))
    folder.lease.update(lambda value: value | {"label": label, "attempts": listed})
