"""Efficient exact optimization on pairs: the reverse KL, where DPO has the forward one.

Formula: KL((sig(beta h), sig(-beta h)) || (1 - e, e)), e = label_smoothing.
Reference: arXiv 2402.00856 eq. 16.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.errors import ConfigError, explain


class EXOLoss(ReferencedMethod):
    """Reverse KL between the policy's and the labels' preference: arXiv 2402.00856."""

    type: Literal["exo"] = "exo"
    label_smoothing: float = Field(0.001, gt=0, lt=0.5)
    """The labels' doubt; the loss is infinite without."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `exo_loss` of the pairs."""
        return exo_loss(*pairs.logprobs, beta=self.beta, label_smoothing=self.label_smoothing, pairs=pairs.pairs)


def exo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of KL((sig(beta h), sig(-beta h)) || (1 - e, e)) over `pairs`: arXiv 2402.00856 eq. 16.

    The reverse KL of the pair, where DPO has the forward one. e = `label_smoothing` in (0, 1); the paper uses 1e-3. At 0
    the divergence is infinite: ConfigError.
    """
    if not 0 < label_smoothing < 1:
        raise ConfigError(
            explain("label_smoothing", label_smoothing, "exo needs a label in (0, 1)", "the paper uses 1e-3")
        )
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    logsigmoid = torch.nn.functional.logsigmoid
    # arXiv 2402.00856 eq. 16: KL((sig(beta h), sig(-beta h)) || (1 - e, e)), its two terms
    won_B = torch.sigmoid(logit_B) * (logsigmoid(logit_B) - math.log1p(-label_smoothing))
    lost_B = torch.sigmoid(-logit_B) * (logsigmoid(-logit_B) - math.log(label_smoothing))
    rewards = (reward_chosen_B, reward_rejected_B)
    return pair_output(won_B + lost_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)
