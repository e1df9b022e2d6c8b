"""Binary classifier optimization: single answers, classified as desirable or not by their implicit reward.

Formula: -log sigmoid(beta l - delta) for desirable answers, -log sigmoid(delta - beta l) for others; delta the running mean of rewards.
Reference: arXiv 2404.04656.
"""

# Shape legend: B rows of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import AnswerMethod
from rlhf_core.algorithms.token_math import LossOutput


class BCOLoss(AnswerMethod):
    """Each answer on its own, classified by its implicit reward against a running mean: arXiv 2404.04656."""

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
        """Return `bco_loss` of the answers."""
        return bco_loss(
            logprobs,
            ref_logprobs,
            desirable,
            shift=shift,
            beta=self.beta,
            rows=rows,
            desirable_rows=desirable_rows,
        )


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
        """Return (mean of desirable + mean of undesirable) / 2: arXiv 2404.04656. 0 where nothing was seen."""
        seen = [mean for mean in (self.desirable, self.undesirable) if mean is not None]
        return sum(seen) / len(seen) if seen else 0.0

    def after(self, *, desirable: list[float], undesirable: list[float], decay: float) -> RewardShift:
        """Return the means after a step with these rewards: m = decay m + (1 - decay) (mean of the step).

        Rewards that are not finite are left out: one of them would stay in the mean for the rest of the run.
        """
        return RewardShift(_moved(self.desirable, desirable, decay), _moved(self.undesirable, undesirable, decay))


def bco_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    *,
    shift: Tensor | float,
    beta: float,
    rows: float | None = None,
    desirable_rows: float | None = None,
) -> LossOutput:
    """Return sum of -log sigmoid(+-(beta l - delta)) over `rows`, + for desirable rows: arXiv 2404.04656.

    l = log pi - log pi_ref of an answer, delta = `shift` (`RewardShift`), detached. `rows` and `desirable_rows` count the
    whole step; None for both: those of this call. Metrics: `loss`, `shift`, `rewards/desirable` and
    `rewards/undesirable` (each the mean over its own rows, 0 where the step has none); the last two need
    `desirable_rows` where `rows` is given.
    """
    reward_B = beta * (logprobs - ref_logprobs)
    delta = torch.as_tensor(shift, dtype=reward_B.dtype, device=reward_B.device).detach()
    desirable_B = desirable != 0
    # arXiv 2404.04656: -log sigmoid(r - delta) for thumbs up, -log sigmoid(-(r - delta)) for thumbs down
    logit_B = torch.where(desirable_B, reward_B - delta, delta - reward_B)
    count = float(len(reward_B)) if rows is None else rows
    loss = -torch.nn.functional.logsigmoid(logit_B).sum() / count
    # A share of the shift, as of every metric: the shares of the micro-batches add up to the step's.
    metrics = {"loss": loss, "shift": delta * (len(reward_B) / count)}
    if rows is None:
        desirable_rows = float(desirable_B.sum())
    if desirable_rows is not None:
        zeros_B = torch.zeros_like(reward_B)
        metrics["rewards/desirable"] = torch.where(desirable_B, reward_B, zeros_B).sum() / max(desirable_rows, 1.0)
        others = max(count - desirable_rows, 1.0)
        metrics["rewards/undesirable"] = torch.where(desirable_B, zeros_B, reward_B).sum() / others
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def _moved(mean: float | None, values: list[float], decay: float) -> float | None:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return mean
    here = sum(values) / len(values)
    return here if mean is None else decay * mean + (1 - decay) * here
