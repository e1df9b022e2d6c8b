"""Processes that share a store are stopped and killed, nodes lose power, connections break, and clocks are hours apart."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faulty_proxy import faulty
from tests.support.node_chaos import TTL_S, expected, open_node, run_number
from tests.support.object_servers import SERVERS, environment, running

SKEWS = {"ada": 0, "ben": 90_000, "cy": -90_000}
RATES = {"503": 0.03, "reset": 0.02, "cut": 0.03, "lost": 0.02, "stale": 0.5}
"""How often a request is answered in this way. Of all requests, only listings can be stale."""


class Chaos:
    """Nodes that compute the same results, and are started again when they are killed."""

    def __init__(self, place: str, logs: Path, count: int, seed: int) -> None:
        self.place, self.logs, self.count, self.dice = place, logs, count, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.nodes = {node: self.start(node) for node in SKEWS}

    def start(self, node: str) -> subprocess.Popen[bytes]:
        given = [self.place, str(self.logs), node, str(self.dice.random()), str(SKEWS[node]), str(self.count)]
        command = [sys.executable, "-m", "tests.support.node_chaos", *given]
        with (self.logs / f"{node}.err").open("ab") as log:
            return subprocess.Popen(command, stderr=log)

    def strike(self, kills: int) -> None:
        """Stop and kill nodes at random until enough were killed, then let them finish."""
        try:
            while self.done["killed"] < kills:
                time.sleep(self.dice.uniform(0.5, 3.0))
                self._strike_one(self.dice.choice(list(self.nodes)))
            for node in self.nodes.values():
                assert node.wait(300) == 0
        finally:
            for node in self.nodes.values():
                node.kill()
                node.wait()

    def _strike_one(self, name: str) -> None:
        node = self.nodes[name]
        if node.poll() is None and self.dice.random() < 0.3:
            os.kill(node.pid, signal.SIGSTOP)
            time.sleep(self.dice.choice([0.5, 1.5 * TTL_S]))
            os.kill(node.pid, signal.SIGCONT)
            self.done["stopped"] += 1
            return
        if node.poll() is None:
            node.kill()
            self.done["killed"] += 1
        node.wait()
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
        """Each result was computed once or is that of a killed node, and a fresh node has hits only."""
        lines = [line.split(maxsplit=2) for log in self.logs.glob("*.log") for line in log.read_text().splitlines()]
        assert [line for line in lines if line[0] == "error"] == []
        assert [line for line in lines if line[2] != expected(int(line[1]))] == []
        computed = Counter(number for action, number, _ in lines if action in ("RUN", "RESUME"))
        assert max(computed.values()) == 1, "a key has one commit"
        fresh = open_node(self.place, self.logs, "fresh")
        found = [run_number(fresh, number) for number in range(self.count)]
        assert found == [("HIT", expected(number)) for number in range(self.count)]


def choose(seed: int) -> Callable[[str], str]:
    dice = random.Random(seed)

    def fault(line: str) -> str:
        drawn = dice.choices([*RATES, ""], [*RATES.values(), 1.0])[0]
        return drawn if drawn != "stale" or "list-type" in line else ""

    return fault


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.full)])
def test_processes_that_are_stopped_and_killed_lose_no_result_and_replace_none(kills, tmp_path):
    chaos = Chaos(str(tmp_path / "store"), tmp_path, 2 * kills, seed=kills)
    chaos.strike(kills)
    chaos.check()


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "kills"), [(SERVERS[0], 6), *(pytest.param(server, 40, marks=pytest.mark.full) for server in SERVERS)]
)
def test_so_do_nodes_that_share_a_bucket_whose_connections_break(server, kills, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "fresh"))
    with running(server, tmp_path) as address, faulty(address) as proxy:
        for name, value in environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        proxy.choose = choose(kills)
        chaos = Chaos("s3://rlhf/chaos", tmp_path, kills, seed=kills)
        chaos.strike(kills)
        assert proxy.struck.keys() >= RATES.keys()
        proxy.choose = lambda line: ""
        chaos.check()
