"""Combine several reward models to one reward."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.algorithms.lazy_torch import torch
from rlhf_core.algorithms.reward import EnsembleReduction, ensemble_score
from rlhf_core.interfaces import RewardFunction
from rlhf_core.types import Generation


def score_with_ensemble(
    members: Sequence[RewardFunction], generations: Sequence[Generation], *, reduce: EnsembleReduction, k: float
) -> list[float]:
    """Return one score per generation from those of all members; `k` weighs the standard deviation that is taken off."""
    scores_MB = torch.tensor([member(generations) for member in members])
    return [float(score) for score in ensemble_score(scores_MB, reduce=reduce, k=k)]
