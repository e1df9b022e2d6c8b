"""Retry a stage whose workers were lost, in the same run, from its newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from rlhf_core.errors import WorkerLostError, explain
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 5.0
"""Seconds between tries without progress; the pause grows with each try."""

Reached = tuple[int, int]
"""Step of the newest checkpoint, -1 without one, and the number of files (shards) beside the checkpoints."""


def reached(store: ArtifactStore, key: str) -> Reached:
    """Return the progress of the attempts at `key`; more progress compares greater."""
    folder = store.layout.attempt(key)
    checkpoint = Checkpoints(attempts.checkpoints(folder)).latest()
    entries = [attempts.latest_work(folder) / name for name in attempts.unfinished_work(folder)]
    files = sum(1 if entry.is_file() else sum(path.is_file() for path in entry.rglob("*")) for entry in entries)
    return (-1 if checkpoint is None else checkpoint.step, files)


def retry_lost_workers(
    attempt: Callable[[], T], *, label: str, retries: int, where: Callable[[], Reached], sleep: Callable[[float], None]
) -> T:
    """Return the result of `attempt`; after a WorkerLostError call it again, to resume from its last checkpoint.

    A try that makes more progress than those before it resets the count of `retries`. When they are used up, an error
    of the same class is raised with the number of tries. Any other error is raised at once.
    """
    best, failures = where(), 0
    while True:
        try:
            return attempt()
        except WorkerLostError as error:
            now = where()
            if now > best:
                best, failures = now, 0
            failures += 1
            if failures > retries:
                raise type(error)(_given_up(label, failures, error)) from error
            what = str(error).partition("; ")[0]  # without the remedy, which is for the user
            logger.warning("%s: %s; retrying from %s (retry %d of %d)", label, what, _place(now), failures, retries)
            sleep(PAUSE_S * (failures - 1))


def _place(at: Reached) -> str:
    step, files = at
    if step >= 0:
        return f"the checkpoint of step {step}"
    return f"the {files} finished files" if files else "the beginning"


def _given_up(label: str, failures: int, error: WorkerLostError) -> str:
    if failures == 1:
        return f"{label}: {error}"
    remedy = (
        "fix the cause and run again, it resumes from there; if memory ran out: lower runtime.trainer.micro_batch "
        "or runtime.sampler.kv_cache_gib"
    )
    return explain(label, f"lost its workers {failures} times without making progress", str(error), remedy)
