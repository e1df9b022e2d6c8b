"""Policy losses: their base class and reductions, PPO's clipped surrogate, its variants by sequence, and Clip-Cov."""

# Shape legend: B rows of a batch, L positions, N masked tokens. Tensors are [B, L] unless noted.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.algorithms.token_math import (
    LossOutput,
    Tensor,
    bounded,
    loaded_torch,
    masked,
    masked_count,
    masked_sum,
    schulman_k3,
)
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
        """Compute log rho, rho = exp(log pi - log pi_old), and the advantages, each 0 (rho: 1) outside the mask."""
        log_ratio_BL = masked(self.logprobs - self.old_logprobs, self.loss_mask)
        return log_ratio_BL, bounded(log_ratio_BL).exp(), masked(self.advantages, self.loss_mask)

    def row_mean(self, x_BL: Tensor) -> Tensor:
        """The mean [B, 1] of each row of `x`, which is 0 outside the mask; 0 for a row without tokens."""
        return x_BL.sum(dim=-1, keepdim=True) / (self.loss_mask != 0).sum(dim=-1, keepdim=True).clamp(min=1)


class PolicyMethod(Config):
    """A policy loss: its options are its fields. A subclass in this folder is registered under its `type`."""

    if TYPE_CHECKING:
        type: str

    chooses_tokens: ClassVar[bool] = False
    """Whether it chooses tokens by the step as a whole, which a micro-batch does not see: `step_advantages`."""

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Compute the micro-batch's share of the loss and of the metrics of the step; see `policy_output`."""
        raise NotImplementedError

    def step_advantages(
        self, advantages_BL: Tensor, old_logprobs_BL: Tensor, loss_mask_BL: Tensor, *, seed: int
    ) -> Tensor:
        """Choose the advantages to train on, given the advantages of all completions of the step and log pi_old.

        It is called only for a loss that `chooses_tokens`. An advantage of 0 removes a token's gradient and leaves the
        token in the denominators. `seed` is the seed of the step.
        """
        return advantages_BL


class ClipLoss(PolicyMethod):
    """PPO's clipped surrogate; with separate bounds "clip higher", and dual clip.

    Formula: -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).
    Reference: arXiv 1707.06347 eq. 7; clip higher: arXiv 2503.14476 eq. 10; dual clip: arXiv 1912.09729.
    """

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(0.0, ge=0)
    """Bounds the loss of negative advantages (arXiv 1912.09729); 0 switches it off, 3 is common."""
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, ratio_BL, advantages_BL = batch.masked()
        objective_BL, was_clipped_BL = clipped(ratio_BL, advantages_BL, low=self.clip_low, high=self.clip_high)
        if self.dual_clip:
            # arXiv 1912.09729: max(min(rho A, clip(rho) A), c A) where A < 0
            floor_BL = self.dual_clip * advantages_BL
            below_BL = (advantages_BL < 0) & (objective_BL < floor_BL)
            objective_BL = floor_BL.where(below_BL, objective_BL)
            was_clipped_BL = was_clipped_BL | below_BL
        return policy_output(objective_BL, log_ratio_BL, ratio_BL, was_clipped_BL, batch, aggregation=self.aggregation)


class ClipCovLoss(PolicyMethod):
    """Clip-Cov: PPO's clip, and no gradient for a few of the tokens that lower the entropy most.

    Formula: -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), 0 for tokens drawn among those with cov in [cov_low, cov_high].
    Reference: arXiv 2505.22617.
    """

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    fraction: float = Field(0.0002, gt=0, le=1)
    """Share of the tokens of a step that lose their gradient, at least one."""
    cov_low: float = 1.0
    """Smallest covariance of a token that may be drawn."""
    cov_high: float = 5.0
    """Largest covariance of a token that may be drawn."""
    aggregation: Aggregation = "token_mean"

    chooses_tokens: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_order_of_bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low}: must be < cov_high = {self.cov_high}; lower it")
        return self

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, ratio_BL, advantages_BL = batch.masked()  # the drawn tokens have an advantage of 0
        objective_BL, was_clipped_BL = clipped(ratio_BL, advantages_BL, low=self.clip_low, high=self.clip_high)
        return policy_output(objective_BL, log_ratio_BL, ratio_BL, was_clipped_BL, batch, aggregation=self.aggregation)

    def step_advantages(
        self, advantages_BL: Tensor, old_logprobs_BL: Tensor, loss_mask_BL: Tensor, *, seed: int
    ) -> Tensor:
        """Set the advantages of max(1, fraction N) tokens to 0, drawn uniformly among tokens with covariance in bounds.

        If fewer tokens are in the bounds, all of them are set to 0. The paper draws again for each mini-batch, with pi
        of that moment. Here tokens are drawn once for a step with pi_old, which is the same for the first mini-batch.
        """
        torch = loaded_torch()
        covariance_BL = token_covariance(advantages_BL, old_logprobs_BL, loss_mask_BL)
        eligible_BL = (covariance_BL >= self.cov_low) & (covariance_BL <= self.cov_high) & (loss_mask_BL != 0)
        places_N = eligible_BL.flatten().nonzero().flatten()
        count = max(1, int(self.fraction * int((loss_mask_BL != 0).sum())))
        order_N = torch.randperm(len(places_N), generator=torch.Generator().manual_seed(seed))
        drawn_BL = torch.zeros_like(eligible_BL)
        drawn_BL.view(-1)[places_N[order_N[:count]]] = True
        return advantages_BL.masked_fill(drawn_BL, 0.0)


