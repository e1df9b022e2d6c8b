"""Plant faults in short real runs of policy optimization, and report which monitor detects each of them, and how soon.

    python -m benchmarks.monitors
    python -m benchmarks.monitors --faults 'stale*' --clean 0 --state /tmp/monitors

Every run is RLOO on the small support desk of `benchmarks.small_world`, with in-process engines, all of `MONITORS`
and no fault for the first `--begins` steps. Clean runs with other seeds count the false alarms. To choose bounds
for another machine or world, use clean runs with other seeds than the reported ones:

    python -m benchmarks.monitors --faults none --clean 4 --first-seed 900
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.monitor_faults import FAULTS, Clock, Fault
from benchmarks.small_world import GOLD, SmallWorld, WrappedRuntime, ppo
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.types import ArtifactRef

MONITORS: tuple[dict[str, Any], ...] = (
    {"type": "mismatch", "for_steps": 1},
    {"type": "end_token", "for_steps": 1},
    {"type": "kl_estimate", "for_steps": 2},
    {"type": "band", "name": "kl", "metric": "kl/k3", "high": 0.25, "for_steps": 2},
    {"type": "band", "name": "truncated", "metric": "rollout/truncated", "high": 0.5, "for_steps": 2},
    {"type": "band", "name": "repetition", "metric": "rollout/repetition", "high": 0.5, "for_steps": 2},
    {"type": "drift", "name": "entropy", "metric": "rollout/entropy", "low": 0.4, "high": 2.0, "reference_steps": 3},
    {"type": "drift", "name": "length", "metric": "rollout/length", "low": 0.6, "high": 1.7, "reference_steps": 3},
    {"type": "drift", "name": "reward", "metric": "reward/mean", "low": -0.5, "reference_steps": 3},
    {"type": "collapse", "reference_steps": 3, "for_steps": 1},
    {"type": "over_optimization", "window": 6},
    {"type": "zero_variance"},
    {"type": "invalid"},
    {"type": "skipped", "for_steps": 1},
)
"""All of them warn instead of stopping, so that a run shows every monitor that detects its fault."""
STEPS, BEGINS = 24, 6
SETTINGS: Mapping[str, Any] = {
    "optimizer": OptimizerConfig(learning_rate=3e-4, schedule="constant"),
    "evaluate": HeldOutConfig(every=2, prompts=48, independent=GOLD, export="last"),
}
"""Settings of every run, chosen so that the hack appears within its steps."""


@dataclass(frozen=True)
class Found:
    """Observations of a run: monitor -> the step of its first alarm; or the error that ended it."""

    alarms: Mapping[str, int]
    seconds: float
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", nargs="+", default=["*"], metavar="PATTERN", help="faults to plant; 'none' for none"
    )
    parser.add_argument("--clean", type=int, default=20, help="clean runs, with the seeds 0, 1, ...")
    parser.add_argument("--first-seed", type=int, default=0, help="of the clean runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--begins", type=int, default=BEGINS, help="step after which a fault begins")
    parser.add_argument("--state", type=Path, default=Path(".rlhf/monitors"), help="folder whose store is used")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # every alarm logs a warning
    world = SmallWorld.at(options.state)
    judge = world.reward_model(1200)
    chosen = {name: one for name, one in FAULTS.items() if any(fnmatchcase(name, each) for each in options.faults)}
    found = {
        name: told(name, run(world, judge, 1000 + number, fault, options.steps, options.begins))
        for number, (name, fault) in enumerate(chosen.items())
    }
    seeds = range(options.first_seed, options.first_seed + options.clean)
    clean = [told(f"clean {seed}", run(world, judge, seed, None, options.steps, 0)) for seed in seeds]
    begins = {name: 0 if fault.from_start else options.begins for name, fault in chosen.items()}
    print(table(found, begins))
    print(false_alarms(clean))
    return 0


def run(world: SmallWorld, judge: ArtifactRef | None, seed: int, fault: Fault | None, steps: int, begins: int) -> Found:
    """Run once and report the monitors' alarms; a `fault` begins after `begins` steps."""
    broken = fault or Fault()
    clock = Clock(begins=steps + 1 if fault is None else 0 if fault.from_start else begins)
    runtime = WrappedRuntime(
        trainer=lambda role, engine: broken.trainers[role](engine, clock) if role in broken.trainers else engine,
        sampler=lambda engine: broken.sampler(engine, clock),
    )
    changes = {} if broken.rewards is None else {"rewards": broken.rewards}
    config = ppo(steps=steps, monitors=MONITORS, **SETTINGS, **changes)
    inputs = world.inputs | {"reward_models": {} if judge is None else {"reward_model": judge}}
    began = time.monotonic()
    tracker = MemoryStageTracker()
    alarms: dict[str, int] = {}
    try:
        with broken.patch(clock):
            world.run("ppo", config, inputs, seed=seed, runtime=runtime, tracker=tracker, fresh=True)
    except RlhfError as failure:
        error = f"{type(failure).__name__}: {failure}"
    else:
        error = ""
    for step, monitor, _ in tracker.tables["monitors"][1] if "monitors" in tracker.tables else []:
        alarms.setdefault(str(monitor), int(step))
    return Found(alarms, time.monotonic() - began, error)


def told(name: str, found: Found) -> Found:
    """Print the observations of a run."""
    print(
        f"{name}: {dict(found.alarms) or 'nothing'} {found.error} ({found.seconds:.0f} s)", file=sys.stderr, flush=True
    )
    return found


def table(found: Mapping[str, Found], begins: Mapping[str, int]) -> str:
    """The table of faults.

    >>> print(table({"stale weights": Found({"mismatch": 6, "kl": 9}, 1.0)}, {"stale weights": 4}))
    | fault | found by, after so many steps |
    |---|---|
    | stale weights | mismatch 2, kl 5 |
    """
    lines = ["| fault | found by, after so many steps |", "|---|---|"]
    for name, one in found.items():
        after = [
            f"{monitor} {step - begins[name]}"
            for monitor, step in sorted(one.alarms.items(), key=lambda item: item[1])
            if step > begins[name]
        ]
        lines.append(f"| {name} | {', '.join(after) or 'not found'}{' (' + one.error + ')' if one.error else ''} |")
    return "\n".join(lines)


def false_alarms(clean: Sequence[Found]) -> str:
    """A sentence on the clean runs.

    >>> false_alarms([Found({}, 10.0), Found({"kl": 3}, 12.0)])
    '\\n2 clean runs: 1 with a false alarm (kl 1); median 11 s a run'
    """
    if not clean:
        return ""
    by_monitor: defaultdict[str, int] = defaultdict(int)
    for one in clean:
        for monitor in one.alarms:
            by_monitor[monitor] += 1
    which = ", ".join(f"{monitor} {count}" for monitor, count in sorted(by_monitor.items()))
    wrong = sum(bool(one.alarms) for one in clean)
    seconds = median(one.seconds for one in clean)
    return f"\n{len(clean)} clean runs: {wrong} with a false alarm{f' ({which})' if which else ''}; median {seconds:.0f} s a run"


if __name__ == "__main__":
    sys.exit(main())
