"""Run two nodes with the real engines on one bucket, kill them, break their connections, and desynchronize clocks.

    python -m campaigns.durability.real_bucket --kills 40 --seed 0

Each round has a bucket folder, two nodes with a home and a cache each that run the same profile at once, and a fresh
node at its end. Exit status 0: digests and metrics equal an undisturbed run on disk, each stage was computed
once, and the fresh node had only cache hits.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil

from campaigns.durability import checks, processes, real_runs
from campaigns.durability.checks import StageResult
from campaigns.durability.clocks import Skew
from campaigns.durability.pipeline import set_one_thread
from campaigns.durability.real_runs import Run
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import store_root
from tests.support.faulty_proxy import FaultyProxy, drawn_faults, faulty
from tests.support.object_servers import SERVERS, environment, running

RATES = {"503": 0.02, "reset": 0.02, "cut": 0.02, "lost": 0.02, "stale": 0.3}
"""Probability of each fault per request. Only listings can be stale."""
CLOCKS = {"ada": Skew(90_000.0, 0.0, elsewhere=False), "ben": Skew(-90_000.0, 0.0, elsewhere=True)}
ON_TIME = Skew(0.0, 0.0, elsewhere=False)
KILLS_A_ROUND = 8
IN_STAGES, REACH = 0.8, 0.3
"""Fraction of kills that wait until a node is in a stage, and the maximum delay as a fraction of an undisturbed run."""


class Node:
    """A home with a separate cache, whose runs use the shared bucket."""

    def __init__(self, folder: Path, name: str, place: str) -> None:
        self.home, self.clocks = real_runs.new_home(folder / name), CLOCKS.get(name, ON_TIME)
        profile = self.home / real_runs.PROFILE
        profile.write_text(f'store = "{place}"\n{profile.read_text(encoding="utf-8")}', encoding="utf-8")

    def start(self) -> Run:
        return real_runs.start(self.home, self.clocks, variables={"RLHF_CACHE": str(self.home / "cache")})

    def kill(self, run: Run, *, alone: bool) -> None:
        """Kill a run's process, with or without its descendants, and wait until all processes of this node are gone."""
        real_runs.kill(run, alone=alone)
        deadline = time.monotonic() + real_runs.GONE_WITHIN_S
        while left := list(self._processes()):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.home}: these outlived their run: {left}")
            time.sleep(0.2)

    def _processes(self) -> Iterator[str]:
        for process in psutil.Process().children(recursive=True):
            try:
                ours = process.environ().get("RLHF_HOME") == str(self.home)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield " ".join(process.cmdline()[:4])
            except psutil.Error:
                continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="at least so many (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants and faults (default 0)")
    parser.add_argument("--server", choices=SERVERS, default=SERVERS[0], help=f"of the bucket (default {SERVERS[0]})")
    options = parser.parse_args()
    set_one_thread()
    processes.adopt_orphans()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as name:
        folder = Path(name)
        twin = real_runs.new_home(folder / "twin")
        seconds = real_runs.in_peace(twin)
        print(f"undisturbed, on disk: {seconds:.0f} s", flush=True)
        expected = checks.results(twin)
        with running(options.server, folder) as address, faulty(address) as proxy:
            os.environ |= environment(proxy.address)
            killed = wrong = 0
            while killed < options.kills:
                most = min(KILLS_A_ROUND, options.kills - killed)
                hit, problems = _round(folder / f"round-{killed:03d}", proxy, seconds, expected, dice, most)
                killed, wrong = killed + hit, wrong + len(problems)
                print("\n".join([f"{killed} kills; faults so far {dict(proxy.struck)}", *problems]), flush=True)
    return 1 if wrong else 0


def _round(
    folder: Path, proxy: FaultyProxy, seconds: float, twin: Mapping[str, StageResult], dice: random.Random, most: int
) -> tuple[int, list[str]]:
    """Kill two nodes `most` times until both have completed; returns the number of kills that hit, and the problems."""
    place, hit = f"s3://rlhf/{folder.name}", 0
    proxy.choose = drawn_faults(RATES, dice.random())
    nodes = {name: Node(folder, name, place) for name in CLOCKS}
    runs = {name: node.start() for name, node in nodes.items()}
    while hit < most and any(run.process.poll() is None for run in runs.values()):
        name = dice.choice(list(nodes))
        if dice.random() < IN_STAGES:
            real_runs.wait_until(partial(_has_begun, runs[name]), runs[name], real_runs.LIMIT_S)
        real_runs.wait_until(lambda: False, runs[name], dice.uniform(0.0, REACH) * seconds)
        if runs[name].process.poll() is None:
            at, alone = real_runs.stage(runs[name].log), dice.random() < 0.5
            nodes[name].kill(runs[name], alone=alone)
            runs[name], hit = nodes[name].start(), hit + 1
            print(f"{folder.name}: {name} killed at {at}{', its own process alone' if alone else ''}", flush=True)
    problems = [f"{name}: {how}" for name, run in runs.items() if (how := real_runs.finish(run)) != "completed"]
    logs = [log for node in nodes.values() for log in real_runs.logs(node.home)]
    made = Counter(label for log in logs for label in _computed(log))
    problems += [f"{label}: computed {number} times" for label, number in made.items() if number > 1]
    proxy.choose = lambda line: ""
    return hit, [f"{folder.name}: {problem}" for problem in [*problems, *_problems(folder, place, twin)]]


def _has_begun(run: Run) -> bool:
    return any(event["event"] == "started" and event["action"] != "HIT" for event in real_runs.events(run.log))


def _computed(log: Path) -> Iterator[str]:
    """Yield the stages that a run computed completely, without finding or awaiting their result."""
    actions: dict[str, str] = {}
    for event in real_runs.events(log):
        if event["event"] == "started":
            actions[event["label"]] = event["action"]
        elif actions.get(event["label"]) in ("RUN", "RESUME"):
            yield event["label"]


def _problems(folder: Path, place: str, twin: Mapping[str, StageResult]) -> Iterator[str]:
    """Yield the problems seen by a fresh node: differences from the twin, damage, and stages that it must compute."""
    fresh = Node(folder, "fresh", place)
    run = fresh.start()
    if (how := real_runs.finish(run)) != "completed":
        yield f"the fresh node {how}; read {run.log}"
    ran = [event for event in real_runs.events(run.log) if event["event"] == "started" and event["action"] != "HIT"]
    yield from (f"the fresh node: {event['label']} was {event['action']}" for event in ran)
    os.environ["RLHF_CACHE"] = str(folder / "cache")
    store = ArtifactStore(store_root(place))
    yield from checks.differences(dict(checks.every_result(store)), twin)
    yield from (f"damaged object {damage.digest[:12]}: {damage.problem}" for damage in store.verify())


if __name__ == "__main__":
    sys.exit(main())
