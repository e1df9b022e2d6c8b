"""Sample and score one greedy answer for each prompt of a step: the baseline of ReMax (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import RewardError, explain
from rlhf_core.interfaces import Sampler
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.types import Generation, Rollout, SamplingRequest


def greedy_rewards(
    engine: Sampler, rollouts: Sequence[Rollout], sampling: SamplingConfig, scorer: Scorer, *, step: int
) -> tuple[float, ...]:
    """Return for each rollout the reward of the likeliest answer to its prompt, by the policy that `engine` holds.

    Each prompt is answered once. `scorer` is to be one whose values do not depend on other answers (`comparable`).
    Raises RewardError where such an answer has no reward: the advantage would have no baseline.
    """
    prompts = {one.prompt_ids: one.prompt for one in rollouts}
    requests = [SamplingRequest(ids, 0) for ids in prompts]
    made = engine.generate(requests, sampling.model_copy(update={"temperature": 0.0}))
    scorer.at_step(step)
    scored = scorer([Generation(prompt, ids, one) for (ids, prompt), one in zip(prompts.items(), made, strict=True)])
    for one in scored:
        if one.invalid:
            where = f"rewards[prompt {one.prompt.id}, greedy answer]"
            raise RewardError(explain(where, one.invalid, "remax has no baseline without it", "fix the reward"))
    found = {one.prompt_ids: one.reward for one in scored}
    return tuple(found[one.prompt_ids] for one in rollouts)
