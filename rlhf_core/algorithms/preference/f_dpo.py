"""f-DPO: DPO whose constraint to the reference is another f-divergence.

Formula: -log sigmoid(beta (f'(exp a) - f'(exp b))), f' of u: forward KL -1/u, JS log(2u / (1 + u)), alpha (1 - u^-alpha) / alpha.
Reference: arXiv 2309.16240, theorem 1 and table 1.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

import math
from typing import Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.preference.dpo import smoothed_logistic
from rlhf_core.algorithms.token_math import LOG_RATIO_LIMIT, LossOutput

Divergence: TypeAlias = Literal["reverse_kl", "forward_kl", "js", "alpha"]


class FDPOLoss(ReferencedMethod):
    """DPO with another divergence to the reference: forward KL, Jensen-Shannon or alpha: arXiv 2309.16240."""

    type: Literal["f_dpo"] = "f_dpo"
    divergence: Divergence = "js"
    """`reverse_kl` is DPO itself; `forward_kl` covers the reference most, `js` and `alpha` lie between."""
    alpha: float = Field(0.5, gt=0, lt=1)
    """Order of the divergence `alpha`: near 0 the reverse KL, near 1 the forward KL."""

    @model_validator(mode="after")
    def _check_alpha(self) -> Self:
        if self.divergence != "alpha" and self.alpha != type(self).model_fields["alpha"].default:
            raise ValueError(f'alpha = {self.alpha}: applies only to divergence = "alpha"; remove it, or set that')
        return self

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `f_dpo_loss` of the pairs."""
        return f_dpo_loss(
            *pairs.logprobs, beta=self.beta, divergence=self.divergence, alpha=self.alpha, pairs=pairs.pairs
        )


def f_dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    divergence: Divergence,
    alpha: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sigmoid(beta (f'(u_c) - f'(u_r))) over `pairs`, u = pi / pi_ref of an answer.

    arXiv 2309.16240, theorem 1. The rewards in the metrics are beta f'(u).
    """
    reward_chosen_B = beta * derivative(chosen_logprobs - ref_chosen_logprobs, divergence=divergence, alpha=alpha)
    reward_rejected_B = beta * derivative(rejected_logprobs - ref_rejected_logprobs, divergence=divergence, alpha=alpha)
    # arXiv 2309.16240, theorem 1: -log sigmoid(beta f'(u_c) - beta f'(u_r))
    loss_B = smoothed_logistic(reward_chosen_B - reward_rejected_B, label_smoothing=0.0)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def derivative(log_u_B: Tensor, *, divergence: Divergence, alpha: float) -> Tensor:
    """Return f'(u) of a divergence, up to a constant, from log u: arXiv 2309.16240, table 1.

    Beyond exponents of 20 an exponential goes on as its tangent: finite, and with a gradient for an answer that became
    e^20 times as unlikely.
    """
    match divergence:
        case "reverse_kl":
            return log_u_B  # f' = log u + 1
        case "forward_kl":
            return -_tangent_expm1(-log_u_B) - 1  # f' = -1 / u
        case "js":
            return math.log(2) + torch.nn.functional.logsigmoid(log_u_B)  # f' = log(2u / (1 + u))
        case "alpha":
            return -_tangent_expm1(-alpha * log_u_B) / alpha  # f' = (1 - u^-alpha) / alpha
        case _:
            assert_never(divergence)


def _tangent_expm1(x_B: Tensor) -> Tensor:
    """Return exp(x) - 1, beyond the bound its tangent there: the gradient is exp(bound), neither 0 nor infinite."""
    return torch.expm1(x_B.clamp(max=LOG_RATIO_LIMIT)) + math.exp(LOG_RATIO_LIMIT) * (x_B - LOG_RATIO_LIMIT).clamp(
        min=0
    )
