"""Define the methods that `benchmarks.methods` compares, and train one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.execution.executor import RunContext, RunOptions, Silent
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.run import PipelineRun
from pipelines.flows.evaluation import Compared, evaluation_nodes
from pipelines.flows.full import Made, artifact, run_nodes
from pipelines.flows.graph import Stages
from pipelines.flows.groups import ask_node
from pipelines.flows.nodes import Names, Node, expand, part
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.flows.sections import (
    ConditionalSFTConfig,
    DistillationConfig,
    EvaluationConfig,
    OfflineDPOConfig,
    PolicyOptimizationConfig,
)
from rlhf_contrib.worlds.support import Facts, gold_components, sum_of
from rlhf_contrib.worlds.support_phrases import PROBLEMS
from rlhf_core.algorithms import advantage, policy, preference
from rlhf_core.config.models import InitModel
from rlhf_core.config.policy import GROUP_ADVANTAGES, PPOConfig
from rlhf_core.data.tables import read_preferences, write_preferences
from rlhf_core.schema.base import CustomFunction
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    Generation,
    PolicyRef,
    PreferencesRef,
    PromptsRef,
    RewardModelRef,
)
from stages.distill import DivergenceConfig, distill
from stages.dpo import dpo
from stages.ppo import ppo
from stages.prepare_data import prepare_data
from stages.reward_model import reward_model
from stages.sft import sft

PASSED: Mapping[str, Any] = {"terms": {"passed": {"type": "function", "function": "benchmarks.method_rows:passed"}}}
"""A verifiable reward, for estimators that need 0 or 1."""


def types(family: Any) -> list[str]:
    """The values of `type` in a folder of methods, without the entry for a user's own function."""
    return [kind.model_fields["type"].default for kind in family.METHODS if not issubclass(kind, CustomFunction)]


# Every method of the package, followed by options of methods that need other than the defaults.
PREFERENCE: Mapping[str, dict[str, Any]] = {name: {"loss": {"type": name}} for name in types(preference)} | {
    "ipo": {"loss": {"type": "ipo", "beta": 0.5}},  # aims at h = 1 nat; at 0.1 it aims at 5 and overshoots
    "aot unpaired": {"loss": {"type": "aot", "paired": False}},
    "orpo": {"loss": {"type": "orpo", "odds_weight": 1.0}},
    "rpo": {"loss": {"type": "dpo"}, "nll_coef": 1.0},
    "ld-dpo": {"loss": {"type": "dpo"}, "length_alpha": 0.5},
}
POLICY: Mapping[str, dict[str, Any]] = (
    {name: {"advantage": {"type": name}} for name in types(advantage)}
    | {f"rloo, {name}": {"advantage": {"type": "rloo"}, "loss": {"type": name}} for name in types(policy)[1:]}
    | {
        "gae, ptx": {"advantage": {"type": "gae"}, "ptx": {"coef": 0.1, "max_length": 192}},
        "grpo": {"advantage": {"type": "grpo"}, "kl_in": "loss"},
        "grpo of the batch": {"advantage": {"type": "grpo", "std": "batch"}, "kl_in": "loss"},
        "dr_grpo": {"advantage": {"type": "dr_grpo"}, "loss": {"type": "clip", "aggregation": "constant"}},
        "maxrl": {"advantage": {"type": "maxrl"}, "kl_in": "loss", "rewards": PASSED},
        "pass@k": {"advantage": {"type": "pass@k", "k": 2}, "kl_in": "loss", "rewards": PASSED},
    }
)
GROUP = 4
"""Samples per prompt of estimators that compare samples; the others get proportionally more prompts."""


def passed(generations: Sequence[Generation]) -> list[float]:
    """Score 1 for answers with a gold reward above 1, else 0.

    Training prompts carry no facts, so they are parsed from the customer's words.
    """
    return [
        float(sum_of(gold_components(row.completion.text, facts_in(row.prompt.messages[-1].content))) > 1)
        for row in generations
    ]


