"""What a killed process left at a key: its attempt gets its true end, and what nobody will go on from is removed."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt
from rlhf_core.store.leases import lease_file, living_owner


def tidy(store: ArtifactStore, key: str) -> tuple[str, Attempt] | None:
    """Tidy up after processes that are gone; return label and attempt if one was still noted as running.

    Checkpoints and shards stay as long as the key has no record: the next attempt goes on from them. Nothing is
    touched while somebody computes the key.
    """
    folder = store.layout.attempt(key)
    if not _is_untidy(store, folder, key) or living_owner(store.layout.leases, key) is not None:
        return None
    with store.lease(key) as lease:  # taking it over and giving it back removes that of the dead
        record = store.record(key)
        with lease.undisturbed():
            past = attempts.history(folder)
            # The record may be of an earlier attempt: then this one was forced, and was killed before it came to its own.
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
