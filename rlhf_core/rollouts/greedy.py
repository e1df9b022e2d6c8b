"""Sample and score one greedy answer for each prompt of a step: the baseline of ReMax (arXiv 2310.10505)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.interfaces import Sampler
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.scored_step import valid_groups
from rlhf_core.store.failures import Counts
from rlhf_core.types import Generation, Rollout, SamplingRequest

logger = logging.getLogger(__name__)


def with_greedy_rewards(
    engine: Sampler,
    rollouts: Sequence[Rollout],
    sampling: SamplingConfig,
    scorer: Scorer,
    *,
    step: int,
    group_size: int,
    note_failed: Callable[[int, Counts], None],
) -> tuple[list[Rollout], tuple[float, ...]]:
    """Return the rollouts that have a baseline, and for each one the reward of the likeliest answer to its prompt.

    The policy that `engine` holds answers each prompt's tokens once, and the answer is scored for each prompt that has
    them, since its label may be another. What `scorer` normalizes is taken as it is (`comparable`). Where such an answer
    has no reward, the prompt's rollouts are invalid and left out; `note_failed` is called with the number that the step has
    once it is made, and the failures of the rollouts and of these answers together. Raises RewardError if no prompt is left.
    """
    asked = list(dict.fromkeys(one.prompt_ids for one in rollouts))
    made = engine.generate([SamplingRequest(ids, 0) for ids in asked], sampling.model_copy(update={"temperature": 0.0}))
    answers = dict(zip(asked, made, strict=True))
    prompts = {(one.prompt.id, one.prompt_ids): one.prompt for one in rollouts}
    comparable = scorer.comparable()
    comparable.at_step(step)
    scored = comparable([Generation(prompt, ids, answers[ids]) for (_, ids), prompt in prompts.items()])
    note_failed(step + 1, _added(scorer.failed(), comparable.failed()))
    greedy = dict(zip(prompts, scored, strict=True))
    for name, one in greedy.items():
        if one.invalid:
            logger.warning("step %d: prompt %s has no greedy answer with a reward (%s)", step, name[0], one.invalid)
    marked = [_based(one, greedy[one.prompt.id, one.prompt_ids]) for one in rollouts]
    kept = valid_groups(marked, group_size=group_size)
    return kept, tuple(greedy[one.prompt.id, one.prompt_ids].reward for one in kept)


def _based(rollout: Rollout, greedy: Rollout) -> Rollout:
    """Return the rollout, invalid if its baseline is."""
    if not greedy.invalid:
        return rollout
    return replace(rollout, reward=math.nan, invalid=f"no baseline, greedy answer: {greedy.invalid}")


def _added(counts: Counts, more: Counts) -> Counts:
    both = {path: (counts.get(path, (0, 0)), more.get(path, (0, 0))) for path in {**counts, **more}}
    return {path: (one[0] + other[0], one[1] + other[1]) for path, (one, other) in both.items()}
