"""Run the whole lifecycle in the order of the figure: data, SFT, preferences, search, optimization, evaluation.

prepare_data -> sft -> reward_model -+-> rejection sampling -+
             process_reward_model ---+-> conditional SFT ----+
                                     +-> DPO, iterative DPO -+-> evaluate -> publish
                                     +-> PPO ----------------+
                            a policy -+-> distillation ------+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pipelines.flows.graph import Stages
from pipelines.flows.iterative_dpo import iterate_dpo
from pipelines.flows.online import run_online
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.sections import ConditionalSFTConfig, DistillationConfig, EvaluationConfig, RejectionSamplingConfig
from pipelines.flows.suites import Candidates, Condition, evaluate_suites
from rlhf_core.errors import ConfigError
from rlhf_core.types import (
    CHAMPION,
    ArtifactRef,
    DemonstrationsRef,
    GenerationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    ReportRef,
    RewardModelRef,
    RolloutsRef,
    StepsRef,
)
from stages import table
from stages.config.condition import ConditionConfig
from stages.config.import_policy import ImportPolicyConfig

R = TypeVar("R", bound=ArtifactRef)


@dataclass
class LifecycleState:
    """The artifacts of the lifecycle so far.

    `conditioned_prompts` holds the held-out prompts of policies that need them in other words, and `conditions` makes
    other prompts so.
    """

    data: PreparedDataRef
    policies: dict[str, PolicyRef]
    reward_models: dict[str, RewardModelRef] = field(default_factory=dict)
    conditioned_prompts: dict[str, PromptsRef] = field(default_factory=dict)
    conditions: dict[str, Condition] = field(default_factory=dict)

    @property
    def sft_or_base(self) -> PolicyRef:
        return self.policies["sft"] if "sft" in self.policies else self.policies["base"]


def lifecycle(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run every stage that the profile has a section for; return the policies by name, in the order they were made."""
    data = stages.run(table.prepare_data, "prepare_data", config.prepare_data)
    state = LifecycleState(data, {"base": part(data, "base", PolicyRef)})
    if config.import_reward_model:  # first, so that an unusable one is found before anything is trained
        state.reward_models["reward_model"] = stages.run(
            table.import_reward_model, "import_reward_model", config.import_reward_model, policy=state.policies["base"]
        )
    if config.sft:
        demonstrations = part(data, "demonstrations", DemonstrationsRef)
        state.policies["sft"] = stages.run(
            table.sft, "sft", config.sft, policy=state.policies["base"], demonstrations=demonstrations
        )
    train_reward_models(config, stages, state)
    learn_from_own_answers(config, stages, state)
    optimize_preferences(config, stages, state)
    optimize_policy(config, stages, state)
    if config.evaluate:
        champion = opponent(config, stages, state)
        evaluation = partial(evaluate_lifecycle, config.evaluate, stages, state, champion)
        read = [*state.policies.values(), *state.reward_models.values(), *state.conditioned_prompts.values()]
        report = stages.group("evaluation", evaluation, after=read)
        if config.publish:
            policy = state.policies[published(config, state)]
            decided = config.publish.model_copy(update={"decisions": stages.decisions()})
            stages.run(table.publish, "publish", decided, policy=policy, report=report, champion=champion)
    return state.policies


def evaluate_lifecycle(
    config: EvaluationConfig, stages: Stages, state: LifecycleState, champion: PolicyRef | None
) -> ReportRef:
    """Sample and compare all policies on the held-out prompts, and run the suites; return the comparison's report."""
    policies = state.policies if champion is None else state.policies | {CHAMPION: champion}
    prompts = part(state.data, "eval_prompts", PromptsRef)
    answers = sample_policies(
        config, stages, policies=policies, prompts=prompts, conditioned_prompts=state.conditioned_prompts
    )
    report = compare_policies(config, stages, policies, answers, state.reward_models)
    if config.suites:
        candidates = Candidates(dict(policies), prompts, dict(answers), state.conditions)
        evaluate_suites(config, stages, candidates, state.reward_models)
    return report


def published(config: PipelineConfig, state: LifecycleState) -> str:
    """Return the name of the policy that is published: the one that the profile names, or the last."""
    return (config.publish.policy if config.publish else "") or list(state.policies)[-1]


def opponent(config: PipelineConfig, stages: Stages, state: LifecycleState) -> PolicyRef | None:
    """Return the champion that the published policy has to beat; None if there is none."""
    return None if stages.champion is None else stages.champion.of(state.policies[published(config, state)])


