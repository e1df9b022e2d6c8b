"""Formulas of several losses: masked sums, the KL divergence to a reference, the correction for the sampler, and the
losses of values, demonstrations, reward models and steps.

Legend: B rows of a batch (or pairs), L positions, N masked tokens, M models of an ensemble, S steps.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.schema.base import Config, added_option

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any

LOG_RATIO_LIMIT = 20.0  # exp(20) is 4.9e8: far outside every clip range, and its square still fits fp32
WHITEN_EPS = 1e-8  # variance added before the root: equal values are whitened to 0, not to NaN
PART = 2**18  # positions summed at once: a dozen tensors of this size fit into a processor's cache


@cache
def loaded_torch() -> Any:
    """Load torch on the first call: options are read without it, and loading it takes longer than reading them.

    Formulas need it for functions without a method of the same name on tensors.
    """
    return importlib.import_module("torch")


def masked_sum(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """The scalar sum of `x` in fp32 (or wider) where the mask is not 0.

    Selects rather than multiplies: a NaN or infinity at a masked position must not reach the sum.
    """
    return masked(x_BL, mask_BL).sum()


def masked(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """`x` [B, L] in fp32 (or wider), exactly 0 where the mask is 0."""
    return at_least_fp32(x_BL).masked_fill(mask_BL == 0, 0.0)


def masked_count(mask_BL: Tensor) -> Tensor:
    """Count the tokens that the mask selects, at least 1: the denominator of a call for a whole optimizer step.

    At least 1, so that an empty mask gives a loss of 0 and not a NaN.
    """
    return (mask_BL != 0).sum().clamp(min=1)


def in_parts(*tensors_BL: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of all tensors, for large sums: `PART` positions at a time, or one row."""
    rows = max(1, PART // max(1, tensors_BL[0].shape[1]))
    return zip(*(x_BL.split(rows) for x_BL in tensors_BL))


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert `x` to fp32; float64 stays unchanged."""
    return x if x.is_floating_point() and x.element_size() > 4 else x.float()


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to +-20, so that its exponential is finite in fp32 and in its gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_sigmoid(x: Tensor) -> Tensor:
    """log sigmoid(x), elementwise; finite where sigmoid(x) is 0 to all digits."""
    return loaded_torch().nn.functional.logsigmoid(x)


def schulman_k3(log_ratio: Tensor) -> Tensor:
    """exp(-d) - 1 + d for d = log p - log q on samples of p: >= 0, unbiased for KL(p || q), low variance.

    Schulman, "Approximating KL Divergence" (2020). Uses expm1: at d near 0 the plain form cancels to noise.
    """
    d = bounded(log_ratio)
    return (-d).expm1() + d  # exp(-d) - 1 + d


def whiten(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Shift and scale `values` to mean 0 and variance 1 over the masked tokens, 0 outside.

    Population variance, as in lm-human-preferences (arXiv 1909.08593). Pass the whole batch of the step at once. An
    empty mask gives zeros.
    """
    return whitened([values], [loss_mask])[0]


def whitened(blocks: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Shift and scale the tensors of a step [B, L] to mean 0 and variance 1 over the masked tokens of all of them."""
    count = reduce(add, ((mask_BL != 0).sum() for mask_BL in masks)).clamp(min=1)
    mean = reduce(add, map(masked_sum, blocks, masks)) / count
    centered = [masked(x_BL - mean, mask_BL) for x_BL, mask_BL in zip(blocks, masks)]
    scale = (reduce(add, (x_BL.square().sum() for x_BL in centered)) / count + WHITEN_EPS).rsqrt()
    return [x_BL * scale for x_BL in centered]  # (x - mean) / sqrt(var + eps)


# ---------------------------------------------------------------- KL divergence to a reference

# With d = log pi - log pi_ref on tokens sampled from pi (Schulman, "Approximating KL Divergence", 2020): k1 in the *reward*
# gives the right reverse-KL gradient; as a *loss* use the gradient of k2 (k1's is zero in expectation, and k3's
# is biased) for any displayed value; k3 is a monitor (arXiv 2510.01555, 2512.21852).


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d, elementwise: unbiased for KL(pi || pi_ref), high variance, may be negative."""
    return bounded(logprobs - ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2, elementwise: biased as a value, right as a loss."""
    return bounded(logprobs - ref_logprobs).square() / 2  # d^2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d, elementwise: unbiased, never negative, low variance."""
    return schulman_k3(logprobs - ref_logprobs)


KLInLoss: TypeAlias = Literal["k2", "k1", "k3", "k3_direct"]
"""An estimator of the KL in the loss; `k1` and `k3` are values with the gradient of k2, `k3_direct` has its own."""


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLInLoss) -> Tensor:
    """The elementwise term of a KL penalty in the loss.

    With k = k1 or k3 the term is stopgrad(k) + k2 - stopgrad(k2): its value is unbiased for the KL, and its gradient, d
    grad log pi, is the gradient of the reverse KL on samples of pi (straight-through, arXiv 2510.01555). `k3_direct` is
    k3 with its plain gradient, (1 - exp(-d)) grad log pi: GRPO, arXiv 2402.03300 eq. 4. This is the gradient of the
    forward KL.
    """
    match estimator:
        case "k2":
            return k2(logprobs, ref_logprobs)
        case "k3_direct":
            return k3(logprobs, ref_logprobs)
        case "k1" | "k3":
            value = (k1 if estimator == "k1" else k3)(logprobs, ref_logprobs).detach()
            follows = k2(logprobs, ref_logprobs)
            return value + (follows - follows.detach())  # stopgrad(k) + k2 - stopgrad(k2)
        case _:
            assert_never(estimator)


@dataclass(frozen=True)
class FixedKL:
    """A KL coefficient that never moves.

    >>> FixedKL(coef=0.05).updated(kl=7.0, samples=64).coef
    0.05
    """

    coef: float

    def updated(self, kl: float, samples: int) -> Self:
        """This controller itself; the observation does not matter."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient steered to `target` nats per sequence: arXiv 1909.08593.

    c *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples / horizon.

    >>> AdaptiveKL(coef=0.1, target=6.0, horizon=1000).updated(kl=12.0, samples=100).coef
    0.10200000000000001
    """

    coef: float
    target: float
    horizon: float

    def updated(self, kl: float, samples: int) -> Self:
        """The controller after observing a mean `kl` over `samples` sequences."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)  # clip(KL / target - 1, -0.2, 0.2)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))  # arXiv 1909.08593 section 2.2


def kl_controller(coef: float, target: float, horizon: float) -> FixedKL | AdaptiveKL:
    """A controller that adapts `coef` to hold `target`, or keeps `coef` fixed for a target of 0."""
    return AdaptiveKL(coef=coef, target=target, horizon=horizon) if target > 0 else FixedKL(coef=coef)


# ---------------------------------------------------------------- divergence of sampled tokens

Divergence: TypeAlias = Literal["tv", "kl"]

LEAST = 2.0**-126
"""The smallest normal number of fp32."""


def binary_divergence(logprobs_BL: Tensor, old_logprobs_BL: Tensor, *, divergence: Divergence) -> Tensor:
    """The divergence of "this token or another one" under pi and pi_old, detached, elementwise.

    With p = pi and q = pi_old of the sampled token: `tv` is |p - q|, `kl` is q log(q / p) + (1 - q) log((1 - q) / (1 -
    p)).
    """
    log_p_BL, log_q_BL = at_least_fp32(logprobs_BL.detach()), at_least_fp32(old_logprobs_BL.detach())
    p_BL, q_BL = log_p_BL.exp(), log_q_BL.exp()
    match divergence:
        case "tv":
            return (p_BL - q_BL).abs()
        case "kl":
            # 1 - p by expm1, kept above 0: a token that is certain to 24 bits leaves no mass for others.
            rest_p_BL, rest_q_BL = (-x_BL.expm1().clamp(max=-LEAST) for x_BL in (log_p_BL, log_q_BL))
            return q_BL * (log_q_BL - log_p_BL) + rest_q_BL * (rest_q_BL.log() - rest_p_BL.log())
        case _:
            assert_never(divergence)


# ---------------------------------------------------------------- correction for the sampler

# mu = the sampler's log-probs, pi_old = the trainer's for the same tokens before the update, q = pi_old / mu. They differ
# because of other kernels or older weights.


class CorrectionConfig(Config):
    """Correction for a sampler whose probabilities mu differ from the trainer's; q = pi_old / mu."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """Unit of q: a token, the product over its sequence, or the geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate` bounds q by `cap`; `mask` drops tokens whose q is outside [low, cap] (IcePop: 0.5 to 5)."""
    cap: float = Field(2.0, gt=0)
    low: float = Field(0.5, ge=0)
    """Lower edge of the window of `mask`."""
    token_cap: float = added_option(0.0, ge=0)
    """Above 0, with `mask` at the level of a sequence: the tokens of a sequence that is kept weigh min(q of the token,
    this) instead of the q of the sequence, so that the mask chooses sequences and the weight corrects tokens."""
    gate: Literal["ratio", Divergence] = added_option("ratio")
    """The statistic that `mask` compares with its bounds: `ratio` is q. With `kl`, KL(mu || pi_old) of "this token or
    another one", or `tv`, its total variation, it drops each token, or above that level each sequence, whose mean is
    above `max_divergence`. The other tokens weigh min(q of the token, cap) (FlashREINFORCE)."""
    max_divergence: float = added_option(0.005, gt=0)
    """Largest divergence that `gate` keeps; 0.003 to 0.005 are common for `kl`."""
    pi_old: Literal["trainer", "sampler"] = "trainer"
    """`trainer` computes pi_old anew (decoupled); `sampler` takes mu for it (bypass), so that nothing is left to correct."""

    @model_validator(mode="after")
    def _check_bypass(self) -> CorrectionConfig:
        if self.pi_old == "sampler" and self.level != "off":
            raise ValueError(
                f"level = {self.level!r}: with pi_old = 'sampler' the ratio q is 1 everywhere; set level = \"off\""
            )
        if self.token_cap and (self.mode != "mask" or self.level not in ("sequence", "geometric")):
            raise ValueError(
                f"token_cap = {self.token_cap}: applies to mode = 'mask' with level = 'sequence' or 'geometric', and these "
                f"are {self.mode!r} and {self.level!r}; change them, or set it to 0"
            )
        if self.gate != "ratio" and (self.mode != "mask" or self.level == "off" or self.token_cap):
            rule = f"mode = {self.mode!r}, level = {self.level!r} and token_cap = {self.token_cap}"
            raise ValueError(
                f'gate = {self.gate!r}: applies to mode = "mask" with a level and without token_cap, and the profile has {rule}; '
                'change them, or set gate = "ratio"'
            )
        return self

    def weights(
        self, old_logprobs_BL: Tensor, rollout_logprobs_BL: Tensor, loss_mask_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute detached weights [B, L] for the policy loss, and whether `mode` changed each: 0 outside the mask.

        `truncate` is truncated importance sampling, min(q, cap) (Ionides 2008; for RL with a separate sampler: Yao et
        al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). `mask` keeps q inside
        [low, cap] and drops the rest (IcePop, window 0.5-5.0). `geometric` is GSPO's ratio (arXiv 2507.18071 eq. 7).
        """
        selected_BL = loss_mask_BL != 0
        if self.level == "off":
            return masked(old_logprobs_BL.new_ones(old_logprobs_BL.shape), loss_mask_BL), selected_BL & False
        log_q_BL = masked(old_logprobs_BL.detach() - rollout_logprobs_BL.detach(), loss_mask_BL)
        ratio_BL = _ratio(log_q_BL, selected_BL, level=self.level)
        match self.mode:
            case "truncate":
                kept_BL = ratio_BL <= self.cap
                weights_BL = ratio_BL.clamp(max=self.cap)  # min(q, cap)
            case "mask" if self.gate != "ratio":
                apart_BL = binary_divergence(old_logprobs_BL, rollout_logprobs_BL, divergence=self.gate)
                apart_BL = masked(apart_BL, loss_mask_BL)
                if self.level != "token":
                    apart_BL = apart_BL.sum(dim=-1, keepdim=True) / selected_BL.sum(dim=-1, keepdim=True).clamp(min=1)
                kept_BL = (apart_BL <= self.max_divergence).expand_as(ratio_BL)
                ratio_BL = bounded(log_q_BL).exp().clamp(max=self.cap)  # min(q_t, cap)
                weights_BL = ratio_BL.masked_fill(~kept_BL, 0.0)
            case "mask":
                kept_BL = (ratio_BL >= self.low) & (ratio_BL <= self.cap)
                if self.token_cap:
                    ratio_BL = bounded(log_q_BL).exp().clamp(max=self.token_cap)  # min(q_t, token_cap)
                weights_BL = ratio_BL.masked_fill(~kept_BL, 0.0)
            case _:
                assert_never(self.mode)
        return masked(weights_BL, loss_mask_BL), selected_BL & ~kept_BL


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared distances from the mean; the moments of two sets add up (Chan et al., 1979).

    >>> import torch
    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
    >>> Moments.of(one) + Moments.of(other)
    Moments(count=3, mean=3.0, squares=14.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, x_N: Tensor) -> Moments:
        """The moments of the numbers of a tensor, in float64."""
        if len(x_N) == 0:
            return cls()
        x_N = x_N.double()
        return cls(len(x_N), x_N.mean().item(), x_N.var(correction=0).item() * len(x_N))

    def __add__(self, other: Moments) -> Moments:
        count, apart = self.count + other.count, other.mean - self.mean
        share = other.count / max(1, count)
        return Moments(
            count, self.mean + apart * share, self.squares + other.squares + apart * apart * share * self.count
        )


@dataclass(frozen=True)
class Mismatch:
    """How far trainer and sampler disagree over masked tokens. The values of parts of a step add up."""

    count: int
    log_q: float
    """Means over the tokens of |log q|, exp |log q| and k3."""
    exp_abs_log_q: float
    k3: float
    log_q_max: float
    q: float
    """Sums over the tokens of q and q^2."""
    squared_q: float
    trainer: Moments
    """Moments of the trainer's and the sampler's probabilities, and the sum of the products of their deviations."""
    sampler: Moments
    products: float
    equal: bool

    @classmethod
    def of(cls, old_logprobs_BL: Tensor, rollout_logprobs_BL: Tensor, loss_mask_BL: Tensor) -> Mismatch:
        """Measure the mismatch of the masked tokens. Raises DataError on an empty mask."""
        selected_BL = loss_mask_BL != 0
        if not bool(selected_BL.any()):
            rule = f"loss_mask of shape {tuple(loss_mask_BL.shape)} selects no token"
            raise DataError(f"{rule}; drop empty completions first")
        parts = in_parts(old_logprobs_BL, rollout_logprobs_BL, selected_BL)
        each = ((old_BL[on_BL].double(), mu_BL[on_BL].double()) for old_BL, mu_BL, on_BL in parts)
        return reduce(add, (cls._of_tokens(*pair) for pair in each if len(pair[0])))

    @classmethod
    def _of_tokens(cls, old_N: Tensor, rollout_N: Tensor) -> Mismatch:
        log_q_N = bounded(old_N - rollout_N)
        q_N, p_N, mu_N = log_q_N.exp(), old_N.exp(), rollout_N.exp()
        return cls(
            count=len(q_N),
            log_q=log_q_N.abs().mean().item(),
            exp_abs_log_q=log_q_N.abs().exp().mean().item(),
            k3=schulman_k3(-log_q_N).mean().item(),
            log_q_max=log_q_N.abs().max().item(),
            q=q_N.sum().item(),
            squared_q=q_N.square().sum().item(),
            trainer=Moments.of(p_N),
            sampler=Moments.of(mu_N),
            products=((p_N - p_N.mean()) * (mu_N - mu_N.mean())).sum().item(),
            equal=p_N.equal(mu_N),
        )

    def __add__(self, other: Mismatch) -> Mismatch:
        count = self.count + other.count
        mine, its = self.count / count, other.count / count
        apart = (other.trainer.mean - self.trainer.mean) * (other.sampler.mean - self.sampler.mean)
        return Mismatch(
            count=count,
            log_q=mine * self.log_q + its * other.log_q,
            exp_abs_log_q=mine * self.exp_abs_log_q + its * other.exp_abs_log_q,
            k3=mine * self.k3 + its * other.k3,
            log_q_max=max(self.log_q_max, other.log_q_max),
            q=self.q + other.q,
            squared_q=self.squared_q + other.squared_q,
            trainer=self.trainer + other.trainer,
            sampler=self.sampler + other.sampler,
            products=self.products + other.products + apart * mine * other.count,
            equal=self.equal and other.equal,
        )

    def metrics(self) -> dict[str, float]:
        """The metrics of the mismatch.

        `log_q_mean`, `log_q_max`: of |log q|; `exp_abs_log_q`: E[exp |log q|], alarm above 1.05; `k3`: KL(mu ||
        pi_old); `ess`: (sum q)^2 / (N sum q^2), in (0, 1]; `correlation`: Pearson's, of the two probabilities (1.0 when
        they are equal, 0.0 when one is constant).
        """
        scale = math.sqrt(self.trainer.squares) * math.sqrt(self.sampler.squares)
        return {
            "log_q_mean": self.log_q,
            "log_q_max": self.log_q_max,
            "exp_abs_log_q": self.exp_abs_log_q,
            "k3": self.k3,
            "ess": self.q * self.q / (self.count * self.squared_q),
            "correlation": 1.0 if self.equal else 0.0 if scale == 0 else self.products / scale,
        }


def _ratio(log_q_BL: Tensor, selected_BL: Tensor, *, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """q [B, L] of each token's unit, given log q, which is 0 where no token is selected."""
    if level != "token":
        unit_B1 = log_q_BL.sum(dim=-1, keepdim=True)  # log of the product over the sequence
        if level == "geometric":
            unit_B1 = unit_B1 / selected_BL.sum(dim=-1, keepdim=True).clamp(min=1)  # of its geometric mean
        log_q_BL = unit_B1.expand_as(log_q_BL)
    return bounded(log_q_BL).exp()  # bounded after the sum: a clamp per token would bend the sequence ratio


# ---------------------------------------------------------------- the result of a loss


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


def check_terms(returned: object, logprobs: Tensor, what: str) -> None:
    """Raise ConfigError unless `returned` are terms of the shape of `logprobs` through which their gradient flows."""
    if not isinstance(returned, type(logprobs)) or returned.shape != logprobs.shape:
        found = f"shape {tuple(returned.shape)}" if isinstance(returned, type(logprobs)) else type(returned).__name__
        rule = f"must be a tensor of shape {tuple(logprobs.shape)}"
        raise ConfigError("loss.function returned", found, rule, f"return {what}, without a mean or a sum")
    if logprobs.requires_grad and not returned.requires_grad:
        rule = "has no gradient"
        raise ConfigError("loss.function returned", "a tensor", rule, "compute it from the policy's log-probs")


# ---------------------------------------------------------------- values


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip: float | None,
    num_tokens: float | None = None,
) -> LossOutput:
    """0.5 sum of max((V_clip - R)^2, (V - R)^2) over `num_tokens`, the masked tokens of the whole step.

    Tensors [B, L]. V_clip = V_old + clamp(V - V_old, +-clip): arXiv 1707.06347's reference code, and
    lm-human-preferences. `clip` None is the plain squared error; `num_tokens` None counts the tokens of this call.
    Metrics: `value_loss`, `value_clip_fraction`, `value_mean`.
    """
    # Masked first: a NaN outside the mask would come back through the square as a NaN gradient.
    values_BL = masked(values, loss_mask)
    error_BL = (values_BL - returns).square()
    worse_BL = error_BL
    if clip is not None:
        clipped_BL = old_values + (values_BL - old_values).clamp(-clip, clip)
        clipped_error_BL = (clipped_BL - returns).square()
        worse_BL = error_BL.maximum(clipped_error_BL)
    tokens = masked_count(loss_mask) if num_tokens is None else num_tokens
    loss = 0.5 * masked_sum(worse_BL, loss_mask) / tokens  # 0.5 max((V_clip - R)^2, (V - R)^2)
    metrics = {
        "value_loss": loss,
        "value_clip_fraction": masked_sum(worse_BL > error_BL, loss_mask) / tokens,
        "value_mean": masked_sum(values_BL, loss_mask) / tokens,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def explained_variance(blocks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
    """1 - Var(R - V) / Var(R) over the masked tokens of a step: 1 is perfect, 0 is no better than a constant.

    `blocks` are values, returns and masks [B, L]. 0.0 if the returns do not vary.
    """
    returns, residual = Moments(), Moments()
    for values_BL, returns_BL, mask_BL in chain.from_iterable(in_parts(*block) for block in blocks):
        selected_BL = mask_BL != 0
        returns_N = returns_BL[selected_BL].double()
        returns += Moments.of(returns_N)
        residual += Moments.of(returns_N - values_BL[selected_BL].double())
    return 0.0 if returns.squares == 0 else 1 - residual.squares / returns.squares


# ---------------------------------------------------------------- supervised fine-tuning


def sft_loss(
    logprobs_BL: Tensor, loss_mask_BL: Tensor, *, tokens: float | None = None, dft: bool = False
) -> LossOutput:
    """-sum of log pi(y_t) over masked tokens, divided by `tokens`, the masked tokens of the whole step.

    The token mean of InstructGPT's supervised step (arXiv 2203.02155, section 3.5), in nats per token. `tokens` None
    means that this call is the whole step. With `dft` each token is weighted by its own probability, detached: dynamic
    fine-tuning, arXiv 2508.05629. The metric `nll` is the unweighted mean in both cases.
    """
    logprobs_BL = masked(logprobs_BL, loss_mask_BL)
    count = masked_count(loss_mask_BL) if tokens is None else tokens
    nll = -logprobs_BL.sum() / count
    loss = -(logprobs_BL.detach().exp() * logprobs_BL).sum() / count if dft else nll
    return LossOutput(loss, {"nll": nll.detach()})


# ---------------------------------------------------------------- reward models

EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std"]


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float = 0.0,
    center_coef: float = 0.0,
    pairs: float | None = None,
) -> LossOutput:
    """Sum of -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2, over `pairs`, the pairs of the whole step.

    Bradley-Terry likelihood: arXiv 2203.02155 eq. 1; margin: Llama 2, arXiv 2307.09288 eq. 2; centering (scores are
    otherwise defined only up to a constant): arXiv 2312.09244, c = 0.01 suggested, 0 switches it off. `pairs` None
    means that this call is the whole step. `accuracy` counts r_c > r_r strictly: a model that scores everything alike
    has accuracy 0, not 1.
    """
    chosen_B, rejected_B = at_least_fp32(chosen_scores), at_least_fp32(rejected_scores)
    count = float(len(chosen_B)) if pairs is None else pairs
    difference_B = chosen_B - rejected_B
    ranking_B = -log_sigmoid(difference_B - margin)  # arXiv 2203.02155 eq. 1, arXiv 2307.09288 eq. 2
    centering_B = (chosen_B + rejected_B).square()  # arXiv 2312.09244: c (r_c + r_r)^2
    loss = (ranking_B + center_coef * centering_B).sum() / count
    metrics = {
        "loss": loss,
        "accuracy": (difference_B > 0).float().sum() / count,
        "margin": difference_B.sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def ensemble_score(scores_MB: Tensor, *, reduce: EnsembleReduction, k: float = 1.0) -> Tensor:
    """Combine the scores of M reward models [M, B] to one score [B] per row.

    `min` is worst-case optimization and `mean_minus_std`, mean - `k` std, a form of uncertainty-weighted optimization
    (arXiv 2310.02743, which subtracts the variance). The standard deviation is the population's: 0 for one model.
    """
    scores_MB = at_least_fp32(scores_MB)
    match reduce:
        case "mean":
            return scores_MB.mean(dim=0)
        case "min":
            return scores_MB.amin(dim=0)
        case "mean_minus_std":
            return scores_MB.mean(dim=0) - k * scores_MB.std(dim=0, correction=0)
        case _:
            assert_never(reduce)


# ---------------------------------------------------------------- process reward models

StepReduction: TypeAlias = Literal["min", "mean", "last", "product"]


def step_loss(logits_S: Tensor, labels_S: Tensor, *, steps: float | None = None) -> LossOutput:
    """Sum of -y log sigmoid(x) - (1-y) log sigmoid(-x) over `steps`, the steps of the whole optimizer step.

    `logits_S` are the model's outputs at the step-end tokens of all answers, `labels_S` hard (PRM800K, arXiv
    2305.20050) or soft in [0, 1] (the share of rollouts that end right: Math-Shepherd, arXiv 2312.08935). `steps` None
    means the steps of this call. Metrics: `loss`, `accuracy` (a logit of 0 is never right), `positive_fraction` of the
    labels, both with the label rounded at 0.5. Raises DataError for a label outside [0, 1].
    """
    logits_S, labels_S = at_least_fp32(logits_S), at_least_fp32(labels_S)
    if bool(((labels_S < 0) | (labels_S > 1) | labels_S.isnan()).any()):
        rule = "a label is the probability that the step is right"
        raise DataError("labels", labels_S.tolist()[:8], rule, "scale them to [0, 1]")
    count = max(float(len(logits_S)), 1.0) if steps is None else steps
    loss = -(labels_S * log_sigmoid(logits_S) + (1 - labels_S) * log_sigmoid(-logits_S)).sum() / count
    positive_S = labels_S > 0.5
    right_S = (positive_S & (logits_S > 0)) | (~positive_S & (logits_S < 0))
    metrics = {
        "loss": loss,
        "accuracy": right_S.float().sum() / count,
        "positive_fraction": positive_S.float().sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def reduce_steps(probs: Tensor, *, how: StepReduction) -> Tensor:
    """Combine the step probabilities [S] of an answer (or [..., S], over the last dimension) to one score.

    `min` and `product`: arXiv 2305.20050 section 2.6 and arXiv 2312.08935; `last` reads the model as an outcome reward
    model. Raises DataError for an answer without steps.
    """
    if probs.shape[-1] == 0:
        raise DataError("steps", 0, "an answer without steps has no step scores", "check the step separator")
    match how:
        case "min":
            return probs.amin(dim=-1)
        case "mean":
            return probs.mean(dim=-1)
        case "last":
            return probs[..., -1]
        case "product":
            return probs.prod(dim=-1)
        case _:
            assert_never(how)
