import errno
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store import disk, disk_lock, leases
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.leases import Lost, Owner, hold, is_gone, living_owner, name_of, ourselves, owner_in
from rlhf_core.store.protocol import update
from tests.support.forks import soon

FORK = multiprocessing.get_context("fork")


def _hold_for_ever(folder: Path) -> None:
    with hold(DiskStore(folder), "k"):
        time.sleep(60)


@pytest.fixture
def shared(tmp_path) -> DiskStore:
    return DiskStore(tmp_path)


@pytest.fixture
def other(shared):
    """A process that holds the lease of `k`."""
    process = FORK.Process(target=_hold_for_ever, args=(shared.folder,), daemon=True)
    process.start()
    soon(lambda: living_owner(shared, "k") is not None)
    yield process
    process.kill()
    process.join()


def _owner(shared: DiskStore) -> Owner | None:
    """The owner in the table of `k`."""
    found = shared.read(name_of("k"))
    return None if found is None else owner_in(found.value)


def _give(shared: DiskStore, owner: Owner) -> None:
    """Let `owner` hold the lease of `k`."""
    update(shared, name_of("k"), lambda value: value | {"lease": asdict(owner)})


def test_a_lease_is_held_inside_the_block_and_gone_after_it(shared):
    with hold(shared, "k") as lease:
        owner = living_owner(shared, "k")
        assert owner is not None and owner.pid == os.getpid() and owner.token == lease.token
        lease.check()
    assert _owner(shared) is None
    with pytest.raises(ZeroDivisionError), hold(shared, "k"):
        1 / 0  # noqa: B018
    assert _owner(shared) is None


def test_the_lease_of_a_killed_process_is_taken_over_at_once(shared, other):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert _owner(shared) is not None and living_owner(shared, "k") is None
    started = time.monotonic()
    with hold(shared, "k") as lease:
        assert time.monotonic() - started < 10.0, "a lease lasts 120 s; a dead owner must not cost that"
        lease.check()


def test_a_living_owner_is_waited_for_and_named_once(shared, other):
    told: list[Owner] = []

    def kill_later(owner: Owner) -> None:
        told.append(owner)
        threading.Timer(0.6, other.kill).start()
        threading.Timer(0.6, other.join).start()

    with hold(shared, "k", on_wait=kill_later):
        pass
    assert [owner.pid for owner in told] == [other.pid]


