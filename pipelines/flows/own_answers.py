"""Learn from a policy's own answers: rejection sampling, conditional SFT, and iterative DPO.

Iterative DPO (arXiv 2312.11456, 2405.07863) samples, scores, pairs the best with the worst and trains, in rounds.
"""

from collections.abc import Mapping
from functools import partial

from pipelines.flows.graph import Stages
from pipelines.flows.sections import ConditionalSFTConfig, IterativeDPORounds, RejectionSamplingConfig
from rlhf_core.types import DemonstrationsRef, ModelRef, PolicyRef, PreferencesRef, PromptsRef, RolloutsRef
from stages import table


def sample_and_score(
    config: RejectionSamplingConfig | ConditionalSFTConfig | IterativeDPORounds,
    stages: Stages,
    label: str,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: Mapping[str, ModelRef],
) -> RolloutsRef:
    """Return scored answers of the policy."""
    generations = stages.run(table.generate, f"{label}/generate", config.generate, policy=policy, prompts=prompts)
    return stages.run(table.score, f"{label}/score", config.score, generations=generations, reward_models=reward_models)


def sample_and_imitate(
    config: RejectionSamplingConfig,
    stages: Stages,
    label: str,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: Mapping[str, ModelRef],
) -> PolicyRef:
    """Run rejection sampling (arXiv 2307.09288, section 3.2.3): SFT on the best of n of the policy's own answers."""
    rollouts = sample_and_score(config, stages, label, policy, prompts, reward_models)
    best = stages.run_as(DemonstrationsRef, table.select, f"{label}/select", config.select, rollouts=rollouts)
    return stages.run(table.sft, f"{label}/sft", config.sft, policy=policy, demonstrations=best)


def condition_and_imitate(
    config: ConditionalSFTConfig,
    stages: Stages,
    label: str,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: Mapping[str, ModelRef],
) -> tuple[PolicyRef, RolloutsRef]:
    """Run conditional SFT (arXiv 2308.12050) on the policy's own answers; return the policy and the rollouts."""
    rollouts = sample_and_score(config, stages, label, policy, prompts, reward_models)
    levels = stages.run_as(
        DemonstrationsRef, table.condition, f"{label}/condition", config.condition, rollouts=rollouts
    )
    return stages.run(table.sft, f"{label}/sft", config.sft, policy=policy, demonstrations=levels), rollouts


def iterate_dpo(
    config: IterativeDPORounds,
    stages: Stages,
    name: str,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: Mapping[str, ModelRef],
) -> PolicyRef:
    """Return the policy of the last round; every round's answers, pairs and policy stay in the store."""
    reference = policy
    for number in range(1, config.rounds + 1):
        one_round = partial(
            dpo_round,
            config,
            stages,
            f"{name}/round_{number}",
            number=number,
            policy=policy,
            reference=reference,
            prompts=prompts,
            reward_models=reward_models,
        )
        read = [policy, reference, prompts, *reward_models.values()]
        policy = stages.group(f"{name}/round_{number}", one_round, after=read)
        if config.reference == "previous":
            reference = policy
    return policy


def dpo_round(
    config: IterativeDPORounds,
    stages: Stages,
    label: str,
    *,
    number: int,
    policy: PolicyRef,
    reference: PolicyRef,
    prompts: PromptsRef,
    reward_models: Mapping[str, ModelRef],
) -> PolicyRef:
    """Run one round: generate -> score -> select (pairs) -> dpo. Every round uses new sampling seeds."""
    generate = config.generate.model_copy(update={"round": config.generate.round + number - 1})
    config = config.model_copy(update={"generate": generate})
    rollouts = sample_and_score(config, stages, label, policy, prompts, reward_models)
    pairs = stages.run_as(PreferencesRef, table.select, f"{label}/select", config.select, rollouts=rollouts)
    return stages.run(table.dpo, f"{label}/dpo", config.dpo, policy=policy, reference=reference, preferences=pairs)
