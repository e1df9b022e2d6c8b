"""Run a profile with its ranks on all nodes of Ray, the first on another one than this process; print what came out.

Usage: `python -m tests.support.spread_run PROFILE STORE [KEY=VALUE ...]`.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelines.execution.executor import RunContext, RunOptions, Silent
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from rlhf_core.runtime import placement, ray_runtime
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.stage.decision import Decision
from rlhf_core.store import unfinished
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import store_root
from rlhf_core.tracking.memory import MemoryTracker


def spread(config: Any, **_: Any) -> placement.Placement:
    """Return places for workers on the nodes in turn, beginning after this process's own."""
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted((node["NodeID"] for node in ray.nodes() if node["Alive"]), key=lambda node: (node == own, node))

    def on(number: int) -> dict[str, Any]:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    train, sample = (tuple(map(on, range(count))) for count in (config.train_workers, config.sampler.needs().engines))
    return placement.Placement(train, sample, group=None)


class Telling(Silent):
    """Prints what happens, a JSON list per line."""

    label = ""

    def started(self, label: str, decision: Decision) -> None:
        self.label = label
        tell("started", label, decision.action)

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        tell("progress", label, done)

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        tell("finished", label, decision.action)


def telling_what_is_kept(label: Callable[[], str]) -> None:
    """Let uploads of checkpoints be looked for often, and print the label of the stage that has one."""
    unfinished.LOOK_SECONDS = 0.2
    look = unfinished._Keeper.look

    def told(keeper: unfinished._Keeper) -> None:
        before = keeper._uploaded
        look(keeper)
        if keeper._uploaded != before:
            tell("kept", label())

    unfinished._Keeper.look = told  # type: ignore[method-assign]


def tell(*said: object) -> None:
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()


def main(profile: str, place: str, *overrides: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    config = load_profile(Path(profile), overrides)
    store = ArtifactStore(store_root(place))
    store.create()
    ray_runtime.reserve = spread  # type: ignore[assignment]
    if os.environ.get("RAY_ADDRESS"):
        # Ray looks for its node among the processes that it sees, which here are those of all nodes.
        ray.init = functools.partial(ray.init, _node_ip_address=os.environ["NODE_ADDRESS"])
    runtime, listener = LazyRuntime(config.runtime), Telling()
    telling_what_is_kept(lambda: listener.label)
    try:
        context = RunContext(config, RunOptions(), store, MemoryTracker(), listener)
        run = PipelineRun(context, LocalExecutor(context, runtime))
        made = run_stages(run, lifecycle, run.directly, tags={})
        tell("digests", {label: ref.digest for label, ref in made.items()})
    finally:
        runtime.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
