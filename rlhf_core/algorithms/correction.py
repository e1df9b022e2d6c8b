"""The correction for a sampler whose probabilities differ from the trainer's (other kernels, older weights).

mu = the sampler's log-probs, pi_old = the trainer's for the same tokens before the update, q = pi_old / mu.
"""

# Shape legend: B rows of a batch, L positions, N masked tokens.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.token_math import bounded, masked, schulman_k3
from rlhf_core.errors import DataError
from rlhf_core.schema.base import Config, added_option

Level: TypeAlias = Literal["off", "token", "sequence", "geometric"]
Mode: TypeAlias = Literal["truncate", "mask"]


class CorrectionConfig(Config):
    """What is done about a sampler whose probabilities mu differ from the trainer's; q = pi_old / mu."""

    level: Level = "token"
    """What q is taken over: a token, the product over its sequence, or the geometric mean."""
    mode: Mode = "truncate"
    """`truncate` bounds q by `cap`; `mask` drops tokens whose q is outside [low, cap] (IcePop: 0.5 to 5)."""
    cap: float = Field(2.0, gt=0)
    low: float = Field(0.5, ge=0)
    """Lower edge of the window of `mask`."""
    token_cap: float = added_option(0.0, ge=0)
    """Above 0, with `mask` at the level of a sequence: the tokens of a sequence that is kept weigh min(q of the token,
    this) instead of the q of the sequence, so that the mask chooses sequences and the weight corrects tokens."""
    pi_old: Literal["trainer", "sampler"] = "trainer"
    """`trainer` computes pi_old anew (decoupled); `sampler` takes mu for it (bypass), so that nothing is left to correct."""

    @model_validator(mode="after")
    def _a_bypass_leaves_nothing_to_correct(self) -> CorrectionConfig:
        if self.pi_old == "sampler" and self.level != "off":
            raise ValueError(
                f"level = {self.level!r}: with pi_old = 'sampler' the ratio q is 1 everywhere; set level = \"off\""
            )
        if self.token_cap and (self.mode != "mask" or self.level not in ("sequence", "geometric")):
            raise ValueError(
                f"token_cap = {self.token_cap}: applies to mode = 'mask' with level = 'sequence' or 'geometric', and these "
                f"are {self.mode!r} and {self.level!r}; change them, or set it to 0"
            )
        return self


def importance_weights(
    old_logprobs_BL: Tensor,
    rollout_logprobs_BL: Tensor,
    loss_mask_BL: Tensor,
    *,
    level: Level,
    mode: Mode,
    cap: float,
    low: float,
    token_cap: float = 0.0,
) -> Tensor:
    """Return detached weights [B, L] for the policy loss; 0 outside the loss mask, 1 on it when `level` is `off`.

    `truncate` is truncated importance sampling, min(q, cap) (Ionides 2008; for RL with a separate sampler: Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025), `low` unused. `mask` keeps q inside
    [low, cap] and drops the rest (IcePop, window 0.5-5.0). `level` is what q is taken over: one token, the product over
    the sequence, or its geometric mean (GSPO's ratio, arXiv 2507.18071 eq. 7). `token_cap` > 0 gives the tokens of the
    sequences that a mask keeps the weight min(q_t, token_cap) of their own.
    """
    if level == "off":
        return masked(torch.ones_like(old_logprobs_BL), loss_mask_BL)
    ratio_BL = _ratio(old_logprobs_BL, rollout_logprobs_BL, loss_mask_BL, level=level)
    match mode:
        case "truncate":
            weights_BL = ratio_BL.clamp(max=cap)
        case "mask":
            kept_BL = (ratio_BL >= low) & (ratio_BL <= cap)
            if token_cap:
                ratio_BL = _ratio(old_logprobs_BL, rollout_logprobs_BL, loss_mask_BL, level="token").clamp(
                    max=token_cap
                )
            weights_BL = torch.where(kept_BL, ratio_BL, torch.zeros_like(ratio_BL))
        case _:
            assert_never(mode)
    return masked(weights_BL, loss_mask_BL)


