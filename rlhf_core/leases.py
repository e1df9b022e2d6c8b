"""Leases: who computes a key right now. One process computes, the others wait for its result.

A lease is a small file with its owner's host, boot, process and a secret token. A thread renews it. The owner is gone
when, on this machine, its process is gone, or when, anywhere, the lease was not renewed in time; then the next one
takes it over. A process that was taken over unawares learns it at `Lease.check`, before it would write its record.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.processes import here, process_stat, process_state
from rlhf_core.store_layout import read_json, write_json

logger = logging.getLogger(__name__)

TTL_SECONDS = 120.0
HEARTBEAT_SECONDS = 20.0
POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lease. `pid_started` is the process's start time in clock ticks after boot, so that a process
    number that was given to another process is not mistaken for the owner. `expires` is seconds of the wall clock."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: int
    token: str
    expires: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that this process holds. `waited` says whether another one held it first."""

    folder: Path
    key: str
    owner: Owner
    waited: bool

    def check(self) -> None:
        """Raise ArtifactError if somebody else has taken the lease over (the fence before a commit)."""
        holder = _read(self.folder, self.key)
        if holder is None or holder.token != self.owner.token:
            taker = "nobody" if holder is None else str(holder)
            raise ArtifactError(
                explain(f"lease {self.key[:12]}", taker, "took over while this process was not heard of", "run again")
            )


@contextmanager
def hold(folder: Path, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> Iterator[Lease]:
    """Hold the lease of `key`, waiting for a living owner to let go of it; `on_wait` is told once whom we wait for."""
    lease = _acquire(folder, key, on_wait)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(lease, stop), name=f"lease-{key[:8]}", daemon=True)
    heart.start()
    try:
        yield lease
    finally:
        stop.set()
        heart.join()
        _release(lease)


def living_owner(folder: Path, key: str) -> Owner | None:
    """Return who computes `key` right now; None if nobody does."""
    owner = _read(folder, key)
    return None if owner is None or is_gone(owner) else owner


def sweep(folder: Path) -> list[tuple[str, Owner]]:
    """Remove the leases whose owner is gone; return their keys and owners. (The next one to want them would, too.)"""
    if not folder.is_dir():
        return []
    swept = []
    with _alone(folder):
        for path in sorted(folder.glob("*.json")):
            owner = _read(folder, path.stem)
            if owner is not None and is_gone(owner):
                path.unlink(missing_ok=True)
                swept.append((path.stem, owner))
    return swept


def is_gone(owner: Owner) -> bool:
    """Say whether the owner will not come back.

    On our own machine the process itself is asked, so a suspended laptop or a long call into a library does not cost
    a living owner its lease; only a stopped process loses it, in time. Elsewhere the time alone decides.
    """
    late = time.time() > owner.expires
    if (owner.host, owner.boot_id, owner.pid_namespace) != here():
        return late
    state = process_state(owner.pid, owner.pid_started)
    return state == "gone" or (state == "stopped" and late)


# ---------------------------------------------------------------- the file


def _acquire(folder: Path, key: str, on_wait: Callable[[Owner], None] | None) -> Lease:
    ours = ourselves()
    waited = False
    while True:
        with _alone(folder):
            holder = _read(folder, key)
            if holder is None or is_gone(holder):
                if holder is not None:
                    logger.warning("lease %s: %s is gone; taking over", key[:12], holder)
                ours = replace(ours, expires=time.time() + TTL_SECONDS)
                _write(folder, key, ours)
                return Lease(folder, key, ours, waited)
        if not waited:
            waited = True
            logger.info("lease %s: waiting for %s, which computes it", key[:12], holder)
            if on_wait is not None:
                on_wait(holder)
        time.sleep(POLL_SECONDS)


def _beat(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        try:
            with _alone(lease.folder):
                holder = _read(lease.folder, lease.key)
                if holder is None or holder.token != lease.owner.token:
                    logger.error("lease %s was taken over by %s", lease.key[:12], holder)
                    return
                _write(lease.folder, lease.key, replace(holder, expires=time.time() + TTL_SECONDS))
        except OSError as error:
            logger.warning("lease %s could not be renewed: %s", lease.key[:12], error)


def _release(lease: Lease) -> None:
    with _alone(lease.folder):
        holder = _read(lease.folder, lease.key)
        if holder is not None and holder.token == lease.owner.token:
            lease_file(lease.folder, lease.key).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process or thread at a time change leases; the kernel frees the lock of a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lease_file(folder: Path, key: str) -> Path:
    """Return the file of the lease of `key`."""
    return folder / f"{key}.json"


def _read(folder: Path, key: str) -> Owner | None:
    stored = read_json(lease_file(folder, key))
    try:
        return None if stored is None else Owner(**stored)
    except TypeError:
        return None


def _write(folder: Path, key: str, owner: Owner) -> None:
    # Not waited for on the disk: after a power cut the owner is gone anyway.
    write_json(lease_file(folder, key), asdict(owner), durable=False)


# ---------------------------------------------------------------- processes


def ourselves() -> Owner:
    """Return this process as an owner, with a token of its own."""
    host, boot_id, pid_namespace = here()
    started = process_stat(os.getpid())
    return Owner(
        host=host,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        pid=os.getpid(),
        pid_started=-1 if started is None else started[1],
        token=secrets.token_hex(16),
        expires=0.0,
    )