def train_reward_models(config: PipelineConfig, stages: Stages, state: LifecycleState) -> None:
    """Train the reward model and the process reward model, both from the SFT policy (or the base without SFT)."""
    if config.reward_model:
        preferences = part(state.data, "preferences", PreferencesRef)
        for label, member in config.reward_model.stage_configs().items():
            trained = stages.run(table.reward_model, label, member, policy=state.sft_or_base, preferences=preferences)
            state.reward_models[label] = trained
            state.reward_models.setdefault("reward_model", trained)  # of an ensemble the first serves as the only one
    if config.process_reward_model:
        steps = part(state.data, "steps", StepsRef)
        state.reward_models["process_reward_model"] = stages.run(
            table.process_reward_model,
            "process_reward_model",
            config.process_reward_model,
            policy=state.sft_or_base,
            steps=steps,
        )


def learn_from_own_answers(config: PipelineConfig, stages: Stages, state: LifecycleState) -> None:
    """Fine-tune on the best of the policy's own answers, or on all of them conditioned on their scores."""
    if config.rejection_sampling:
        prompts = part(state.data, "prompts", PromptsRef)
        imitate = partial(
            sample_and_imitate,
            config.rejection_sampling,
            stages,
            policy=state.sft_or_base,
            prompts=prompts,
            reward_models=state.reward_models,
        )
        read = [state.sft_or_base, prompts, *state.reward_models.values()]
        state.policies["rejection_sampling"] = stages.group("rejection_sampling", imitate, after=read)
    if config.conditional_sft:
        prompts = part(state.data, "prompts", PromptsRef)
        condition = partial(
            condition_and_imitate,
            config.conditional_sft,
            stages,
            policy=state.sft_or_base,
            prompts=prompts,
            reward_models=state.reward_models,
        )
        read = [state.sft_or_base, prompts, *state.reward_models.values()]
        state.policies["conditional_sft"], rollouts = stages.group("conditional_sft", condition, after=read)
        if config.evaluate:
            ask = partial(ask_conditioned, config.conditional_sft.condition, stages, rollouts)
            held_out = part(state.data, "eval_prompts", PromptsRef)
            state.conditioned_prompts["conditional_sft"] = ask("conditional_sft/ask", held_out)
            state.conditions["conditional_sft"] = ask


def ask_conditioned(
    config: ConditionConfig, stages: Stages, rollouts: RolloutsRef, label: str, prompts: PromptsRef
) -> PromptsRef:
    """Return the prompts that request the best level of the rewards in `rollouts`."""
    return stages.run_as(PromptsRef, table.condition, label, config, rollouts=rollouts, prompts=prompts)


def optimize_preferences(config: PipelineConfig, stages: Stages, state: LifecycleState) -> None:
    """Run DPO on the prepared pairs, and iterative DPO on pairs of the policy's own answers, round by round."""
    if config.dpo:
        start = state.policies[config.dpo.start_from]
        preferences = part(state.data, "preferences", PreferencesRef)
        state.policies["dpo"] = stages.run(
            table.dpo, "dpo", config.dpo, policy=start, reference=start, preferences=preferences
        )
    if config.iterative_dpo:
        state.policies["iterative_dpo"] = iterate_dpo(
            config.iterative_dpo,
            stages,
            policy=state.policies[config.iterative_dpo.start_from],
            prompts=part(state.data, "prompts", PromptsRef),
            reward_models=state.reward_models,
        )


def optimize_policy(config: PipelineConfig, stages: Stages, state: LifecycleState) -> None:
    """Run the online loop, policy optimization on rewards, and distillation into a student."""
    if config.online:
        start = state.policies[config.online.start_from]
        state.policies |= run_online(
            config.online,
            stages,
            policy=start,
            reference=start,
            reward_start=state.sft_or_base,
            reward_model=state.reward_models["reward_model"],
            preferences=state.data.preferences,
            prompts=part(state.data, "prompts", PromptsRef),
            demonstrations=(
                part(state.data, "demonstrations", DemonstrationsRef)
                if config.online.ppo and config.online.ppo.ptx
                else None
            ),
        )
    if config.ppo:
        start = state.policies[config.ppo.start_from]
        state.policies["ppo"] = stages.run(
            table.ppo,
            "ppo",
            config.ppo,
            policy=start,
            reference=start,
            prompts=part(state.data, "prompts", PromptsRef),
            reward_models=state.reward_models,
            demonstrations=part(state.data, "demonstrations", DemonstrationsRef) if config.ppo.ptx else None,
        )
    if config.distill:
        state.policies["distill"] = distill(
            config.distill,
            stages,
            policy=state.policies[config.distill.start_from],
            teachers={name: state.policies[name] for name in config.distill.sections()},
            data=state.data,
        )


