"""Conservative DPO: DPO with label smoothing.

Formula: -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing.
Reference: Mitchell, "A note on DPO with noisy preferences", 2023.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod
from rlhf_core.algorithms.preference.dpo import dpo_loss
from rlhf_core.algorithms.token_math import LossOutput


class CDPOLoss(ReferencedMethod):
    """DPO with label smoothing (conservative DPO)."""

    type: Literal["cdpo"] = "cdpo"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `dpo_loss` of the pairs."""
        return dpo_loss(*pairs.logprobs, beta=self.beta, label_smoothing=self.label_smoothing, pairs=pairs.pairs)
