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
from rlhf_core.processes.identity import process_state
from rlhf_core.store import leases
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.leases import Owner, hold, is_gone, living_owner
from rlhf_core.store.places import local
from tests.support.forks import soon

FORK = multiprocessing.get_context("fork")


def _hold_for_ever(folder: Path) -> None:
    with hold(folder, "k"):
        time.sleep(60)


@pytest.fixture
def other(tmp_path):
    """A process that holds the lease of `k`."""
    process = FORK.Process(target=_hold_for_ever, args=(tmp_path,), daemon=True)
    process.start()
    soon(lambda: living_owner(tmp_path, "k") is not None)
    yield process
    process.kill()
    process.join()


def _our_owner(folder: Path) -> Owner:
    with hold(folder, "k") as lease:
        return lease.owner


def test_a_lease_is_held_inside_the_block_and_gone_after_it(tmp_path):
    with hold(tmp_path, "k") as lease:
        owner = living_owner(tmp_path, "k")
        assert owner is not None and owner.pid == os.getpid() and owner.token == lease.owner.token
        lease.check()
        assert not lease.waited
    assert living_owner(tmp_path, "k") is None
    with pytest.raises(ZeroDivisionError), hold(tmp_path, "k"):
        1 / 0  # noqa: B018
    assert living_owner(tmp_path, "k") is None


def test_the_lease_of_a_killed_process_is_taken_over_at_once(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert (tmp_path / "k.json").exists() and living_owner(tmp_path, "k") is None
    started = time.monotonic()
    with hold(tmp_path, "k") as lease:
        assert time.monotonic() - started < 10.0, "a lease lasts 120 s; a dead owner must not cost that"
        lease.check()


def test_a_living_owner_is_waited_for_and_named_once(tmp_path, other):
    told: list[Owner] = []

    def kill_later(owner: Owner) -> None:
        told.append(owner)
        threading.Timer(0.6, other.kill).start()
        threading.Timer(0.6, other.join).start()

    with hold(tmp_path, "k", on_wait=kill_later) as lease:
        assert lease.waited
    assert [owner.pid for owner in told] == [other.pid]


def test_threads_of_one_process_exclude_each_other(tmp_path):
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with hold(tmp_path, "k"):
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


def test_an_owner_that_was_taken_over_is_stopped_at_the_fence(tmp_path):
    with hold(tmp_path, "k") as lease:
        thief = replace(lease.owner, token="thief")
        write_json(tmp_path / "k.json", asdict(thief))
        with pytest.raises(ArtifactError, match="took the lease over"):
            lease.check()
    assert (read_json(tmp_path / "k.json") or {})["token"] == "thief", "the new owner's lease must not be released"


def test_the_heartbeat_renews_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.05)
    with hold(tmp_path, "k") as lease:
        soon(lambda: (read_json(tmp_path / "k.json") or {"expires": 0})["expires"] > lease.owner.expires)
        lease.check()
        assert (read_json(tmp_path / "k.json") or {})["token"] == lease.owner.token


def test_a_process_number_given_to_another_process_is_not_the_owner(tmp_path):
    owner = _our_owner(tmp_path)
    assert not is_gone(owner)
    assert is_gone(replace(owner, pid_started=owner.pid_started - 1))


def _age(folder: Path, seconds: float) -> None:
    """Make the lease of `k` so old by the clock of the disk."""
    made = (folder / "k.json").stat().st_mtime - seconds
    os.utime(folder / "k.json", (made, made))


def test_on_our_machine_a_silent_process_loses_its_lease_only_if_it_is_stopped(tmp_path, other):
    _age(tmp_path, 1000)
    assert living_owner(tmp_path, "k") is not None, "it may be in a long call into a library"
    os.kill(other.pid, signal.SIGSTOP)
    soon(lambda: process_state(other.pid, _started(tmp_path)) == "stopped")
    assert living_owner(tmp_path, "k") is None
    os.kill(other.pid, signal.SIGCONT)
    soon(lambda: living_owner(tmp_path, "k") is not None)


def _started(folder: Path) -> int:
    return int((read_json(folder / "k.json") or {})["pid_started"])


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
@pytest.mark.parametrize("skew", [-130.0, 0.0, 130.0])
def test_elsewhere_only_silence_decides_and_no_clock_but_the_disks(tmp_path, field, skew):
    elsewhere: dict[str, Any] = {field: "elsewhere", "pid": 2**22 + 1}  # no such process here
    owner = replace(_our_owner(tmp_path), **elsewhere, expires=time.time() + skew)
    write_json(tmp_path / "k.json", asdict(owner))
    assert living_owner(tmp_path, "k") == owner and not is_gone(owner)
    _age(tmp_path, leases.TTL_SECONDS - 20)
    assert living_owner(tmp_path, "k") == owner and leases.sweep(tmp_path) == []
    _age(tmp_path, 40)
    assert living_owner(tmp_path, "k") is None  # at the first look, as whoever only plans needs it
    assert leases.sweep(tmp_path) == [], "whoever wants it has the time to watch"


