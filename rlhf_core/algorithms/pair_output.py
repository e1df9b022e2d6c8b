"""What every loss on pairs returns: the mean of the terms, and the metrics that the literature plots."""

# Shape legend: B pairs of a batch.

from __future__ import annotations

from torch import Tensor

from rlhf_core.algorithms.output import LossOutput


def pair_output(
    loss_B: Tensor,
    reward_chosen_B: Tensor,
    reward_rejected_B: Tensor,
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    pairs: float | None,
) -> LossOutput:
    """Return sum of `loss` over `pairs`, the pairs of the whole optimizer step; None says that this call is the step.

    Metrics: `loss`, `rewards/chosen`, `rewards/rejected`, `rewards/margin`, `rewards/accuracy` (margin > 0, strictly),
    `logprobs/chosen`, `logprobs/rejected`.
    """
    count = float(len(loss_B)) if pairs is None else pairs
    margin_B = reward_chosen_B - reward_rejected_B
    loss = loss_B.sum() / count
    metrics = {
        "loss": loss,
        "rewards/chosen": reward_chosen_B.sum() / count,
        "rewards/rejected": reward_rejected_B.sum() / count,
        "rewards/margin": margin_B.sum() / count,
        "rewards/accuracy": (margin_B > 0).float().sum() / count,
        "logprobs/chosen": chosen_B.sum() / count,
        "logprobs/rejected": rejected_B.sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