def test_threads_of_one_process_exclude_each_other(shared):
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with hold(shared, "k"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_a_lease_whose_release_failed_does_not_keep_its_own_process_waiting(shared, monkeypatch):
    def broken(path: Path, raw: bytes, *, is_new: bool) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, hold(shared, "k") as lease:
        patch.setattr(disk, "_replace", broken)
    left = _owner(shared)
    assert left is not None and left.token == lease.token, "the release failed"
    assert living_owner(shared, "k") is None
    started = time.monotonic()
    with hold(shared, "k") as again:
        assert time.monotonic() - started < 10.0 and again.token != lease.token


def test_an_owner_that_was_taken_over_is_stopped_at_the_fence(shared):
    with hold(shared, "k") as lease:
        _give(shared, replace(ourselves(), token="thief"))
        with pytest.raises(Lost, match="took the lease over"):
            lease.check()
        with pytest.raises(Lost, match="took the lease over"):
            lease.update(lambda value: value | {"record": {"object": "x"}})
    found = shared.read(name_of("k"))
    assert found is not None and "record" not in found.value
    assert found.value["lease"]["token"] == "thief", "the lease of the new owner must not be released"


def test_the_heartbeat_renews_a_lease(shared, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    with hold(shared, "k") as lease:
        soon(lambda: (_owner(shared) or ourselves()).beat > 1)
        lease.check()


def test_a_process_number_given_to_another_process_is_not_the_owner():
    owner = ourselves()
    assert not is_gone(owner)
    assert is_gone(replace(owner, pid_started=owner.pid_started - 1))


def _age(shared: DiskStore, seconds: float) -> None:
    """Make the table of `k` so old by the clock of the disk."""
    path = shared.folder / "tables" / "keys" / "k.json"
    made = path.stat().st_mtime - seconds
    os.utime(path, (made, made))


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_for_a_reader_an_owner_elsewhere_lives_until_its_lease_is_old_by_the_clock_of_the_disk(shared, field):
    elsewhere: dict[str, Any] = {field: "elsewhere", "pid": 2**22 + 1}  # no such process here
    owner = replace(ourselves(), **elsewhere)
    _give(shared, owner)
    assert living_owner(shared, "k") == owner and not is_gone(owner)
    _age(shared, leases.TTL_S - 20)
    assert living_owner(shared, "k") == owner
    _age(shared, 40)
    assert living_owner(shared, "k") is None


@pytest.mark.parametrize("renewed", [True, False])
def test_only_a_lease_without_heartbeats_is_taken_over_however_old_it_looks(shared, monkeypatch, renewed):
    monkeypatch.setattr(leases, "TTL_S", 0.6)
    owner = replace(ourselves(), host="elsewhere")
    _give(shared, owner)
    _age(shared, 1000)
    stop, taken = threading.Event(), threading.Event()

    def renew() -> None:
        beat = 0
        while not stop.wait(0.1):
            beat += 1
            _give(shared, replace(owner, beat=beat))
            _age(shared, 1000)

    def take() -> None:
        with hold(shared, "k"):
            taken.set()

    beating, wanting = threading.Thread(target=renew), threading.Thread(target=take)
    if renewed:
        beating.start()
    wanting.start()
    assert not taken.wait(0.4)
    assert taken.wait(3.0) is not renewed
    if renewed:
        stop.set()
        beating.join()
    wanting.join(10)
    assert taken.is_set()


@pytest.mark.parametrize("how", ["No locks available", "a locked file can be locked again"])
def test_a_disk_without_file_locks_is_named(shared, monkeypatch, how):
    def no_locks(descriptor: int, operation: int) -> None:
        if how.startswith("No"):
            raise OSError(errno.ENOLCK, how)

    monkeypatch.setattr(disk_lock.fcntl, "flock", no_locks)
    rule = rf"does not support file locks \({how}\).*choose a folder on another disk"
    with pytest.raises(ArtifactError, match=rule), hold(shared, "k"):
        pass


def test_a_lease_that_cannot_be_read_for_a_moment_is_not_lost(shared, monkeypatch):
    def away(self: DiskStore, name: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with hold(shared, "k") as lease:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "read", away)
            lease.fence()
            with pytest.raises(OSError, match="Stale"):
                lease.check()
        lease._looked.clear()
        lease.fence()
        _give(shared, replace(ourselves(), token="thief"))
        lease._looked.clear()
        for _ in range(2):  # a process that has lost its lease has lost it at each look
            with pytest.raises(Lost):
                lease.fence()


def test_a_long_time_between_two_looks_counts_as_one_heartbeat(monkeypatch):
    now = 0.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    watch = leases._Watch()
    assert not watch.is_over("1")
    now = 1000.0  # this machine stood still, and perhaps the owner's, too: 20 s
    assert not watch.is_over("1")
    looks = 0
    while not watch.is_over("1"):
        now, looks = now + 0.5, looks + 1
    assert looks == (leases.TTL_S - leases.HEARTBEAT_S) / 0.5


def _change_for_ever(folder: Path) -> None:
    with disk_lock.alone(folder):
        (folder / "locked").touch()
        time.sleep(60)


def test_a_process_that_waits_for_a_suspended_one_says_so(shared, monkeypatch, caplog):
    monkeypatch.setattr(disk_lock, "LOCK_SLOW_SECONDS", 0.05)
    locks = shared.folder / "locks"
    process = FORK.Process(target=_change_for_ever, args=(locks,), daemon=True)
    process.start()
    soon((locks / "locked").exists)
    waiting = threading.Thread(target=_give, args=(shared, ourselves()))
    waiting.start()
    soon(lambda: "still waiting for another process to release the lock" in caplog.text)
    process.kill()
    waiting.join(10)
    assert not waiting.is_alive()
    process.join()