def facts_in(text: str) -> Facts:
    """Parse the facts of a prompt of the support desk.

    >>> facts_in("Maria writes: my blue kettle arrived broken. Reply to her.")
    Facts(name='Maria', item='blue kettle', problem='broken')
    """
    found = re.fullmatch(r"(\w+) writes: my (\w+ \w+) (.+)\. Reply to h(?:er|im)\.", text)
    assert found is not None, text
    name, item, wording = found.groups()
    return Facts(name, item, next(problem for problem, wordings in PROBLEMS.items() if wording in wordings))


@dataclass(frozen=True)
class Start:
    """The artifacts that every method starts from."""

    base: PolicyRef
    policy: PolicyRef
    prompts: PromptsRef
    eval_prompts: PromptsRef
    demonstrations: DemonstrationsRef
    preferences: PreferencesRef
    reward_models: dict[str, RewardModelRef]


@dataclass(frozen=True)
class Learned:
    """A trained policy, and the held-out prompts in the wording it was trained for, if that is not the plain one."""

    policy: PolicyRef
    asked: PromptsRef | None = None


Method = Callable[[PipelineConfig, Stages, Start], Learned]


@dataclass
class Bench:
    """A pipeline whose stages are called one by one, and the seconds of each stage when it was computed."""

    config: PipelineConfig
    store: ArtifactStore
    run: PipelineRun
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(cls, config: PipelineConfig, state: Path) -> Iterator[Bench]:
        """Open a bench on the store below `state`; the engines start with the first stage that needs them."""
        store = ArtifactStore(state / "store")
        store.create()
        context = RunContext(config, RunOptions(), store, MemoryTracker(), Silent())
        with closing(LocalExecutor(context, LazyRuntime(config.runtime))) as executor:
            yield cls(config, store, PipelineRun(context, executor))

    def stages(self, name: str, seed: int = 0) -> Stages:
        """The stages with a separate seed, labeled by their method."""
        run_stage = self.run.directly

        def labeled(spec: StageSpec, kind: type[ArtifactRef]) -> ArtifactRef:
            label = f"methods/{name}/{seed}/{spec.label}"
            made: ArtifactRef = run_stage(replace(spec, label=label), kind)
            records = [record for record in self.store.records() if record.handle.digest == made.digest]
            self.seconds[label] = min(record.seconds for record in records)
            return made

        return Stages(labeled, self.config.seed + seed, self.config.runtime)  # type: ignore[arg-type]

    def seconds_of(self, name: str, seed: int) -> float:
        """Seconds of all stages of this method, regardless of when they ran."""
        prefix = f"methods/{name}/{seed}/"
        return sum(seconds for label, seconds in self.seconds.items() if label.startswith(prefix))


# ---------------------------------------------------------------- methods of the tiny world


def methods(config: PipelineConfig, steps: int) -> dict[str, Method]:
    """Every method by name."""
    assert config.sft is not None
    assert config.rejection_sampling is not None
    own = config.rejection_sampling
    conditional = load_profile("tiny/conditional").conditional_sft
    taught = load_profile("tiny/distill").distill
    assert conditional is not None
    assert taught is not None
    conditional = conditional.model_copy(update={"generate": own.generate, "score": own.score})
    offline = {"kl_weight": 1.0, "on_policy": False}
    online = {"kl_weight": 1.0, "on_policy": True, "sampling": own.generate.sampling, "eval_fraction": 0.05}
    two = {"teachers": {"rejection_sampling": 2.0, "sft": 1.0}}
    across = {"divergence": DivergenceConfig(kind="uld_text", top_k=taught.divergence.top_k)}
    slower = taught.optimizer.model_copy(update={"learning_rate": 5e-4})
    made: dict[str, Method] = {
        "sft/nll": imitating("nll"),
        "sft/dft": imitating("dft"),
        "sft/best of 8": best_of_own,
        "sft/conditional": conditioning(conditional),
        "distill/forward": distilling(taught.model_copy(update=offline)),
        "distill/two teachers": distilling(taught.model_copy(update=offline | two)),
        "distill/cross-tokenizer": distilling_across(taught.model_copy(update=across)),
        "distill/own answers": distilling(taught.model_copy(update=online | {"optimizer": slower})),
    }
    made |= {f"dpo/{name}": preferring(section) for name, section in preference_sections(config).items()}
    made |= {f"ppo/{name}": optimizing(section) for name, section in policy_sections(config, steps).items()}
    return made


