"""Groups of stages as functions that yield nodes: learning from a policy's own answers, and the online loop.

Rejection sampling (arXiv 2307.09288, section 3.2.3) imitates the best of n answers, conditional SFT (arXiv 2308.12050) all
answers with their rewards in the prompt. Iterative DPO (arXiv 2312.11456, 2405.07863) pairs the best with the worst. The
online loop is iterated RLHF (arXiv 2204.05862, section 4.5; arXiv 2307.09288, section 3.2.3): in every round annotators judge
answers of the current policy, so that the reward model knows the answers that it is about to reward.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pipelines.flows.nodes import Names, Node, group
from pipelines.flows.sections import ConditionalSFTConfig, IterativeDPORounds, OnlineRounds, RejectionSamplingConfig
from rlhf_core.types import DemonstrationsRef, ModelRef, PolicyRef, PreferencesRef, PromptsRef, RewardModelRef
from stages.compare_reward_models import CompareRewardModelsConfig
from stages.merge_preferences import MergePreferencesConfig
from stages.sft import SFTConfig
from stages.table import STAGES


def score_nodes(
    label: str, config: Any, policy: str, prompts: str, models: Names, *, shown: str, number: int = 1
) -> Iterator[Node]:
    """Yield generate -> score. Every round draws new samples."""
    sampling = config.generate.model_copy(update={"round": config.generate.round + number - 1})
    answers = f"{label}/generate"
    yield Node(answers, "generate", sampling, {"policy": policy, "prompts": prompts}, group=shown)
    inputs: dict[str, Names] = {"generations": answers, "reward_models": models}
    yield Node(f"{label}/score", "score", config.score, inputs, group=shown)


def imitate_nodes(label: str, policy: str, stage: str, options: Any, sft: SFTConfig) -> Iterator[Node]:
    """Yield the stage that makes demonstrations of scored answers -> sft."""
    demonstrations = f"{label}/{stage}"
    yield Node(demonstrations, stage, options, {"rollouts": f"{label}/score"}, group=label)
    inputs = {"policy": policy, "demonstrations": demonstrations}
    yield Node(f"{label}/sft", "sft", sft, inputs, names=(label,), group=label)


@group("rejection_sampling")
def rejection_sampling_nodes(
    label: str,
    config: RejectionSamplingConfig,
    *,
    policy: Annotated[str, PolicyRef],
    prompts: Annotated[str, PromptsRef],
    reward_models: Annotated[Mapping[str, str], ModelRef],
) -> Iterator[Node]:
    """Yield generate -> score -> select -> sft."""
    yield from score_nodes(label, config, policy, prompts, reward_models, shown=label)
    yield from imitate_nodes(label, policy, "select", config.select, config.sft)


@group("conditional_sft")
def conditional_sft_nodes(
    label: str,
    config: ConditionalSFTConfig,
    *,
    policy: Annotated[str, PolicyRef],
    prompts: Annotated[str, PromptsRef],
    reward_models: Annotated[Mapping[str, str], ModelRef],
) -> Iterator[Node]:
    """Yield generate -> score -> condition -> sft."""
    yield from score_nodes(label, config, policy, prompts, reward_models, shown=label)
    yield from imitate_nodes(label, policy, "condition", config.condition, config.sft)


def ask_node(label: str, name: str, config: ConditionalSFTConfig, prompts: str, shown: str = "") -> Node:
    """The prompts that request the best level of the rewards in the rollouts of the conditional SFT `name`."""
    inputs = {"rollouts": f"{name}/score", "prompts": prompts}
    return Node(label, "condition", config.condition, inputs, group=shown)


@group("iterative_dpo")
def iterative_dpo_nodes(
    label: str,
    config: IterativeDPORounds,
    *,
    policy: Annotated[str, PolicyRef],
    prompts: Annotated[str, PromptsRef],
    reward_models: Annotated[Mapping[str, str], ModelRef],
) -> Iterator[Node]:
    """Yield rounds of generate -> score -> select (pairs) -> dpo."""
    reference = policy
    for number in range(1, config.rounds + 1):
        at = f"{label}/round_{number}"
        yield from score_nodes(at, config, policy, prompts, reward_models, shown=at, number=number)
        yield Node(f"{at}/select", "select", config.select, {"rollouts": f"{at}/score"}, group=at)
        inputs = {"policy": policy, "reference": reference, "preferences": f"{at}/select"}
        policy = f"{at}/dpo"
        yield Node(policy, "dpo", config.dpo, inputs, names=(label,) if number == config.rounds else (), group=at)
        reference = policy if config.reference == "previous" else reference


@group(
    "online",
    policies=lambda label, config: [f"{label}_{number}" for number in range(1, config.rounds + 1)],
    optional=lambda config: ("preferences", *(() if config.uses_demonstrations else ("demonstrations",))),
)
def online_nodes(
    label: str,
    config: OnlineRounds,
    *,
    policy: Annotated[str, PolicyRef],
    reward_start: Annotated[str, PolicyRef],
    first_reward_model: Annotated[str, RewardModelRef],
    preferences: Annotated[str, PreferencesRef],
    prompts: Annotated[str, PromptsRef],
    demonstrations: Annotated[str, DemonstrationsRef],
) -> Iterator[Node]:
    """Yield rounds of generate -> score -> propose -> collect -> reward model -> ppo or dpo.

    The first policy is the reference of all rounds, and reward models are trained from `reward_start`. A prompt is held
    out in every round or in none, so no reward model of a round was trained on held-out prompts. The first reward model
    may have been.
    """
    reference, model = policy, first_reward_model
    pairs = {"prepared": preferences} if preferences else {}
    stage = "dpo" if config.dpo else "ppo"
    for number in range(1, config.rounds + 1):
        at = f"{label}/round_{number}"
        collected = f"{at}/collect"
        yield from score_nodes(at, config, policy, prompts, {"reward_model": model}, shown=at, number=number)
        rollouts = {"rollouts": {"policy": f"{at}/score"}}
        yield Node(f"{at}/propose", "propose_comparisons", config.propose, rollouts, group=at)
        comparisons = {"comparisons": f"{at}/propose"}
        yield Node(collected, "collect_preferences", config.collect, comparisons, group=at)
        if config.refresh:
            pairs = {**pairs, f"round_{number}": collected}
            read, before, model = collected, model, f"{at}/reward_model"
            if len(pairs) > 1:
                read = f"{at}/pairs"
                yield Node(read, "merge_preferences", MergePreferencesConfig(), {"preferences": pairs}, group=at)
            inputs: dict[str, Names] = {"policy": reward_start, "preferences": read}
            yield Node(model, "reward_model", config.reward_model, inputs, group=at)
            inputs = {"reward_models": {"before": before, "after": model}, "preferences": collected}
            yield Node(f"{at}/compare", "compare_reward_models", CompareRewardModelsConfig(), inputs, group=at)
        inputs = {"policy": policy, "reference": reference, "preferences": collected, "prompts": prompts}
        inputs |= {"reward_models": {"reward_model": model}, "demonstrations": demonstrations}
        inputs = {name: names for name, names in inputs.items() if name in STAGES[stage].inputs}
        policy = f"{at}/{stage}"
        optimizer = config.dpo or config.ppo
        assert optimizer is not None  # the configuration has exactly one of them
        # With another seed other prompts come first, and other samples.
        yield Node(policy, stage, optimizer, inputs, names=(f"{label}_{number}",), seed=number - 1, group=at)
