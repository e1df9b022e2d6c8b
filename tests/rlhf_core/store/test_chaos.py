"""Processes that share a store are stopped and killed, nodes lose power, connections break, and clocks are hours apart."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.faulty_proxy import drawn_faults, faulty
from tests.support.node_chaos import ROUND, TTL_S, expected
from tests.support.object_servers import SERVERS, environment, running

SKEWS = {"ada": 0, "ben": 90_000, "cy": -90_000}
RATES = {"503": 0.03, "reset": 0.02, "cut": 0.03, "lost": 0.02, "stale": 0.5}
"""How often a request is answered in this way. Of all requests, only listings can be stale."""

LONG = pytest.mark.timeout(5400)
"""Of many kills: half of the stops alone last 12 s each, and a killed process imports everything again."""


class Chaos:
    """Nodes that compute the same results, and are started again when they are killed."""

    def __init__(self, place: str, logs: Path, seed: int) -> None:
        self.place, self.logs, self.dice = place, logs, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.nodes = {node: self.start(node) for node in SKEWS}

    def start(self, node: str, rounds: int = 0) -> subprocess.Popen[bytes]:
        given = [self.place, str(self.logs), node, str(self.dice.random()), str(SKEWS.get(node, 0)), str(rounds)]
        command = [sys.executable, "-m", "tests.support.node_chaos", *given]
        with (self.logs / f"{node}.err").open("ab") as log:
            return subprocess.Popen(command, stderr=log)

    def strike(self, kills: int) -> None:
        """Stop and kill nodes at random while they compute until enough were killed, then let them finish."""
        try:
            while self.done["killed"] < kills:
                self._strike_one(self.dice.choice(list(self.nodes)))
            (self.logs / "enough").touch()
            for node in self.nodes.values():
                assert node.wait(300) == 0
        finally:
            for node in self.nodes.values():
                node.kill()
                node.wait()

    def _wait_until_it_begins(self, name: str) -> None:
        """Wait until a node begins its next result, and then a part of the time that this takes."""
        before, deadline = self._begun(name), time.monotonic() + 300
        while self._begun(name) == before:
            assert self.nodes[name].poll() is None, (self.logs / f"{name}.err").read_text()
            assert time.monotonic() < deadline, f"{name} began nothing in 300 s"
            time.sleep(0.02)
        time.sleep(self.dice.uniform(0.0, 1.2))

    def _begun(self, name: str) -> int:
        path = self.logs / f"{name}.begun"
        return path.stat().st_size if path.exists() else 0

    def _strike_one(self, name: str) -> None:
        self._wait_until_it_begins(name)
        node = self.nodes[name]
        if self.dice.random() < 0.3:
            os.kill(node.pid, signal.SIGSTOP)
            time.sleep(self.dice.choice([0.5, 1.5 * TTL_S]))
            os.kill(node.pid, signal.SIGCONT)
            self.done["stopped"] += 1
            return
        node.kill()
        node.wait()
        self.done["killed"] += 1
        if self.dice.random() < 0.4:
            self._cut_power(name)
        self.nodes[name] = self.start(name)

    def _cut_power(self, name: str) -> None:
        """Lose some files of the cache that need no fsync."""
        files = [path for path in (self.logs / name).rglob("*") if path.is_file() and "attempts" not in path.parts]
        for path in files:
            if path.name != "store.json" and self.dice.random() < 0.5:
                path.chmod(0o644)
                path.write_bytes(b"")
                self.done["emptied"] += 1

    def check(self) -> None:
        """Each result is right and was computed once, and a fresh node has hits for all of them."""
        lines = [line.split(maxsplit=2) for log in self.logs.glob("*.log") for line in log.read_text().splitlines()]
        assert [line for line in lines if line[0] == "error"] == []
        assert [line for line in lines if line[2] != expected(int(line[1]))] == []
        computed = Counter(number for action, number, _ in lines if action in ("RUN", "RESUME"))
        assert max(computed.values()) == 1, "a key has one commit"
        known = {int(number) for _, number, _ in lines}
        assert self.start("fresh", rounds=1 + max(known) // ROUND).wait(300) == 0
        found = set((self.logs / "fresh.log").read_text().splitlines())
        assert found >= {f"HIT {number} {expected(number)}" for number in known}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=[pytest.mark.full, LONG])])
def test_processes_that_are_stopped_and_killed_lose_no_result_and_replace_none(kills, tmp_path):
    chaos = Chaos(str(tmp_path / "store"), tmp_path, seed=kills)
    chaos.strike(kills)
    chaos.check()


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "kills"),
    [(SERVERS[0], 6), *(pytest.param(server, 40, marks=[pytest.mark.full, LONG]) for server in SERVERS)],
)
def test_so_do_nodes_that_share_a_bucket_whose_connections_break(server, kills, tmp_path, monkeypatch):
    with running(server, tmp_path) as address, faulty(address) as proxy:
        for name, value in environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        proxy.choose = drawn_faults(RATES, kills)
        chaos = Chaos("s3://rlhf/chaos", tmp_path, seed=kills)
        chaos.strike(kills)
        assert proxy.struck.keys() >= RATES.keys()
        proxy.choose = lambda line: ""
        chaos.check()
