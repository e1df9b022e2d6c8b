import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhf_core.processes.identity import process_stat, process_state
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.places.mirror import store_root
from tests.support.forks import soon
from tests.support.lease_chaos import TTL_S
from tests.support.object_servers import SERVERS, environment, running

KEYS = [sha256_text(f"chaos {number}") for number in range(40)]
STOPS, KILLS = 6, 2


def cause_chaos(place: str, logs: Path) -> Counter[str]:
    """Let five processes with skewed clocks compute 40 keys; stop some beyond the lease, kill two; return what they said."""
    command = [sys.executable, "-m", "tests.support.lease_chaos", place, str(logs)]
    workers = [
        subprocess.Popen([*command, str(number), str(skew), *KEYS])
        for number, skew in enumerate((0, 90_000, -90_000, 200, -200))
    ]
    soon(lambda: len(list(logs.glob("*.log"))) == len(workers), within_s=120)
    dice = random.Random(0)
    try:
        for turn in range(STOPS + KILLS):
            running = [worker for worker in workers if worker.poll() is None]
            if not running:
                break
            victim = dice.choice(running)
            if turn in (2, 5) and len(running) > 1:
                victim.kill()
                continue
            os.kill(victim.pid, signal.SIGSTOP)
            started = (process_stat(victim.pid) or ("", 0))[1]
            soon(lambda: process_state(victim.pid, started) == "stopped")  # noqa: B023
            time.sleep(dice.uniform(0.5, 2.0) * TTL_S)
            os.kill(victim.pid, signal.SIGCONT)
        for worker in workers:
            worker.wait(120)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return check(ArtifactStore(store_root(place)), sorted(logs.glob("*.log")))


def check(store: ArtifactStore, logs: list[Path]) -> Counter[str]:
    """Check that each key has one record, that of the only process that says so, or of one killed before it could."""
    lines = [line.split() for log in logs for line in log.read_text().splitlines()]
    committed: dict[str, list[str]] = {}
    for said, key, token in lines:
        if said == "committed":
            committed.setdefault(key, []).append(token)
    assert {key for key, tokens in committed.items() if len(tokens) > 1} == set(), "computed twice"
    records = {key: store.record(key) for key in KEYS}
    assert [key for key, record in records.items() if record is None] == [], "lost"
    wrong = [key for key, record in records.items() if record and committed.get(key, [record.label]) != [record.label]]
    assert wrong == [], "another's record was overwritten"
    assert len(KEYS) - len(committed) <= KILLS
    for record in records.values():
        assert record is not None and (store.path(record.handle) / "a.txt").read_text() == record.label
    return Counter(said for said, *_ in lines)


@pytest.mark.slow
def test_processes_that_are_stopped_and_killed_lose_no_key_and_overwrite_none(tmp_path):
    said = cause_chaos(str(tmp_path / "store"), tmp_path)
    assert said["committed"] >= len(KEYS) - KILLS


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_so_do_nodes_that_share_nothing_but_a_bucket(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "node-here"))
    with running(server, tmp_path) as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        said = cause_chaos("s3://rlhf/chaos", tmp_path)
    assert said["committed"] >= len(KEYS) - KILLS
