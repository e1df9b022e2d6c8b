"""Every preference loss, advantage estimator and policy loss from one SFT policy in the tiny world: do they learn?

    python -m benchmarks.methods --seeds 3
    python -m benchmarks.methods --only dpo/ --pairs 512 --state /tmp/methods

Data, SFT and reward model are those of `tiny/full`. A preference loss trains one epoch on the prepared pairs, or on the
first `--pairs` of them; an estimator
or policy loss makes `--steps` steps of policy optimisation against the reward model. The held-out gold reward, which no
training sees, is compared with that of SFT; the seeds are those of the method's own stages. What is in the store is not
made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.faults.small import directly
from pipelines.deferred import DeferredRuntime
from pipelines.full import judge, part
from pipelines.graph import Stages
from pipelines.listener import Silent
from pipelines.profile import EvaluationConfig, OfflineDPOConfig, PipelineConfig, PolicyOptimisationConfig, load_profile
from pipelines.run import PipelineRun, RunOptions
from rlhf_core.artifacts import ArtifactStore
from rlhf_core.config.policy import GROUP_ADVANTAGES, PPOConfig
from rlhf_core.data.tables import read_preferences, write_preferences
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import DemonstrationsRef, PolicyRef, PreferencesRef, PromptsRef, RewardModelRef
from stages.dpo import DPOConfig

PREFERENCE: Mapping[str, dict[str, Any]] = {
    "dpo": {"loss": {"type": "dpo"}},
    "cdpo": {"loss": {"type": "cdpo"}},
    "robust": {"loss": {"type": "robust"}},
    "ipo": {"loss": {"type": "ipo", "beta": 0.5}},  # aims at h = 1 nat; at 0.1 it aims at 5 and overshoots
    "hinge": {"loss": {"type": "hinge"}},
    "apo_zero": {"loss": {"type": "apo_zero"}},
    "apo_down": {"loss": {"type": "apo_down"}},
    "sppo": {"loss": {"type": "sppo"}},
    "nca": {"loss": {"type": "nca"}},
    "exo": {"loss": {"type": "exo"}},
    "aot": {"loss": {"type": "aot"}},
    "aot unpaired": {"loss": {"type": "aot", "paired": False}},
    "discopop": {"loss": {"type": "discopop"}},
    "kto": {"loss": {"type": "kto"}},
    "simpo": {"loss": {"type": "simpo"}},
    "orpo": {"loss": {"type": "orpo", "odds_weight": 1.0}},
    "rpo": {"loss": {"type": "dpo"}, "nll_coef": 1.0},
    "ld-dpo": {"loss": {"type": "dpo"}, "length_alpha": 0.5},
}
POLICY: Mapping[str, dict[str, Any]] = {
    "gae": {"advantage": {"type": "gae"}},
    "reinforce++": {"advantage": {"type": "reinforce++"}},
    "reinforce++-baseline": {"advantage": {"type": "reinforce++-baseline"}},
    "rloo": {"advantage": {"type": "rloo"}},
    "grpo": {"advantage": {"type": "grpo"}, "kl_in": "loss"},
    "dr_grpo": {"advantage": {"type": "dr_grpo"}, "loss": {"type": "clip", "aggregation": "constant"}},
    "opo": {"advantage": {"type": "opo"}},
    "rloo, gspo": {"advantage": {"type": "rloo"}, "loss": {"type": "gspo"}},
    "rloo, cispo": {"advantage": {"type": "rloo"}, "loss": {"type": "cispo"}},
    "gae, ptx": {"advantage": {"type": "gae"}, "ptx": {"coef": 0.1, "max_length": 192}},
}
GROUP = 4
"""Samples per prompt of the estimators that compare them; the others get as many more prompts."""


@dataclass(frozen=True)
class Start:
    """What every method starts from."""

    policy: PolicyRef
    prompts: PromptsRef
    eval_prompts: PromptsRef
    demonstrations: DemonstrationsRef
    preferences: PreferencesRef
    reward_models: dict[str, RewardModelRef]


@dataclass(frozen=True)
class Result:
    """Held-out figures of one method and seed: mean gold reward, KL to SFT in nats an answer, seconds of training."""

    gold: float
    kl: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of policy optimisation")
    parser.add_argument("--pairs", type=int, default=0, help="of preference losses; 0 takes all")
    parser.add_argument("--only", default="", help="methods whose name, as dpo/ipo or ppo/rloo, has this in it")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="key=value")
    parser.add_argument("--state", type=Path, default=Path(".rlhf"), help="folder whose store is used")
    options = parser.parse_args()
    config = load_profile("tiny/full", options.overrides)
    store = ArtifactStore(options.state / "store")
    store.create()
    runtime = DeferredRuntime(config.runtime)
    run = PipelineRun(config, RunOptions(), store, runtime, MemoryTracker(), Silent(), planned=[])
    stages = Stages(directly(run), config.seed, config.runtime)
    try:
        start = make_start(config, stages)
        if options.pairs:
            start = replace(start, preferences=first_pairs(start.preferences, options.pairs, store, options.state))
        before = gold_of(judged(config, stages, start, {"sft": start.policy}), run, "sft")
        print(f"sft: gold {before:.2f}\n", flush=True)
        print("| method | gold - sft, mean over seeds | each seed | KL | seconds |\n|---|--:|---|--:|--:|", flush=True)
        for name, section in methods(config, options.steps).items():
            if options.only in name:
                results = [learn(name, section, config, stages, start, run, seed) for seed in range(options.seeds)]
                print(row(name, results, before), flush=True)
    finally:
        runtime.close()
    return 0


def methods(config: PipelineConfig, steps: int) -> dict[str, DPOConfig | PPOConfig]:
    """Return the configuration of every method, by name."""
    assert config.iterative_dpo is not None
    assert config.ppo is not None
    offline = config.iterative_dpo.dpo.model_dump()
    made: dict[str, DPOConfig | PPOConfig] = {
        f"dpo/{name}": OfflineDPOConfig.model_validate(offline | changes) for name, changes in PREFERENCE.items()
    }
    online = config.ppo.model_dump() | {"steps": steps, "checkpoint_every": steps}
    for name, changes in POLICY.items():
        one = PolicyOptimisationConfig.model_validate(online | {"samples_per_prompt": GROUP} | changes)
        if not isinstance(one.advantage, GROUP_ADVANTAGES):
            one = one.model_copy(update={"samples_per_prompt": 1})
        else:
            one = one.model_copy(update={"prompts_per_step": one.prompts_per_step // GROUP})
        made[f"ppo/{name}"] = one
    return made


def make_start(config: PipelineConfig, stages: Stages) -> Start:
    """Return data, SFT policy and reward model of the profile, from the store where they are there."""
    assert config.sft is not None
    assert config.reward_model is not None
    data = stages.prepare_data("prepare_data", config.prepare_data)
    demonstrations = part(data, "demonstrations", DemonstrationsRef)
    preferences = part(data, "preferences", PreferencesRef)
    policy = stages.sft("sft", config.sft, policy=part(data, "base", PolicyRef), demonstrations=demonstrations)
    model = stages.reward_model("reward_model", config.reward_model, policy=policy, preferences=preferences)
    return Start(
        policy=policy,
        prompts=part(data, "prompts", PromptsRef),
        eval_prompts=part(data, "eval_prompts", PromptsRef),
        demonstrations=demonstrations,
        preferences=preferences,
        reward_models={"reward_model": model},
    )


def first_pairs(preferences: PreferencesRef, count: int, store: ArtifactStore, state: Path) -> PreferencesRef:
    """Return the first `count` training pairs, with all that are held out."""
    folder = state / "methods" / f"pairs-{count}-{preferences.digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    for split, kept in (("train", count), ("eval", None)):
        rows = read_preferences(store.path(preferences) / f"{split}.parquet")
        write_preferences(folder / f"{split}.parquet", rows[:kept])
    return store.external(PreferencesRef, folder)


def learn(
    name: str,
    section: DPOConfig | PPOConfig,
    config: PipelineConfig,
    stages: Stages,
    start: Start,
    run: PipelineRun,
    seed: int,
) -> Result:
    """Train one method with one seed; return what the held-out prompts say of it."""
    seeded = replace(stages, seed=config.seed + seed)
    label = f"methods/{name}/{seed}"
    if isinstance(section, DPOConfig):
        made = seeded.dpo(label, section, policy=start.policy, reference=start.policy, preferences=start.preferences)
    else:
        made = seeded.ppo(
            label,
            section,
            policy=start.policy,
            reference=start.policy,
            prompts=start.prompts,
            reward_models=start.reward_models,
            demonstrations=start.demonstrations if section.ptx else None,
        )
    report = judged(config, stages, start, {"sft": start.policy, "made": made})
    figures = report_of(report, run)["policies"]["made"]
    seconds = next(
        record.seconds
        for record in run.store.records()
        if record.label == label and record.handle.digest == made.digest
    )
    return Result(figures["gold"]["mean"], figures["kl"]["mean"], seconds)


def judged(config: PipelineConfig, stages: Stages, start: Start, policies: dict[str, PolicyRef]) -> Any:
    """Return the report on `policies`, one answer to each held-out prompt."""
    assert config.evaluate is not None
    plain = config.evaluate.evaluate.model_copy(update={"best_of": {}, "parents": {}})
    settings = EvaluationConfig(generate=config.evaluate.generate, evaluate=plain)
    return judge(
        settings, stages, policies=policies, prompts=start.eval_prompts, asked={}, reward_models=start.reward_models
    )


def report_of(report: Any, run: PipelineRun) -> dict[str, Any]:
    """Return what `report.json` holds."""
    made: dict[str, Any] = json.loads((run.store.path(report) / "report.json").read_text())
    return made


def gold_of(report: Any, run: PipelineRun, policy: str) -> float:
    """Return the mean gold reward of a policy."""
    return float(report_of(report, run)["policies"][policy]["gold"]["mean"])


def row(name: str, results: list[Result], before: float) -> str:
    """Return a line of the table."""
    gains = [result.gold - before for result in results]
    each = ", ".join(f"{gain:+.2f}" for gain in gains)
    kl, seconds = fmean(result.kl for result in results), fmean(result.seconds for result in results)
    return f"| {name} | {fmean(gains):+.2f} | {each} | {kl:.2f} | {seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