@pytest.mark.parametrize("renewed", [True, False])
def test_a_jump_of_the_disks_clock_takes_no_lease_from_an_owner_who_renews_it(tmp_path, monkeypatch, renewed):
    monkeypatch.setattr(leases, "WATCH_SECONDS", 0.6)
    owner = replace(_our_owner(tmp_path), host="elsewhere")
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):  # each time it looks old at once: the clock of the disk is ahead
            write_json(tmp_path / "k.json", asdict(owner))
            _age(tmp_path, leases.TTL_SECONDS + 10)

    write_json(tmp_path / "k.json", asdict(owner))
    _age(tmp_path, leases.TTL_SECONDS + 10)
    beating = threading.Thread(target=renew)
    if renewed:
        beating.start()
    taken = threading.Event()

    def take() -> None:
        with hold(tmp_path, "k"):
            taken.set()

    wanting = threading.Thread(target=take)
    wanting.start()
    assert not taken.wait(0.5)
    assert taken.wait(1.5) is not renewed
    if renewed:
        stop.set()
        beating.join()
    wanting.join(10)
    assert taken.is_set()


def test_a_sweep_removes_the_leases_of_the_gone_and_names_them(tmp_path):
    assert leases.sweep(tmp_path / "nowhere") == [] and not (tmp_path / "nowhere").exists()
    dead = replace(leases.ourselves(), pid=1, pid_started=1, token="x")
    elsewhere = replace(dead, host="elsewhere", expires=time.time() + 60)
    write_json(tmp_path / "dead.json", asdict(dead))
    write_json(tmp_path / "elsewhere.json", asdict(elsewhere))
    with hold(tmp_path, "ours"):
        assert leases.sweep(tmp_path) == [("dead", dead)]
        assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["elsewhere", "ours"]


@pytest.mark.parametrize("name", ["host", "pid", "pid_started", "token", "expires"])
def test_a_lease_with_wrong_fields_is_free(tmp_path, name):
    write_json(tmp_path / "k.json", asdict(_our_owner(tmp_path)) | {name: ["what"]})
    assert living_owner(tmp_path, "k") is None
    with hold(tmp_path, "k") as lease:
        lease.check()


@pytest.mark.parametrize("how", ["No locks available", "a locked file can be locked again"])
def test_a_disk_without_file_locks_is_named(tmp_path, monkeypatch, how):
    def no_locks(descriptor: int, operation: int) -> None:
        if how.startswith("No"):
            raise OSError(errno.ENOLCK, how)

    monkeypatch.setattr(local.fcntl, "flock", no_locks)
    with (
        pytest.raises(ArtifactError, match=rf"does not support file locks \({how}\).*choose a folder on another disk"),
        hold(tmp_path / "leases", "k"),
    ):
        pass


def test_a_lease_that_cannot_be_read_for_a_moment_is_not_lost(tmp_path, monkeypatch):
    def away(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with hold(tmp_path, "k") as lease:
        with monkeypatch.context() as patch:
            patch.setattr(local, "read_json", away)
            assert lease.may_be_ours()
            with pytest.raises(OSError, match="Stale"):
                lease.check()
        assert lease.may_be_ours()
        write_json(tmp_path / "k.json", asdict(replace(lease.owner, token="thief")))
        assert not lease.may_be_ours()


def test_a_long_time_between_two_looks_counts_as_one_heartbeat(monkeypatch):
    now = 0.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    watch = leases._Watch()
    assert not watch.is_over("1", leases.WATCH_SECONDS)
    now = 1000.0  # this machine stood still, and perhaps the owner's, too: 20 s
    assert not watch.is_over("1", leases.WATCH_SECONDS)
    looks = 0
    while not watch.is_over("1", leases.WATCH_SECONDS):
        now, looks = now + 0.5, looks + 1
    assert looks == (leases.WATCH_SECONDS - leases.HEARTBEAT_SECONDS) / 0.5


def _change_for_ever(folder: Path) -> None:
    with local.alone(folder):
        (folder / "locked").touch()
        time.sleep(60)


def test_who_waits_for_a_process_that_stands_still_in_a_change_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(local, "LOCK_SLOW_SECONDS", 0.05)
    process = FORK.Process(target=_change_for_ever, args=(tmp_path,), daemon=True)
    process.start()
    soon((tmp_path / "locked").exists)
    waiting = threading.Thread(target=_our_owner, args=(tmp_path,))
    waiting.start()
    soon(lambda: "still waiting for another process to release the lock" in caplog.text)
    process.kill()
    waiting.join(10)
    assert not waiting.is_alive()
    process.join()


def test_nobody_takes_a_lease_over_from_who_is_undisturbed(tmp_path):
    write_json(tmp_path / "gone.json", asdict(replace(leases.ourselves(), pid=1, pid_started=1)))
    with hold(tmp_path, "k") as lease:
        with lease.undisturbed():
            sweeping = threading.Thread(target=leases.sweep, args=(tmp_path,))
            sweeping.start()
            sweeping.join(0.2)
            assert sweeping.is_alive(), "it changes leases"
        sweeping.join(10)
        write_json(tmp_path / "k.json", asdict(replace(lease.owner, token="thief")))
        with pytest.raises(ArtifactError, match="took the lease over"), lease.undisturbed():
            pytest.fail("not ours any more")
