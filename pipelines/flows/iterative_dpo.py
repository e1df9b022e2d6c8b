"""Run iterative DPO (arXiv 2312.11456, 2405.07863): sample, score, pair the best with the worst, train; repeat."""

from __future__ import annotations

from functools import partial

from pipelines.flows.graph import Stages
from pipelines.flows.sections import IterativeDPOConfig
from rlhf_core.types import PolicyRef, PreferencesRef, PromptsRef, RewardModelRef
from stages import table


def iterate_dpo(
    config: IterativeDPOConfig,
    stages: Stages,
    *,
    policy: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> PolicyRef:
    """Return the policy of the last round; every round's answers, pairs and policy stay in the store."""
    reference = policy
    for number in range(1, config.rounds + 1):
        one_round = partial(
            dpo_round,
            config,
            stages,
            number=number,
            policy=policy,
            reference=reference,
            prompts=prompts,
            reward_models=reward_models,
        )
        read = [policy, reference, prompts, *reward_models.values()]
        policy = stages.group(f"iterative_dpo/round_{number}", one_round, after=read)
        if config.reference == "previous":
            reference = policy
    return policy


def dpo_round(
    config: IterativeDPOConfig,
    stages: Stages,
    *,
    number: int,
    policy: PolicyRef,
    reference: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, RewardModelRef],
) -> PolicyRef:
    """Run one round: generate -> score -> select (pairs) -> dpo. Every round uses new sampling seeds."""
    label = f"iterative_dpo/round_{number}"
    generate = config.generate.model_copy(update={"round": config.generate.round + number - 1})
    generations = stages.run(table.generate, f"{label}/generate", generate, policy=policy, prompts=prompts)
    rollouts = stages.run(
        table.score, f"{label}/score", config.score, generations=generations, reward_models=reward_models
    )
    pairs = stages.run_as(PreferencesRef, table.select, f"{label}/select", config.select, rollouts=rollouts)
    return stages.run(table.dpo, f"{label}/dpo", config.dpo, policy=policy, reference=reference, preferences=pairs)
