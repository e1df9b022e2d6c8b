"""Run the online loop: sample, propose, collect, check and refresh the reward model, optimize; repeat.

Iterated RLHF (arXiv 2204.05862, section 4.5; arXiv 2307.09288, section 3.2.3): in every round annotators judge answers
of the current policy, so that the reward model knows the answers that it is about to reward.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from pipelines.flows.graph import Stages
from pipelines.flows.sections import OnlineRounds
from rlhf_core.types import DemonstrationsRef, PolicyRef, PreferencesRef, PromptsRef, RewardModelRef, RolloutsRef
from stages import table
from stages.config.compare_reward_models import CompareRewardModelsConfig
from stages.config.merge_preferences import MergePreferencesConfig


@dataclass
class LoopState:
    """The artifacts of the loop so far; `preferences` has the pairs of every round, and those prepared, by name."""

    policy: PolicyRef
    reward_model: RewardModelRef
    preferences: dict[str, PreferencesRef] = field(default_factory=dict)


def run_online(
    config: OnlineRounds,
    stages: Stages,
    name: str,
    *,
    policy: PolicyRef,
    reference: PolicyRef,
    reward_start: PolicyRef,
    reward_model: RewardModelRef,
    preferences: PreferencesRef | None,
    prompts: PromptsRef,
    demonstrations: DemonstrationsRef | None = None,
) -> dict[str, PolicyRef]:
    """Return the policy of every round by name (`<name>_1`, ...); every round's artifacts stay in the store.

    Reward models are trained from `reward_start`. `preferences` are pairs that are there before the first round, and
    `demonstrations` are for `config.ppo.ptx`.
    """
    state = LoopState(policy, reward_model, {} if preferences is None else {"prepared": preferences})
    policies = {}
    for number in range(1, config.rounds + 1):
        one_round = partial(
            run_round,
            config,
            stages,
            state,
            label=f"{name}/round_{number}",
            number=number,
            reference=reference,
            reward_start=reward_start,
            prompts=prompts,
            demonstrations=demonstrations,
        )
        read = [state.policy, state.reward_model, *state.preferences.values(), reward_start, prompts]
        policies[f"{name}_{number}"] = stages.group(f"{name}/round_{number}", one_round, after=read)
    return policies


def run_round(
    config: OnlineRounds,
    stages: Stages,
    state: LoopState,
    *,
    label: str,
    number: int,
    reference: PolicyRef,
    reward_start: PolicyRef,
    prompts: PromptsRef,
    demonstrations: DemonstrationsRef | None,
) -> PolicyRef:
    """Run one round, and return its policy, which is also that of `state` then."""
    rollouts = sampled(config, stages, state, label=label, number=number, prompts=prompts)
    collected = judged(config, stages, label=label, rollouts=rollouts)
    if config.refresh:
        refresh(config, stages, state, label=label, number=number, start=reward_start, collected=collected)
    state.policy = optimized(
        config,
        replace(stages, seed=stages.seed + number - 1),  # other prompts come first, and other samples
        state,
        label=label,
        reference=reference,
        prompts=prompts,
        collected=collected,
        demonstrations=demonstrations,
    )
    return state.policy


def sampled(
    config: OnlineRounds, stages: Stages, state: LoopState, *, label: str, number: int, prompts: PromptsRef
) -> RolloutsRef:
    """Return answers of the current policy, scored by the current reward model. Each round draws new samples."""
    generate = config.generate.model_copy(update={"round": config.generate.round + number - 1})
    generations = stages.run(table.generate, f"{label}/generate", generate, policy=state.policy, prompts=prompts)
    return stages.run(
        table.score,
        f"{label}/score",
        config.score,
        generations=generations,
        reward_models={"reward_model": state.reward_model},
    )


def judged(config: OnlineRounds, stages: Stages, *, label: str, rollouts: RolloutsRef) -> PreferencesRef:
    """Return the pairs that annotators prefer among the answers."""
    comparisons = stages.run(
        table.propose_comparisons, f"{label}/propose", config.propose, rollouts={"policy": rollouts}
    )
    return stages.run(table.collect_preferences, f"{label}/collect", config.collect, comparisons=comparisons)


def refresh(
    config: OnlineRounds,
    stages: Stages,
    state: LoopState,
    *,
    label: str,
    number: int,
    start: PolicyRef,
    collected: PreferencesRef,
) -> None:
    """Train a reward model on all pairs so far, and compare it with the one before on held-out pairs of this round.

    A prompt is held out in every round or in none, so a model of a round was trained on none of their prompts. The first
    one before, that of `[reward_model]`, may have been: its pairs were split by another rule.
    """
    state.preferences[f"round_{number}"] = collected
    pairs = collected
    if len(state.preferences) > 1:
        pairs = stages.run(
            table.merge_preferences, f"{label}/pairs", MergePreferencesConfig(), preferences=state.preferences
        )
    before = state.reward_model
    state.reward_model = stages.run(
        table.reward_model, f"{label}/reward_model", config.reward_model, policy=start, preferences=pairs
    )
    stages.run(
        table.compare_reward_models,
        f"{label}/compare",
        CompareRewardModelsConfig(),
        reward_models={"before": before, "after": state.reward_model},
        preferences=collected,
    )


def optimized(
    config: OnlineRounds,
    stages: Stages,
    state: LoopState,
    *,
    label: str,
    reference: PolicyRef,
    prompts: PromptsRef,
    collected: PreferencesRef,
    demonstrations: DemonstrationsRef | None,
) -> PolicyRef:
    """Return the policy after a round: PPO on the reward model, or DPO on the pairs of the round."""
    if config.dpo is not None:
        return stages.run(
            table.dpo, f"{label}/dpo", config.dpo, policy=state.policy, reference=reference, preferences=collected
        )
    assert config.ppo is not None  # the configuration has exactly one of them
    return stages.run(
        table.ppo,
        f"{label}/ppo",
        config.ppo,
        policy=state.policy,
        reference=reference,
        prompts=prompts,
        reward_models={"reward_model": state.reward_model},
        demonstrations=demonstrations,
    )