def sample_and_imitate(
    config: RejectionSamplingConfig,
    stages: Stages,
    *,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> PolicyRef:
    """Run rejection sampling (arXiv 2307.09288, section 3.2.3): SFT on the best of n of the policy's own answers."""
    generations = stages.run(
        table.generate, "rejection_sampling/generate", config.generate, policy=policy, prompts=prompts
    )
    rollouts = stages.run(
        table.score, "rejection_sampling/score", config.score, generations=generations, reward_models=reward_models
    )
    best = stages.run_as(DemonstrationsRef, table.select, "rejection_sampling/select", config.select, rollouts=rollouts)
    return stages.run(table.sft, "rejection_sampling/sft", config.sft, policy=policy, demonstrations=best)


def condition_and_imitate(
    config: ConditionalSFTConfig,
    stages: Stages,
    *,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> tuple[PolicyRef, RolloutsRef]:
    """Run conditional SFT (arXiv 2308.12050) on the policy's own answers; return the policy and the rollouts."""
    generations = stages.run(
        table.generate, "conditional_sft/generate", config.generate, policy=policy, prompts=prompts
    )
    rollouts = stages.run(
        table.score, "conditional_sft/score", config.score, generations=generations, reward_models=reward_models
    )
    levels = stages.run_as(
        DemonstrationsRef, table.condition, "conditional_sft/condition", config.condition, rollouts=rollouts
    )
    return stages.run(table.sft, "conditional_sft/sft", config.sft, policy=policy, demonstrations=levels), rollouts


def distill(
    config: DistillationConfig,
    stages: Stages,
    *,
    policy: PolicyRef,
    teachers: Mapping[str, PolicyRef],
    data: PreparedDataRef,
) -> PolicyRef:
    """Distill the teachers, and those from outside, into the student `policy`, on its own answers or on demonstrations."""
    outside = {
        name: stages.run(table.import_policy, f"distill/{name}/import", ImportPolicyConfig(model=model))
        for name, model in config.external.items()
    }
    known = {**teachers, **outside}
    return stages.run(
        table.distill,
        "distill",
        config,
        policy=policy,
        teacher=None if config.teachers else known[config.teacher],
        teachers={name: known[name] for name in config.teachers},
        demonstrations=None if config.on_policy else part(data, "demonstrations", DemonstrationsRef),
        prompts=part(data, "prompts", PromptsRef) if config.on_policy else None,
    )


def sample_policies(
    config: EvaluationConfig,
    stages: Stages,
    *,
    policies: dict[str, PolicyRef],
    prompts: PromptsRef,
    conditioned_prompts: dict[str, PromptsRef],
) -> dict[str, GenerationsRef]:
    """Sample every policy's answers to the held-out prompts, or to its `conditioned_prompts`."""
    best_of = config.evaluate.best_of
    generations = {}
    for name, policy in policies.items():
        samples = best_of[name] if name in best_of else config.generate.samples_per_prompt
        generate = config.generate.model_copy(update={"samples_per_prompt": samples})
        generations[name] = stages.run(
            table.generate,
            f"evaluate/{name}/generate",
            generate,
            policy=policy,
            prompts=prompts,
            asked=conditioned_prompts[name] if name in conditioned_prompts else None,
        )
    return generations


def compare_policies(
    config: EvaluationConfig,
    stages: Stages,
    policies: dict[str, PolicyRef],
    answers: dict[str, GenerationsRef],
    reward_models: dict[str, RewardModelRef],
) -> ReportRef:
    """Compare the policies by their answers to the held-out prompts."""
    return stages.run(
        table.evaluate,
        "evaluate",
        config.evaluate.of(answers),
        generations=answers,
        reference=policies[config.evaluate.reference],
        reward_model=reward_models["reward_model"] if "reward_model" in reward_models else None,
    )


def evaluate_policies(
    config: EvaluationConfig,
    stages: Stages,
    *,
    policies: dict[str, PolicyRef],
    prompts: PromptsRef,
    conditioned_prompts: dict[str, PromptsRef],
    reward_models: dict[str, RewardModelRef],
) -> ReportRef:
    """Sample every policy's answers to the held-out prompts (or to its `conditioned_prompts`), and compare them."""
    answers = sample_policies(
        config, stages, policies=policies, prompts=prompts, conditioned_prompts=conditioned_prompts
    )
    return compare_policies(config, stages, policies, answers, reward_models)


def part(data: PreparedDataRef, name: str, kind: type[R]) -> R:
    """Return an artifact of the prepared data by name; raise ConfigError if this data has none."""
    ref = getattr(data, name)
    if not isinstance(ref, kind):
        raise ConfigError(
            f"prepare_data.{name} = {ref!r}: a later stage needs {kind.__name__}; "
            f"give {name} a share in `use` of a source, fix what drops its rows (listed in validation.json of prepare_data), "
            "or remove the section that reads it from the profile"
        )
    return ref
