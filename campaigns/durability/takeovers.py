"""Stop a run until another run has taken over its work, and then wake it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from campaigns.durability import instants, lives, processes
from campaigns.durability.instants import AtTime, Instant
from campaigns.durability.lives import Life, Peace
from campaigns.durability.pipeline import LOG, Setup, read_events
from rlhf_core.store import layout, leases

KIND = "stopped, taken over, and woken"
SENTENCE = "took the lease over, because this process had not renewed it"
TAKEN_WITHIN_S = 8.0
"""If a takeover takes longer, it waits for the lock of the leases in the stopped process, which is then woken."""
ELSEWHERE = ("another-machine", "another-boot", "another-namespace")


def short_leases(*, ttl_s: float, heartbeat_s: float) -> None:
    """Shorten the lease times in this process so that a takeover takes seconds."""
    leases.TTL_S, leases.HEARTBEAT_S = ttl_s, heartbeat_s


def be_elsewhere() -> None:
    """Make this process claim another machine, so that no process here can check whether it is alive."""
    leases.here = layout.here = lambda: ELSEWHERE  # type: ignore[assignment]


def reconcile_elsewhere(store: Path, log: Path) -> None:
    """Remove the remains of a killed process of that other machine, as `rlhf reconcile` does there."""
    processes.run(partial(_reconcile, store), log)


def taken_over(folder: Path, peace: Peace, number: int, seed: int, *, mlflow: bool) -> Life:
    """Stop a run at a random instant, let a second one take over, and wake the first at a random moment.

    The second run must complete. The first run must complete or end with a one-sentence error. Half of the first runs
    appear to be on another machine.
    """
    source = random.Random(f"{seed}/takeover/{number}")
    census = peace.mlflow if mlflow else peace.memory
    setup = lives.new_home(folder / f"takeover-{number:04d}", mlflow, peace.database)
    life, began, log = Life(f"takeover {number}", mlflow), time.monotonic(), setup.home / LOG
    instant = instants.draw(source, census, reach=1.0, done=())
    elsewhere = source.random() < 0.5
    pause = source.choice((source.uniform(0.0, 1.0), source.uniform(0.0, 0.6 * peace.memory.seconds)))
    first = processes.start(partial(_run, setup, instant, elsewhere), log)
    stopped = processes.wait_until_stopped(first, stop_after_s=instant.seconds if isinstance(instant, AtTime) else None)
    second = processes.start(partial(_run, setup, None, False), log)
    if stopped:
        kind = f"{KIND}, as if on another machine" if elsewhere else KIND
        life.others.append(lives.describe(instant, setup.events, pid=first, kind=kind))
        _wait_for(partial(_works, setup, second), second, TAKEN_WITHIN_S)
        _wait_for(lambda: False, second, pause)
        os.killpg(first, signal.SIGCONT)
    ends = [processes.finish(one, kill_after_s=None)[0] for one in (first, second)]
    life.leftovers += [f"process {name}" for name in processes.wait_for_family()[1]]
    life.problems += wrong_ends(setup, ends, first, second)
    life.ends.append(f"the woken run {how(lives.last_words(setup, first))}")
    lives.examine(life, setup, peace.results, began)
    return life


def _run(setup: Setup, instant: Instant | None, elsewhere: bool) -> None:
    if elsewhere:
        be_elsewhere()
    short_leases(ttl_s=2.0, heartbeat_s=0.3)
    lives.logged(setup, instant, act=instants.stand_still)


def how(words: str) -> str:
    """Classify how a woken run ended, by its last message."""
    return "ended with one sentence" if SENTENCE in words else "completed" if not words else "failed"


def wrong_ends(setup: Setup, ends: list[processes.End], first: int, second: int) -> list[str]:
    """List the problems in how the two runs ended, one line each."""
    return wrong_words(ends, lives.last_words(setup, first), lives.last_words(setup, second))


def wrong_words(ends: Sequence[processes.End], first: str, second: str) -> list[str]:
    """List the problems in how two runs ended, given their last messages `first` and `second` (`Class: message`)."""
    wrong = [] if ends[1] == "completed" else [f"the second run {ends[1]}: {second}"]
    kind = first.partition(": lease ")[0]
    clear = kind in ("Lost", "ArtifactError") and SENTENCE in first and first.endswith("; run again")
    if ends[0] != "completed" and not (ends[0] == "failed" and clear):
        wrong.append(f"the woken run {ends[0]}: {first}")
    return wrong


def _works(setup: Setup, pid: int) -> bool:
    """Whether a run computes a stage; then it does its own work and does not wait for another run."""
    mine = [event for event in read_events(setup.events) if event["pid"] == pid and event["event"] == "started"]
    return any(event["action"] in ("RUN", "RESUME") for event in mine)


def _wait_for(condition: Callable[[], bool], child: int, seconds: float) -> None:
    """Wait until the condition holds, the child has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition() and not processes.has_ended(child):
        time.sleep(0.02)


def _reconcile(store: Path) -> None:
    from pipelines.services.reconcile import reconcile_store
    from rlhf_core.store.artifacts import ArtifactStore

    be_elsewhere()
    for line in reconcile_store(ArtifactStore(store)):
        print(line)
