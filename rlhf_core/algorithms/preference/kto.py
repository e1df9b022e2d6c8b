"""Kahneman-Tversky optimization: single answers, each labeled desirable or not.

Formula: w (1 - sigmoid(+-beta (log-ratio - z))), + for desirable answers, z the mean KL of the step.
Reference: arXiv 2402.01306 eq. 8.
"""

# Shape legend: B rows of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import AnswerMethod
from rlhf_core.algorithms.token_math import LossOutput


class KTOLoss(AnswerMethod):
    """Each answer on its own, desirable or not, against the mean KL of the step: arXiv 2402.01306."""

    type: Literal["kto"] = "kto"
    desirable_weight: float = Field(1.0, gt=0)
    undesirable_weight: float = Field(1.0, gt=0)

    asks_strangers: ClassVar[bool] = True

    def answer_loss(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        desirable: Tensor,
        *,
        kl: float,
        rows: float,
        desirable_rows: float,
    ) -> LossOutput:
        """Return `kto_loss` of the answers."""
        return kto_loss(
            logprobs,
            ref_logprobs,
            desirable,
            kl=kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            rows=rows,
            desirable_rows=desirable_rows,
        )


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    rows: float | None = None,
    desirable_rows: float | None = None,
) -> LossOutput:
    """Return sum of w (1 - sigmoid(+-beta (log-ratio - z))) over `rows`, + for desirable rows: arXiv 2402.01306 eq. 8.

    z = `kl` >= 0 is the reference point (`kto_kl`, of the whole optimizer step), detached. `rows` and `desirable_rows`
    count the whole step; None for both: those of this call. Metrics: `loss`, `kl`, `rewards/desirable` and
    `rewards/undesirable` (each the mean over its own rows, 0 where the step has none); the last two need
    `desirable_rows` where `rows` is given, and are left out without it.
    """
    ratio_B = logprobs - ref_logprobs
    point = torch.as_tensor(kl, dtype=ratio_B.dtype, device=ratio_B.device).detach()
    desirable_B = desirable != 0
    # arXiv 2402.01306 eq. 8: w (1 - sigmoid(+-beta (log-ratio - z)))
    value_B = torch.sigmoid(torch.where(desirable_B, beta * (ratio_B - point), beta * (point - ratio_B)))
    good_B = desirable_B.to(ratio_B.dtype)
    weight_B = desirable_weight * good_B + undesirable_weight * (1 - good_B)
    count = float(len(ratio_B)) if rows is None else rows
    loss = (weight_B * (1 - value_B)).sum() / count
    # A share of the point, as of every metric: the shares of the micro-batches add up to the step's.
    metrics = {"loss": loss, "kl": point * (len(ratio_B) / count)}
    if rows is None:
        desirable_rows = float(desirable_B.sum())
    if desirable_rows is not None:
        reward_B, zeros_B = beta * ratio_B, torch.zeros_like(ratio_B)
        desirable_sum = torch.where(desirable_B, reward_B, zeros_B).sum()
        undesirable_sum = torch.where(desirable_B, zeros_B, reward_B).sum()
        metrics["rewards/desirable"] = desirable_sum / max(desirable_rows, 1.0)
        metrics["rewards/undesirable"] = undesirable_sum / max(count - desirable_rows, 1.0)
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def kto_kl(logprobs_mismatched: Tensor, ref_logprobs_mismatched: Tensor) -> Tensor:
    """Return z = max(0, mean log-ratio) of prompts with other prompts' answers, detached: arXiv 2402.01306.

    Pass all rows of the optimizer step: the mean of means of unequal parts is another number, and so is a mean of
    clamped parts. 0 where there are no rows.
    """
    ratio_B = logprobs_mismatched.detach() - ref_logprobs_mismatched.detach()
    return (ratio_B.sum() / max(len(ratio_B), 1)).clamp(min=0)
