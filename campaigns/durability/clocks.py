"""Run two runs on one store with different wrong clocks, which also affect the clock of the disk."""

from __future__ import annotations

import datetime
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.durability import checks, lives, processes, takeovers
from campaigns.durability.lives import Kill, Life, Peace
from campaigns.durability.pipeline import LOG, Setup
from rlhf_core.store import attempts, disk

KIND = "one of two runs with wrong clocks"


@dataclass(frozen=True)
class Skew:
    """Clock errors of a run: its own clock is ahead by `wall_s`, and its leases look `age_s` old on the disk."""

    wall_s: float
    age_s: float
    elsewhere: bool


def skewed(folder: Path, peace: Peace, number: int, seed: int) -> Life:
    """Run the same profile twice at the same time with wrong clocks, optionally kill one, and check the result.

    If both survive, each stage must have been computed once.
    """
    source = random.Random(f"{seed}/skew/{number}")
    setup = lives.new_home(folder / f"skew-{number:04d}", False, peace.database)
    life, began, log = Life(f"wrong clocks {number}", mlflow=False), time.monotonic(), setup.home / LOG
    after = source.uniform(0.0, 0.9) * peace.memory.seconds if source.random() < 0.5 else None
    elsewhere = source.random() < 0.5
    skews = [draw(source, elsewhere and first, patient=after is not None) for first in (True, False)]
    first, second = (processes.start(partial(_run, setup, skew), log) for skew in skews)
    ends = [processes.finish(first, kill_after_s=after)[0], processes.finish(second, kill_after_s=None)[0]]
    life.leftovers += [f"process {name}" for name in processes.wait_for_family()[1]]
    if ends == ["killed", "completed"] and after is not None:
        kind = f"{KIND}, as if on another machine" if elsewhere else KIND
        life.kills.append(Kill(kind, "either", "", 0.0))
        takeovers.reconcile_elsewhere(setup.home / "store", log)
    elif ends != ["completed", "completed"]:
        words = [lives.last_words(setup, one) for one in (first, second)]
        life.problems.append(f"the runs {' and '.join(ends)}: {words}; read {log}")
    else:
        life.ends.append("two runs with wrong clocks completed")
        made = checks.results(setup.home).items()
        life.problems += [f"{label}: computed {one.attempts} times" for label, one in made if one.attempts != 1]
    life.others.append(Kill(f"wrong clocks: {shown(skews)}", "", "", 0.0))
    lives.examine(life, setup, peace.results, began)
    return life


def draw(source: random.Random, elsewhere: bool, *, patient: bool) -> Skew:
    """Draw the clock errors of a run. With `patient`, the run is killed, and its leases may not be from the future."""
    wall = source.choice((-1, 1)) * source.uniform(130.0, 4000.0)
    # If their owner is killed on another machine, leases from the future last that long, too long for this campaign.
    age = source.uniform(130.0, 4000.0) * (1 if elsewhere and patient else source.choice((-1, 1)))
    return Skew(wall, age, elsewhere)


def apply(skew: Skew) -> None:
    """Apply the clock errors to this process for the rest of its life."""
    if skew.elsewhere:
        takeovers.be_elsewhere()
    if skew.wall_s:
        _shift_clocks(skew.wall_s)
    if skew.age_s:
        _age_leases(skew.age_s)


def _run(setup: Setup, skew: Skew) -> None:
    # A living owner on another machine is detected only by heartbeats, which are late on a busy machine.
    takeovers.short_leases(ttl_s=6.0, heartbeat_s=0.5)
    apply(skew)
    lives.logged(setup, None)


def _shift_clocks(seconds: float) -> None:
    """Shift the wall clock of this process; the monotonic clock stays correct."""
    now, now_ns = time.time, time.time_ns

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=seconds)

    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    attempts.datetime = Shifted  # type: ignore[misc]


def _age_leases(seconds: float) -> None:
    """Make every table that this process writes look this old, as if the disk's clock had jumped since."""
    write = disk._replace

    def write_old(path: Path, raw: bytes, **options: bool) -> None:
        write(path, raw, **options)
        try:
            made = path.stat().st_mtime - seconds
            os.utime(path, (made, made))
        except FileNotFoundError:  # swept by another process
            return

    disk._replace = write_old


def shown(skews: list[Skew]) -> str:
    """Describe which of two clocks are ahead of the true time."""
    ahead = sum(skew.wall_s > 0 for skew in skews)
    return ("both behind", "one ahead, one behind", "both ahead")[ahead]
