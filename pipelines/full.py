"""The whole lifecycle, in the order of the figure: data, imitation, preference, search, optimisation, judgement.

prepare_data -> sft -> reward_model -+-> rejection sampling -+
                                     +-> iterative DPO ------+-> evaluate -> publish
                                     +-> PPO ----------------+
"""

from __future__ import annotations

from typing import TypeVar

from pipelines.graph import Stages
from pipelines.iterative_dpo import iterate_dpo
from pipelines.profile import EvaluationConfig, PipelineConfig, RejectionSamplingConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    ReportRef,
    RewardModelRef,
)

R = TypeVar("R", bound=ArtifactRef)


def lifecycle(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run every stage that the profile has a section for; return the policies by name, in order of making."""
    data = stages.prepare_data("prepare_data", config.prepare_data)
    policies = {"base": part(data, "base", PolicyRef)}
    reward_models: dict[str, RewardModelRef] = {}

    if config.sft:
        demonstrations = part(data, "demonstrations", DemonstrationsRef)
        policies["sft"] = stages.sft("sft", config.sft, policy=policies["base"], demonstrations=demonstrations)

    if config.reward_model:
        preferences = part(data, "preferences", PreferencesRef)
        reward_models["reward_model"] = stages.reward_model(
            "reward_model", config.reward_model, policy=_imitator(policies), preferences=preferences
        )

    if config.rejection_sampling:
        policies["rejection_sampling"] = sample_and_imitate(
            config.rejection_sampling,
            stages,
            policy=_imitator(policies),
            prompts=part(data, "prompts", PromptsRef),
            reward_models=reward_models,
        )

    if config.iterative_dpo:
        policies["iterative_dpo"] = iterate_dpo(
            config.iterative_dpo,
            stages,
            policy=policies[config.iterative_dpo.start_from],
            prompts=part(data, "prompts", PromptsRef),
            reward_models=reward_models,
        )

    if config.ppo:
        start = policies[config.ppo.start_from]
        policies["ppo"] = stages.ppo(
            "ppo",
            config.ppo,
            policy=start,
            reference=start,
            prompts=part(data, "prompts", PromptsRef),
            reward_models=reward_models,
        )

    if config.evaluate:
        eval_prompts = part(data, "eval_prompts", PromptsRef)
        report = judge(config.evaluate, stages, policies=policies, prompts=eval_prompts, reward_models=reward_models)
        if config.publish:
            chosen = config.publish.policy or list(policies)[-1]
            stages.publish("publish", config.publish, policy=policies[chosen], report=report)
    return policies


def sample_and_imitate(
    config: RejectionSamplingConfig,
    stages: Stages,
    *,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> PolicyRef:
    """Rejection sampling (arXiv 2307.09288, section 3.2.3): imitate the best of n of one's own answers."""
    generations = stages.generate("rejection_sampling/generate", config.generate, policy=policy, prompts=prompts)
    rollouts = stages.score(
        "rejection_sampling/score", config.score, generations=generations, reward_models=reward_models
    )
    best = stages.select_demonstrations("rejection_sampling/select", config.select, rollouts=rollouts)
    return stages.sft("rejection_sampling/sft", config.sft, policy=policy, demonstrations=best)


def judge(
    config: EvaluationConfig,
    stages: Stages,
    *,
    policies: dict[str, PolicyRef],
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> ReportRef:
    """Let every policy answer the held-out prompts, and compare the answers."""
    best_of = config.evaluate.best_of
    generations = {}
    for name, policy in policies.items():
        samples = best_of[name] if name in best_of else config.generate.samples_per_prompt
        generate = config.generate.model_copy(update={"samples_per_prompt": samples})
        generations[name] = stages.generate(f"evaluate/{name}/generate", generate, policy=policy, prompts=prompts)
    return stages.evaluate(
        "evaluate",
        config.evaluate,
        generations=generations,
        reference=policies[config.evaluate.reference],
        reward_model=reward_models["reward_model"] if reward_models else None,
    )


def part(data: PreparedDataRef, name: str, kind: type[R]) -> R:
    """Return one of the artifacts inside the prepared data; ConfigError if this data has none."""
    ref = getattr(data, name)
    if not isinstance(ref, kind):
        raise ConfigError(
            f"prepare_data.{name} = {ref!r}: a later stage needs {kind.__name__}; "
            f"let prepare_data make {name}, or take the section that reads it out of the profile"
        )
    return ref


def _imitator(policies: dict[str, PolicyRef]) -> PolicyRef:
    return policies["sft"] if "sft" in policies else policies["base"]
