"""Combine several reward models to one reward."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.algorithms.lazy_torch import torch
from rlhf_core.algorithms.reward import EnsembleReduction, ensemble_score
from rlhf_core.interfaces import RewardFunction
from rlhf_core.rewards.outcomes import RewardOutcome
from rlhf_core.types import Generation


def score_with_ensemble(
    members: Sequence[RewardFunction], generations: Sequence[Generation], *, reduce: EnsembleReduction, k: float
) -> RewardOutcome:
    """Return one score per generation from those of all members; `k` weighs the standard deviation that is taken off.

    Logs `disagreement`, the standard deviation of the members' scores (of the population), and `lower_bound`, their mean
    less that: under optimization the reward of answers that members disagree on is the least to be trusted.
    """
    scores_MB = torch.tensor([member(generations) for member in members])
    spread_B = scores_MB.std(dim=0, correction=0)
    values = tuple(float(score) for score in ensemble_score(scores_MB, reduce=reduce, k=k))
    count = len(generations)
    logs = {
        "disagreement": (float(spread_B.sum()), count),
        "lower_bound": (float((scores_MB.mean(dim=0) - spread_B).sum()), count),
    }
    return RewardOutcome(values, logs=logs)
