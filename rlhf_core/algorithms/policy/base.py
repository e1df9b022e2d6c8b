"""Base classes of policy losses, and the reductions of token terms to one number.

The losses share their keywords and their metrics. `num_tokens` and `sequences` count the whole optimizer step (None: this
call is the whole step, and both are counted here), `max_length` is the divisor, in tokens, of the aggregation `constant`.
`weights` [B, L] are the importance weights of the sampler-trainer correction, detached here (None: 1 everywhere); a token of
weight 0 stays in the denominators.

Metrics: `policy_loss`, `clip_fraction` (tokens whose ratio a clip replaced), `approx_kl` (k3 of old against new),
`ratio_max`.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, assert_never

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.token_math import LossOutput, masked, masked_count, masked_sum, schulman_k3
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.base import Config

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "constant"]


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """A micro-batch of sampled tokens [B, L] with their importance weights, and the counts of the whole optimizer step.

    `function` is the user's, for the loss of type `custom`.
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

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments that every loss begins with."""
        return self.logprobs, self.old_logprobs, self.advantages, self.loss_mask

    @property
    def counts(self) -> dict[str, Any]:
        """The weights and the counts of the step as keyword arguments."""
        return {
            "weights": self.weights,
            "num_tokens": self.num_tokens,
            "sequences": self.sequences,
            "max_length": self.max_length,
        }


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
    loss_mask_BL: Tensor,
    weights_BL: Tensor | None,
    *,
    aggregation: Aggregation,
    num_tokens: float | None,
    sequences: float | None,
    max_length: float | None,
) -> LossOutput:
    """Return the aggregate of -w objective, with the metrics that all policy losses share."""
    terms_BL = -objective_BL if weights_BL is None else -masked(weights_BL.detach(), loss_mask_BL) * objective_BL
    tokens = masked_count(loss_mask_BL) if num_tokens is None else num_tokens
    loss = aggregate(
        terms_BL,
        loss_mask_BL,
        aggregation=aggregation,
        tokens=tokens,
        sequences=float(len(loss_mask_BL)) if sequences is None else sequences,
        max_length=max_length,
    )
    metrics = {
        "policy_loss": loss,
        "clip_fraction": masked_sum(was_clipped_BL, loss_mask_BL) / tokens,
        "approx_kl": masked_sum(schulman_k3(-log_ratio_BL), loss_mask_BL) / tokens,
        "ratio_max": masked(ratio_BL, loss_mask_BL).max(),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def aggregate(
    x_BL: Tensor,
    mask_BL: Tensor,
    *,
    aggregation: Aggregation,
    tokens: float | Tensor,
    sequences: float,
    max_length: float | None,
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
            if max_length is None:
                rule = "aggregation 'constant' divides by it"
                raise ConfigError(explain("max_length", None, rule, "give the longest completion, in tokens"))
            return masked_sum(x_BL, mask_BL) / (sequences * max_length)
        case _:
            assert_never(aggregation)
