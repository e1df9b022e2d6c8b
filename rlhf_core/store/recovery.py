"""Clean up after a killed process: record how its attempt ended and remove work that no attempt will resume."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt
from rlhf_core.store.leases import lease_file, living_owner


def tidy(store: ArtifactStore, key: str) -> tuple[str, Attempt] | None:
    """Clean up after processes that have ended; return label and attempt if one was still recorded as running.

    Checkpoints and shards stay as long as the key has no record: the next attempt resumes from them. Nothing is
    changed while another process computes the key.
    """
    folder = store.layout.attempt(key)
    if not _is_untidy(store, folder, key) or living_owner(store.layout.leases, key) is not None:
        return None
    with store.lease(key) as lease:  # taking over and releasing the lease removes that of the dead process
        record = store.record(key)
        with lease.undisturbed():
            past = attempts.history(folder)
            # The record may be of an earlier attempt: then this one was forced, and was killed before its own commit.
            committed = record is not None and bool(past) and record.attempts == past[-1].number
            ended = attempts.abandon(folder, committed=committed)
            if record is not None:
                attempts.clear(folder, keep_metrics=True)
    return ended


def _is_untidy(store: ArtifactStore, folder: Path, key: str) -> bool:
    past = attempts.history(folder)
    running = bool(past) and past[-1].status == "running"
    unfinished = bool(attempts.unfinished_work(folder)) or attempts.checkpoints(folder).exists()
    return running or unfinished or lease_file(store.layout.leases, key).exists()