def fraction_corrected(
    old_logprobs_BL: Tensor,
    rollout_logprobs_BL: Tensor,
    loss_mask_BL: Tensor,
    *,
    level: Level,
    mode: Mode,
    cap: float,
    low: float,
    token_cap: float = 0.0,
) -> float:
    """Return the fraction of masked tokens whose ratio q was truncated (or, with mode `mask`, dropped).

    A weight that `token_cap` bounds is not counted.
    """
    _require_tokens(loss_mask_BL)
    if level == "off":
        return 0.0
    ratio_BL = _ratio(old_logprobs_BL, rollout_logprobs_BL, loss_mask_BL, level=level)
    outside_BL = ratio_BL > cap
    if mode == "mask":
        outside_BL = outside_BL | (ratio_BL < low)
    return float(outside_BL[loss_mask_BL != 0].double().mean())


def mismatch_metrics(old_logprobs_BL: Tensor, rollout_logprobs_BL: Tensor, loss_mask_BL: Tensor) -> dict[str, float]:
    """Return how far trainer and sampler disagree over the masked tokens; compute it over the whole batch, not parts.

    `log_q_mean`, `log_q_max`: of |log q|; `exp_abs_log_q`: E[exp |log q|], alarm above 1.05; `k3`: KL(mu || pi_old);
    `ess`: (sum q)^2 / (N sum q^2), in (0, 1]; `correlation`: Pearson's, of the two probabilities (1.0 when they are
    equal, 0.0 when one is constant). Raises DataError on an empty mask.
    """
    _require_tokens(loss_mask_BL)
    selected_BL = loss_mask_BL != 0
    old_N, rollout_N = old_logprobs_BL[selected_BL].double(), rollout_logprobs_BL[selected_BL].double()
    log_q_N = bounded(old_N - rollout_N)
    q_N = log_q_N.exp()
    return {
        "log_q_mean": log_q_N.abs().mean().item(),
        "log_q_max": log_q_N.abs().max().item(),
        "exp_abs_log_q": log_q_N.abs().exp().mean().item(),
        "k3": schulman_k3(-log_q_N).mean().item(),
        "ess": (q_N.sum().square() / (len(q_N) * q_N.square().sum())).item(),
        "correlation": _correlation(old_N.exp(), rollout_N.exp()),
    }


def _ratio(
    old_logprobs_BL: Tensor,
    rollout_logprobs_BL: Tensor,
    loss_mask_BL: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
) -> Tensor:
    log_q_BL = masked(old_logprobs_BL.detach() - rollout_logprobs_BL.detach(), loss_mask_BL)
    match level:
        case "token":
            pass
        case "sequence":
            log_q_BL = log_q_BL.sum(dim=-1, keepdim=True).expand_as(log_q_BL)
        case "geometric":
            length_B1 = (loss_mask_BL != 0).sum(dim=-1, keepdim=True).clamp(min=1)
            log_q_BL = (log_q_BL.sum(dim=-1, keepdim=True) / length_B1).expand_as(log_q_BL)
        case _:
            assert_never(level)
    # Bounded after the sum: a clamp per token would bend the sequence ratio.
    return bounded(log_q_BL).exp()


def _correlation(x_N: Tensor, y_N: Tensor) -> float:
    if torch.equal(x_N, y_N):
        return 1.0
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    scale = x_N.norm() * y_N.norm()
    return 0.0 if scale == 0 else ((x_N * y_N).sum() / scale).item()


def _require_tokens(loss_mask_BL: Tensor) -> None:
    if not bool((loss_mask_BL != 0).any()):
        raise DataError(
            f"loss_mask of shape {tuple(loss_mask_BL.shape)} selects no token; drop empty completions first"
        )
