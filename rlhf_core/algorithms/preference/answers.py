"""Losses on single answers, each labeled desirable or not."""

# Shape legend: B rows of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.preference.base import AnswerMethod
from rlhf_core.algorithms.token_math import LossOutput, Tensor, log_sigmoid


class KTOLoss(AnswerMethod):
    """Kahneman-Tversky optimization: single answers, each labeled desirable or not.

    Formula: w (1 - sigmoid(+-beta (log-ratio - z))), + for desirable answers, z the mean KL of the step.
    Reference: arXiv 2402.01306 eq. 8.
    """

    type: Literal["kto"] = "kto"
    desirable_weight: float = Field(1.0, gt=0)
    undesirable_weight: float = Field(1.0, gt=0)

    needs_mismatches: ClassVar[bool] = True

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
        """Compute the share of these answers in the loss; `kl` is z of the whole step (`kto_kl`).

        See `answer_output`.
        """
        ratio_B, desirable_B = logprobs - ref_logprobs, desirable != 0
        value_B = (self.beta * (ratio_B - kl)).where(desirable_B, self.beta * (kl - ratio_B)).sigmoid()
        good_B = desirable_B.to(ratio_B.dtype)
        weight_B = self.desirable_weight * good_B + self.undesirable_weight * (1 - good_B)
        loss_B = weight_B * (1 - value_B)
        return answer_output(
            loss_B, self.beta * ratio_B, desirable_B, {"kl": kl}, rows=rows, desirable_rows=desirable_rows
        )


def kto_kl(logprobs_mismatched: Tensor, ref_logprobs_mismatched: Tensor) -> Tensor:
    """z = max(0, mean log-ratio) of prompts with other prompts' answers, detached: arXiv 2402.01306.

    Pass all rows of the optimizer step: the mean of means of unequal parts is another number, and so is a mean of
    clamped parts. 0 without rows.
    """
    ratio_B = logprobs_mismatched.detach() - ref_logprobs_mismatched.detach()
    return (ratio_B.sum() / max(len(ratio_B), 1)).clamp(min=0)


class BCOLoss(AnswerMethod):
    """Binary classifier optimization: single answers, classified as desirable or not by their implicit reward.

    Formula: -log sigmoid(beta l - delta) for desirable answers, -log sigmoid(delta - beta l) for others; delta the running mean of rewards.
    Reference: arXiv 2404.04656.
    """

    type: Literal["bco"] = "bco"
    shift_decay: float = Field(0.9, ge=0, lt=1)
    """Weight of the past in the running mean of rewards; 0 takes each step's own mean."""

    def answer_loss(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        desirable: Tensor,
        *,
        shift: float,
        rows: float,
        desirable_rows: float,
    ) -> LossOutput:
        """Compute the share of these answers in the loss; `shift` is delta (`RewardShift`). See `answer_output`."""
        reward_B, desirable_B = self.beta * (logprobs - ref_logprobs), desirable != 0
        loss_B = -log_sigmoid((reward_B - shift).where(desirable_B, shift - reward_B))
        return answer_output(loss_B, reward_B, desirable_B, {"shift": shift}, rows=rows, desirable_rows=desirable_rows)


@dataclass(frozen=True)
class RewardShift:
    """The running means of the rewards of desirable and of undesirable answers; None until one was seen.

    >>> RewardShift().after(desirable=[2.0], undesirable=[-1.0], decay=0.9).delta
    0.5
    """

    desirable: float | None = None
    undesirable: float | None = None

    @property
    def delta(self) -> float:
        """(mean of desirable + mean of undesirable) / 2: arXiv 2404.04656. 0 before any answer was seen."""
        seen = [mean for mean in (self.desirable, self.undesirable) if mean is not None]
        return sum(seen) / len(seen) if seen else 0.0

    def after(self, *, desirable: list[float], undesirable: list[float], decay: float) -> RewardShift:
        """The means after a step with these rewards: m = decay m + (1 - decay) (mean of the step).

        Rewards that are not finite are left out: a single one would stay in the mean for the rest of the run.
        """
        return RewardShift(_moved(self.desirable, desirable, decay), _moved(self.undesirable, undesirable, decay))


def _moved(mean: float | None, values: list[float], decay: float) -> float | None:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return mean
    here = sum(values) / len(values)
    return here if mean is None else decay * mean + (1 - decay) * here


def answer_output(
    loss_B: Tensor,
    reward_B: Tensor,
    desirable_B: Tensor,
    point: dict[str, float],
    *,
    rows: float,
    desirable_rows: float,
) -> LossOutput:
    """Sum the loss over `rows`; `rows` and `desirable_rows` count the whole optimizer step.

    Metrics: `loss`, the number in `point` under its name, `rewards/desirable` and `rewards/undesirable` (each the mean
    over its own rows, 0 where the step has none).
    """
    loss = loss_B.sum() / rows
    metrics = {
        "loss": loss,
        # A share of the point, as of every metric: the shares of the micro-batches add up to the step's.
        **{name: reward_B.new_full((), value) * (len(reward_B) / rows) for name, value in point.items()},
        "rewards/desirable": reward_B.masked_fill(~desirable_B, 0.0).sum() / max(desirable_rows, 1.0),
        "rewards/undesirable": reward_B.masked_fill(desirable_B, 0.0).sum() / max(rows - desirable_rows, 1.0),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
