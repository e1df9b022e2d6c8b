"""Base classes of policy losses, and the reductions of token terms to one number."""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, assert_never

from rlhf_core.algorithms.token_math import LossOutput, Tensor, bounded, masked, masked_sum, schulman_k3
from rlhf_core.schema.base import Config

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "constant"]


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """A micro-batch of sampled tokens [B, L], and the counts of the whole optimizer step.

    `weights` are the importance weights of the sampler-trainer correction; a token of weight 0 stays in the denominators.
    `max_length` is the divisor, in tokens, of the aggregation `constant`. `function` is the user's, for the loss of type
    `custom`.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    weights: Tensor
    num_tokens: float
    sequences: float
    max_length: float
    function: Callable[..., Tensor] | None = None

    def masked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log rho, rho = exp(log pi - log pi_old), and the advantages, each 0 (rho: 1) outside the mask."""
        log_ratio_BL = masked(self.logprobs - self.old_logprobs, self.loss_mask)
        return log_ratio_BL, bounded(log_ratio_BL).exp(), masked(self.advantages, self.loss_mask)

    def row_mean(self, x_BL: Tensor) -> Tensor:
        """Return the mean [B, 1] of each row of `x`, which is 0 outside the mask; 0 for a row without tokens."""
        return x_BL.sum(dim=-1, keepdim=True) / (self.loss_mask != 0).sum(dim=-1, keepdim=True).clamp(min=1)


class PolicyMethod(Config):
    """A policy loss: its options are its fields. A subclass with a `type` in this folder is found by it."""

    if TYPE_CHECKING:
        type: str

    chooses_tokens: ClassVar[bool] = False
    """Whether it chooses tokens by the step as a whole, which a micro-batch does not see: `step_advantages`."""

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return the micro-batch's share of the loss and of the metrics of the step; see `policy_output`."""
        raise NotImplementedError

    def step_advantages(
        self, advantages_BL: Tensor, old_logprobs_BL: Tensor, loss_mask_BL: Tensor, *, seed: int
    ) -> Tensor:
        """Return the advantages to train on, given those of all completions of the step and log pi_old.

        It is called only for a loss that `chooses_tokens`. An advantage of 0 takes a token's gradient and leaves it in the
        denominators. `seed` is the step's own.
        """
        return advantages_BL


def policy_output(
    objective_BL: Tensor,
    log_ratio_BL: Tensor,
    ratio_BL: Tensor,
    was_clipped_BL: Tensor,
    batch: PolicyBatch,
    *,
    aggregation: Aggregation,
) -> LossOutput:
    """Return the aggregate of -w objective, with the metrics that all policy losses share; w has no gradient.

    Metrics: `policy_loss`, `clip_fraction` (tokens whose ratio a clip replaced), `approx_kl` (k3 of old against new),
    `ratio_max`.
    """
    loss = aggregate(
        -masked(batch.weights.detach(), batch.loss_mask) * objective_BL,
        batch.loss_mask,
        aggregation=aggregation,
        tokens=batch.num_tokens,
        sequences=batch.sequences,
        max_length=batch.max_length,
    )
    metrics = {
        "policy_loss": loss,
        "clip_fraction": masked_sum(was_clipped_BL, batch.loss_mask) / batch.num_tokens,
        "approx_kl": masked_sum(schulman_k3(-log_ratio_BL), batch.loss_mask) / batch.num_tokens,
        "ratio_max": masked(ratio_BL, batch.loss_mask).max(),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def aggregate(
    x_BL: Tensor,
    mask_BL: Tensor,
    *,
    aggregation: Aggregation,
    tokens: float,
    sequences: float,
    max_length: float,
) -> Tensor:
    """Return this micro-batch's share of the mean of `x` over masked tokens of the whole optimizer step.

    `token_mean`: every token weighs the same (DAPO, arXiv 2503.14476 eq. 12). `seq_mean_token_mean`: every sequence
    weighs the same (GRPO, arXiv 2402.03300 eq. 3). `constant`: sums over the constant `max_length`, so that length
    carries no bias (Dr. GRPO, arXiv 2503.20783 section 3.2). A row without masked tokens adds 0.
    """
    match aggregation:
        case "token_mean":
            return masked_sum(x_BL, mask_BL) / tokens
        case "seq_mean_token_mean":
            length_B = (mask_BL != 0).sum(dim=-1).clamp(min=1)
            return (masked(x_BL, mask_BL).sum(dim=-1) / length_B).sum() / sequences
        case "constant":
            return masked_sum(x_BL, mask_BL) / (sequences * max_length)
        case _:
            assert_never(aggregation)