class GSPOLoss(PolicyMethod):
    """Group sequence policy optimization: one ratio per sequence, the geometric mean of its tokens'.

    Formula: -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log rho over the row).
    Reference: arXiv 2507.18071 eq. 5 and 7.

    The bounds are the paper's (section 5.1), as is the mean over sequences. A row is clipped as a whole. `approx_kl` is
    of the tokens, `ratio_max` of the rows.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0)
    clip_high: float = Field(4e-4, gt=0)

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, _, advantages_BL = batch.masked()
        # Bounded after the mean, because a clamp per token would bend the ratio of the row.
        ratio_BL = bounded(batch.row_mean(log_ratio_BL)).exp().expand_as(log_ratio_BL)
        objective_BL, was_clipped_BL = clipped(ratio_BL, advantages_BL, low=self.clip_low, high=self.clip_high)
        return policy_output(
            objective_BL, log_ratio_BL, ratio_BL, was_clipped_BL, batch, aggregation="seq_mean_token_mean"
        )


class GMPOLoss(PolicyMethod):
    """Geometric-mean policy optimization: the ratio of a row is the geometric mean of its tokens' clipped ratios.

    Formula: -w s A, s = exp(mean of c over the row), c = min(log rho, clip_high) where A > 0, else max(log rho, -clip_low).
    Reference: arXiv 2507.20673.

    With one advantage for a row the mean over sequences is the paper's. `clip_fraction` and `approx_kl` are of the
    tokens, `ratio_max` of the rows.
    """

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0)
    """Bound of log rho from below: the ratio of a token with a negative advantage is at least exp(-this)."""
    clip_high: float = Field(0.4, gt=0)
    """Bound of log rho from above: the ratio of a token with a positive advantage is at most exp(this)."""

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, _, advantages_BL = batch.masked()
        # A token outside the mask has a log-ratio of 0, which no clip moves.
        clipped_BL = log_ratio_BL.clamp(max=self.clip_high).where(
            advantages_BL > 0, log_ratio_BL.clamp(min=-self.clip_low)
        )
        ratio_BL = bounded(batch.row_mean(clipped_BL)).exp().expand_as(log_ratio_BL)
        return policy_output(
            ratio_BL * advantages_BL,
            log_ratio_BL,
            ratio_BL,
            clipped_BL != log_ratio_BL,
            batch,
            aggregation="seq_mean_token_mean",
        )


def clipped(ratio_BL: Tensor, advantages_BL: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic objective of each token, and whether the clip removed its gradient."""
    plain_BL, clipped_BL = ratio_BL * advantages_BL, ratio_BL.clamp(1 - low, 1 + high) * advantages_BL
    # arXiv 1707.06347 eq. 7: min(rho A, clip(rho) A)
    return plain_BL.minimum(clipped_BL), clipped_BL < plain_BL


def token_covariance(advantages_BL: Tensor, logprobs_BL: Tensor, loss_mask_BL: Tensor) -> Tensor:
    """(log pi - mean log pi) (A - mean A) of each token, 0 outside the mask: arXiv 2505.22617.

    The means are over the masked tokens of the call, which is to be the whole step.
    """
    count = masked_count(loss_mask_BL)
    logprob_gap_BL = logprobs_BL - masked_sum(logprobs_BL, loss_mask_BL) / count
    advantage_gap_BL = advantages_BL - masked_sum(advantages_BL, loss_mask_BL) / count
    return masked(logprob_gap_BL * advantage_gap_BL, loss_mask_BL)


def policy_output(
    objective_BL: Tensor,
    log_ratio_BL: Tensor,
    ratio_BL: Tensor,
    was_clipped_BL: Tensor,
    batch: PolicyBatch,
    *,
    aggregation: Aggregation,
) -> LossOutput:
    """Aggregate -w objective, with the metrics that all policy losses share; w has no gradient.

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
    x_BL: Tensor, mask_BL: Tensor, *, aggregation: Aggregation, tokens: float, sequences: float, max_length: float
) -> Tensor:
    """This micro-batch's share of the mean of `x` over masked tokens of the whole optimizer step.

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