def preference_sections(config: PipelineConfig) -> dict[str, OfflineDPOConfig]:
    """The configuration of every preference loss, by name."""
    assert config.iterative_dpo is not None
    offline = config.iterative_dpo.dpo.model_dump()
    return {name: OfflineDPOConfig.model_validate(offline | changes) for name, changes in PREFERENCE.items()}


def policy_sections(config: PipelineConfig, steps: int) -> dict[str, PPOConfig]:
    """The configuration of every estimator and policy loss, by name, with equal numbers of rollouts per step."""
    assert config.ppo is not None
    online = config.ppo.model_dump() | {"steps": steps, "checkpoint_every": steps}
    made: dict[str, PPOConfig] = {}
    for name, changes in POLICY.items():
        one = PolicyOptimizationConfig.model_validate(online | {"samples_per_prompt": GROUP} | changes)
        if not isinstance(one.advantage, GROUP_ADVANTAGES):
            one = one.model_copy(update={"samples_per_prompt": 1})
        else:
            one = one.model_copy(update={"prompts_per_step": one.prompts_per_step // GROUP})
        made[name] = one
    return made


def imitating(loss: str) -> Method:
    """Imitate the demonstrations, starting from the base model, with this loss."""

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        assert config.sft is not None
        section = config.sft.model_copy(update={"loss": loss})
        return Learned(stages.run(sft, "sft", section, policy=start.base, demonstrations=start.demonstrations))

    return learn


def best_of_own(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
    """Imitate the best of the policy's own answers."""
    assert config.rejection_sampling is not None
    made = own_answers("rejection_sampling", config.rejection_sampling, stages, start)
    return Learned(artifact("rejection_sampling", PolicyRef, made))


def own_answers(name: str, config: Any, stages: Stages, start: Start) -> Made:
    """The artifacts of stages that learn from the first policy's answers."""
    given = {"policy": start.policy, "prompts": start.prompts, **start.reward_models}
    inputs: dict[str, Names] = {
        "policy": "policy",
        "prompts": "prompts",
        "reward_models": {model: model for model in start.reward_models},
    }
    return run_nodes(expand(Node(name, name, config, inputs)), stages, given)


def conditioning(section: ConditionalSFTConfig) -> Method:
    """Imitate all of the policy's own answers, each with its level; the evaluation requests the highest level."""

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        made = own_answers("conditional_sft", section, stages, start)
        ask = ask_node("conditional_sft/ask", "conditional_sft", section, "eval_prompts")
        made |= run_nodes([ask], stages, {**made, "eval_prompts": start.eval_prompts})
        return Learned(artifact("conditional_sft", PolicyRef, made), artifact("conditional_sft/ask", PromptsRef, made))

    return learn


def distilling(section: DistillationConfig) -> Method:
    """Distill `best_of_own` into the base model on demonstrations, or into SFT on its own answers.

    With weights, the teachers are `best_of_own` (`rejection_sampling`) and SFT (`sft`).
    """

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        best = best_of_own(config, stages, start).policy
        named = {"rejection_sampling": best, "sft": start.policy}
        teachers = {name: named[name] for name in section.teachers}
        teacher = None if teachers else best
        if section.on_policy:
            return Learned(
                stages.run(
                    distill,
                    "distill",
                    section,
                    policy=start.policy,
                    teacher=teacher,
                    teachers=teachers,
                    prompts=start.prompts,
                )
            )
        data = start.demonstrations
        return Learned(
            stages.run(
                distill,
                "distill",
                section,
                policy=start.base,
                teacher=teacher,
                teachers=teachers,
                demonstrations=data,
            )
        )

    return learn


def distilling_across(section: DistillationConfig) -> Method:
    """Distill a policy trained with a smaller tokenizer into the base model."""

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        assert config.sft is not None
        assert isinstance(config.prepare_data.model, InitModel)
        smaller = config.prepare_data.model.model_copy(
            update={"vocab_size": config.prepare_data.model.vocab_size * 3 // 4}
        )
        other = config.prepare_data.model_copy(update={"model": smaller})
        base = part(stages.run(prepare_data, "other/prepare_data", other), "base", PolicyRef)
        data = start.demonstrations
        teacher = stages.run(sft, "other/sft", config.sft, policy=base, demonstrations=data)
        return Learned(stages.run(distill, "distill", section, policy=start.base, teacher=teacher, demonstrations=data))

    return learn


def preferring(section: OfflineDPOConfig) -> Method:
    """Optimize a preference loss on the prepared pairs."""

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        return Learned(
            stages.run(dpo, "dpo", section, policy=start.policy, reference=start.policy, preferences=start.preferences)
        )

    return learn


def optimizing(section: PPOConfig) -> Method:
    """Optimize the policy against the reward model."""

    def learn(config: PipelineConfig, stages: Stages, start: Start) -> Learned:
        return Learned(
            stages.run(
                ppo,
                "ppo",
                section,
                policy=start.policy,
                reference=start.policy,
                prompts=start.prompts,
                reward_models=start.reward_models,
                demonstrations=start.demonstrations if section.ptx else None,
            )
        )

    return learn


# ---------------------------------------------------------------- initial artifacts and results


def make_start(bench: Bench) -> Start:
    """Data, SFT policy and reward model of the profile; they are computed if the store does not have them."""
    config, stages = bench.config, bench.stages("start")
    assert config.sft is not None
    assert config.reward_model is not None
    data = stages.run(prepare_data, "prepare_data", config.prepare_data)
    demonstrations = part(data, "demonstrations", DemonstrationsRef)
    preferences = part(data, "preferences", PreferencesRef)
    base = part(data, "base", PolicyRef)
    policy = stages.run(sft, "sft", config.sft, policy=base, demonstrations=demonstrations)
    model = stages.run(reward_model, "reward_model", config.reward_model, policy=policy, preferences=preferences)
    return Start(
        base=base,
        policy=policy,
        prompts=part(data, "prompts", PromptsRef),
        eval_prompts=part(data, "eval_prompts", PromptsRef),
        demonstrations=demonstrations,
        preferences=preferences,
        reward_models={"reward_model": model},
    )


def first_pairs(preferences: PreferencesRef, count: int, store: ArtifactStore, state: Path) -> PreferencesRef:
    """The first `count` training pairs, with all held-out pairs."""
    folder = state / "methods" / f"pairs-{count}-{preferences.digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    for split, kept in (("train", count), ("eval", None)):
        rows = read_preferences(store.path(preferences) / f"{split}.parquet")
        write_preferences(folder / f"{split}.parquet", rows[:kept])
    return store.external(PreferencesRef, folder)


def learn(name: str, method: Method, bench: Bench, start: Start, seed: int) -> dict[str, float]:
    """Train one method with one seed; returns its held-out figures and the seconds of its stages."""
    made = method(bench.config, bench.stages(name, seed), start)
    figures = judged(bench, start, {"sft": start.policy, "made": made.policy}, {"made": made.asked})
    return {
        "gold": figures["made"]["gold"]["mean"],
        "before": figures["sft"]["gold"]["mean"],
        "kl": figures["made"]["kl"]["mean"],
        "seconds": bench.seconds_of(name, seed),
    }


def judged(
    bench: Bench, start: Start, policies: dict[str, PolicyRef], asked: Mapping[str, PromptsRef | None]
) -> dict[str, Any]:
    """Evaluate `policies` with one answer to each held-out prompt; returns the report by policy."""
    config = bench.config
    assert config.evaluate is not None
    plain = config.evaluate.evaluate.model_copy(update={"best_of": {}, "parents": {}})
    reworded = {name: f"{name}/asked" for name, prompts in asked.items() if prompts is not None}
    given: Made = {**policies, **start.reward_models, "eval_prompts": start.eval_prompts}
    given |= {reworded[name]: prompts for name, prompts in asked.items() if prompts is not None}
    judge = "reward_model" if "reward_model" in start.reward_models else ""
    compared = Compared({name: name for name in policies}, judge=judge, held_out=reworded)
    nodes = evaluation_nodes(EvaluationConfig(generate=config.evaluate.generate, evaluate=plain), compared)
    report = run_nodes(nodes, bench.stages("judge"), given)["evaluate"]
    found: dict[str, Any] = json.loads((bench.store.path(report) / "report.json").read_text(encoding="utf-8"))[
        "policies"
    ]
    return found
