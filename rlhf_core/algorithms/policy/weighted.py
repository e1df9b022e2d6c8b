"""Policy losses that bound or fade the weight of a token by other means than PPO's clip, and custom losses."""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.policy.clip import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import (
    Divergence,
    LossOutput,
    binary_divergence,
    check_terms,
    masked,
)
from rlhf_core.schema.base import CustomFunction


class CISPOLoss(PolicyMethod):
    """CISPO: the ratio is a detached, clipped weight, so no token loses its gradient.

    Formula: -w stopgrad(min(rho, 1 + clip_high)) A log pi.
    Reference: arXiv 2506.13585 eq. 4 and 5; open below, as ScaleRL: arXiv 2510.13786.
    """

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0)
    """The weight is at most 1 + this."""
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, ratio_BL, advantages_BL = batch.masked()
        weight_BL = ratio_BL.detach().clamp(max=1 + self.clip_high)  # eq. 5
        objective_BL = weight_BL * advantages_BL * masked(batch.logprobs, batch.loss_mask)  # eq. 4
        return policy_output(
            objective_BL, log_ratio_BL, ratio_BL, weight_BL != ratio_BL, batch, aggregation=self.aggregation
        )


class SAPOLoss(PolicyMethod):
    """SAPO: a smooth gate on the ratio instead of a clip; tokens far from the sampler fade out.

    Formula: -w (4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_positive where A > 0, else tau_negative.
    Reference: arXiv 2511.20347.

    At rho = 1 the gradient equals the gradient of rho A, and it falls off as sech^2(tau (rho - 1) / 2) on both sides of
    it. Nothing is clipped, so `clip_fraction` is 0.
    """

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_negative: float = Field(1.05, gt=0)
    """Temperature for the others; a larger one fades faster, which the paper advises for negative advantages."""
    aggregation: Aggregation = "seq_mean_token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, ratio_BL, advantages_BL = batch.masked()
        tau_BL = ratio_BL.new_full(ratio_BL.shape, self.tau_negative)
        tau_BL = tau_BL.masked_fill(advantages_BL > 0, self.tau_positive)
        gate_BL = 4 / tau_BL * (tau_BL * (ratio_BL - 1)).sigmoid()
        never_BL = ratio_BL.new_zeros(ratio_BL.shape)
        return policy_output(
            gate_BL * advantages_BL, log_ratio_BL, ratio_BL, never_BL, batch, aggregation=self.aggregation
        )


class DPPOLoss(PolicyMethod):
    """Divergence PPO: a token is dropped when the update has moved its probability too far, not its ratio.

    Formula: -w M rho A, M = 0 where D > threshold and the update moves away from pi_old, else 1; D is |pi - pi_old| or a binary KL.
    Reference: arXiv 2602.04879.

    M is 0 for A > 0 and pi > pi_old, or A < 0 and pi < pi_old, where D is above the threshold. Above `ratio_cap` the
    token keeps its gradient with that weight, as in truncated importance sampling. The paper measures the divergence
    from the policy that sampled; here it is from pi_old, recomputed before the update, since the correction for the
    sampler is a separate option. With `ppo.correction.pi_old = "sampler"` they are one.
    """

    type: Literal["dppo"] = "dppo"
    divergence: Divergence = "tv"
    """`tv` is |pi - pi_old|, the total variation of "this token or another one"; `kl` is KL(pi_old || pi) of the same."""
    threshold_low: float = Field(0.15, gt=0)
    """Largest divergence of tokens whose probability falls; 0.05 is common for `kl`."""
    threshold_high: float = Field(0.15, gt=0)
    """Largest divergence of tokens whose probability rises; 0.05 is common for `kl`."""
    ratio_cap: float = Field(20.0, gt=1)
    """The ratio weighs at most this: a rare token may keep a small divergence with a ratio of thousands."""
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BL, ratio_BL, advantages_BL = batch.masked()
        new_BL, old_BL = (masked(x_BL, batch.loss_mask) for x_BL in (batch.logprobs, batch.old_logprobs))
        apart_BL = binary_divergence(new_BL, old_BL, divergence=self.divergence)
        rises_BL = (advantages_BL > 0) & (log_ratio_BL > 0) & (apart_BL > self.threshold_high)
        falls_BL = (advantages_BL < 0) & (log_ratio_BL < 0) & (apart_BL > self.threshold_low)
        dropped_BL = rises_BL | falls_BL
        # exp(x - x.detach()) is 1, with the gradient of x: the cap bounds the weight and not the gradient.
        follows_BL = (log_ratio_BL - log_ratio_BL.detach()).exp()
        objective_BL = ratio_BL.detach().clamp(max=self.ratio_cap) * follows_BL * advantages_BL
        objective_BL = objective_BL.masked_fill(dropped_BL, 0.0)
        return policy_output(objective_BL, log_ratio_BL, ratio_BL, dropped_BL, batch, aggregation=self.aggregation)


class CustomPolicyLoss(CustomFunction, PolicyMethod):
    """A user's custom policy loss.

    Formula: w times the value that the user's function returns for each token.
    Reference: docs/custom.md.

    Values outside the mask do not count. `clip_fraction` is 0.
    """

    type: Literal["custom"] = "custom"
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Call the function with `logprobs, old_logprobs, advantages, loss_mask` [B, L] and the `arguments`."""
        assert batch.function is not None
        terms_BL = batch.function(
            batch.logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **self.arguments
        )
        check_terms(terms_BL, batch.logprobs, "one loss for each token")
        log_ratio_BL, ratio_BL, _ = batch.masked()
        never_BL = ratio_BL.new_zeros(ratio_BL.shape)
        objective_BL = -masked(terms_BL, batch.loss_mask)
        return policy_output(objective_BL, log_ratio_BL, ratio_BL, never_BL, batch, aggregation=self.aggregation)
