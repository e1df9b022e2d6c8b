"""Divergence PPO: a token is dropped when the update has moved its probability too far, not its ratio.

Formula: -w M rho A, M = 0 where D > threshold and the update goes on away from pi_old, else 1; D is |pi - pi_old| or a binary KL.
Reference: arXiv 2602.04879.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, at_least_fp32, bounded, masked

Divergence: TypeAlias = Literal["tv", "kl"]


class DPPOLoss(PolicyMethod):
    """Drops tokens whose probability has moved too far, whatever their ratio: arXiv 2602.04879."""

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
        """Return `dppo_loss` of the batch."""
        return dppo_loss(
            *batch.tensors,
            divergence=self.divergence,
            threshold_low=self.threshold_low,
            threshold_high=self.threshold_high,
            ratio_cap=self.ratio_cap,
            aggregation=self.aggregation,
            **batch.counts,
        )


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    divergence: Divergence,
    threshold_low: float,
    threshold_high: float,
    ratio_cap: float,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w M min(rho, cap) A, with the gradient -w M min(rho, cap) A grad log pi.

    arXiv 2602.04879: M is 0 for A > 0 and pi > pi_old, or A < 0 and pi < pi_old, where the divergence of the two
    Bernoulli distributions "this token or another" is above the threshold. Below the cap this is M rho A itself; above
    it the token keeps its gradient with the weight `cap`, as in truncated importance sampling.

    The paper measures the divergence from the policy that sampled; here it is from pi_old, recomputed before the update,
    since the correction for the sampler is an option of its own. With `ppo.correction.pi_old = "sampler"` they are one.
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    ratio_BL = bounded(log_ratio_BL).exp()
    advantages_BL = masked(advantages, loss_mask)
    apart_BL = binary_divergence(masked(logprobs, loss_mask), masked(old_logprobs, loss_mask), divergence=divergence)
    rises_BL = (advantages_BL > 0) & (log_ratio_BL > 0) & (apart_BL > threshold_high)
    falls_BL = (advantages_BL < 0) & (log_ratio_BL < 0) & (apart_BL > threshold_low)
    dropped_BL = rises_BL | falls_BL
    # exp(x - x.detach()) is 1, and its gradient that of x: the cap bounds the weight and not the gradient.
    follows_BL = (log_ratio_BL - log_ratio_BL.detach()).exp()
    objective_BL = ratio_BL.detach().clamp(max=ratio_cap) * follows_BL * advantages_BL
    return policy_output(
        torch.where(dropped_BL, torch.zeros_like(objective_BL), objective_BL),
        log_ratio_BL,
        ratio_BL,
        dropped_BL,
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )


def binary_divergence(logprobs_BL: Tensor, old_logprobs_BL: Tensor, *, divergence: Divergence) -> Tensor:
    """Return the divergence of "this token or another one" under pi and pi_old, detached, elementwise.

    With p = pi and q = pi_old of the sampled token: `tv` is |p - q|, `kl` is q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    """
    log_p_BL, log_q_BL = at_least_fp32(logprobs_BL.detach()), at_least_fp32(old_logprobs_BL.detach())
    p_BL, q_BL = log_p_BL.exp(), log_q_BL.exp()
    match divergence:
        case "tv":
            return (p_BL - q_BL).abs()
        case "kl":
            # 1 - p by expm1, kept above 0: a token that is certain to 24 bits has no other one beside it.
            tiny = torch.finfo(p_BL.dtype).tiny
            rest_p_BL, rest_q_BL = (-torch.expm1(x).clamp(max=-tiny) for x in (log_p_BL, log_q_BL))
            return q_BL * (log_q_BL - log_p_BL) + rest_q_BL * (rest_q_BL.log() - rest_p_BL.log())
        case _:
            assert_never(divergence)
