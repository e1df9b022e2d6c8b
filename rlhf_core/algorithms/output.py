"""What every loss returns."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.errors import ConfigError, explain


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss and of the metrics of one optimizer step.

    Every loss takes the denominators of the whole optimizer step (all micro-batches, all ranks) and returns partial
    sums that are already divided by them: adding the outputs of all micro-batches gives the step's loss and metrics,
    so neither depends on how the step was cut. A metric whose name ends in `_max` is combined by max instead.

    `metrics` are detached scalars.

    >>> import torch
    >>> LossOutput(loss=torch.tensor(0.5), metrics={"nll": torch.tensor(0.5)}).metrics["nll"].item()
    0.5
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def check_terms(returned: object, shape: torch.Size, what: str) -> None:
    """Raise ConfigError unless `returned` are terms of this shape through which a gradient flows."""
    if not isinstance(returned, torch.Tensor) or returned.shape != shape:
        found = f"shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned).__name__
        rule = f"must be a tensor of shape {tuple(shape)}"
        raise ConfigError(explain("loss.function returned", found, rule, f"return {what}, without a mean or a sum"))
    if torch.is_grad_enabled() and not returned.requires_grad:
        rule = "has no gradient"
        raise ConfigError(explain("loss.function returned", "a tensor", rule, "compute it from the policy's log-probs"))
