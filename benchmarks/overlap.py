"""Measure the seconds of a policy-optimization step, sampled and trained in turn or at once (`staleness` 0 and 1).

    python -m benchmarks.overlap tiny/full --set runtime.cpu_threads=1 --set runtime.sampler.engines=1
    python -m benchmarks.overlap one_gpu/full --hidden 2048 --layers 16 --groups 64 --members 4 --answer 512

The two run side by side, three times. The engines are those of the profile, on one runtime for all runs. The model is a
Llama with random weights, so nothing is downloaded and nearly every answer has its full length. On CPU, sampler and
trainer share the cores, and overlap can only use what one of them leaves idle: give them as many threads as they would
have side by side.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throughput import make_policy
from pipelines.flows.profile import load_profile
from rlhf_core.algorithms.advantage.group import RLOOAdvantage
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import PPOConfig, Staleness
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.data.tables import write_prompts
from rlhf_core.interfaces import Runtime
from rlhf_core.runtime.local_runtime import open_runtime
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.types import ArtifactRef, Generation, Message, PolicyRef, Prompt, PromptsRef
from stages.table import STAGES

REPEATS = 3
WARM_UP = 2
"""Steps that are not counted: the first compiles and fills, the second is the first that overlaps."""
MAX_PROMPT = 64
"""Tokens."""


@dataclass(frozen=True)
class Times:
    """Medians of one run: seconds of a step, of the wait for rollouts in it, and of measuring and updating."""

    step: float
    waited: float
    trained: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="tiny/full")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="key=value")
    sizes = {"hidden": 192, "layers": 4, "groups": 8, "members": 4, "answer": 64, "steps": 8, "staleness": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    profile = load_profile(options.profile, options.overrides)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sampler = profile.runtime.sampler
        longest = sampler.max_model_len if isinstance(sampler, VllmSamplerConfig) else MAX_PROMPT + options.answer
        make_policy(folder / "policy", options.hidden, options.layers, positions=longest)
        runtime = open_runtime(profile.runtime)
        try:
            found: dict[int, list[Times]] = {0: [], options.staleness: []}
            for repeat in range(REPEATS):
                for staleness, times in found.items():
                    config = section(staleness, options)
                    times.append(timed_run(config, folder, runtime, seed=repeat))
                    print(line(f"repeat {repeat + 1}, staleness {staleness}", times[-1]), flush=True)
            report(found, options.staleness)
            print(f"engines: {runtime.engines()}")
        finally:
            runtime.close()


def section(staleness: int, options: argparse.Namespace) -> PPOConfig:
    """Return `[ppo]` of one side; only its staleness differs."""
    return PPOConfig(
        steps=options.steps,
        prompts_per_step=options.groups,
        samples_per_prompt=options.members,
        sampling=SamplingConfig(max_tokens=options.answer),
        rewards=RewardsConfig(terms={"even": FunctionReward(function="benchmarks.overlap:even_tokens")}),
        advantage=RLOOAdvantage(),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        ahead=Staleness(steps=staleness),
        checkpoint_every=options.steps,
    )


def even_tokens(generations: Sequence[Generation]) -> list[float]:
    """Return the share of even token ids of each answer."""
    answers = [one.completion.token_ids for one in generations]
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in answers]


def timed_run(config: PPOConfig, folder: Path, runtime: Runtime, *, seed: int) -> Times:
    """Run the stage in a store of its own; return its medians without the warm-up."""
    store = ArtifactStore(folder / f"store-{config.staleness}-{seed}")
    policy = store.external(PolicyRef, folder / "policy")
    rows = [Prompt(f"q{i}", (Message("user", f"{i} and {i + 1}"),), "", "random") for i in range(64)]
    write_prompts(folder / "prompts", rows)
    inputs: dict[str, ArtifactRef | tuple[ArtifactRef, ...] | dict[str, ArtifactRef]] = {
        "policy": policy,
        "reference": policy,
        "prompts": store.external(PromptsRef, folder / "prompts"),
        "reward_models": {},
    }
    spec = STAGES["ppo"].spec(config, inputs, label="ppo", seed=seed, engines={})
    ends: list[float] = []
    tracker = MemoryStageTracker()
    execute(store, spec, runtime=runtime, tracker=tracker, progress=lambda *_: ends.append(time.perf_counter()))
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return Times(
        statistics.median(steps[WARM_UP - 1 :]),
        *(
            statistics.median([values[f"ppo/time/{name}"] for _, values in tracker.points][WARM_UP:])
            for name in ("wait_for_rollouts", "train")
        ),
    )


def report(found: dict[int, list[Times]], staleness: int) -> None:
    """Print the medians of the repeats, and how much shorter a step got, repeat by repeat."""
    for side, times in found.items():
        medians = (statistics.median(column) for column in zip(*map(_columns, times), strict=True))
        print(line(f"median,   staleness {side}", Times(*medians)))
    ratios = [one.step / other.step for one, other in zip(found[0], found[staleness], strict=True)]
    print(f"a step in turn / a step at once: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


def line(name: str, times: Times) -> str:
    """Return one line of the output."""
    return f"{name:24s} step {times.step:7.3f} s   waited {times.waited:7.3f} s   trained {times.trained:7.3f} s"


def _columns(times: Times) -> tuple[float, float, float]:
    return times.step, times.waited, times.trained


if __name__ == "__main__":
    main()
