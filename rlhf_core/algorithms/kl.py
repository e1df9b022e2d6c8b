"""Estimators of the KL divergence to a reference, and the controllers of its coefficient.

With d = log pi - log pi_ref on tokens sampled from pi (Schulman, "Approximating KL Divergence", 2020). k1 in the
*reward* gives the right reverse-KL gradient; as a *loss* use the gradient of k2 (that of k1 is zero in expectation, that
of k3 is biased) whatever the value shown is; k3 is a monitor (arXiv 2510.01555, 2512.21852).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, assert_never

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.token_math import bounded, schulman_k3
from rlhf_core.errors import ConfigError, explain


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d, elementwise: unbiased for KL(pi || pi_ref), high variance, may be negative."""
    return bounded(logprobs - ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d^2 / 2, elementwise: biased as a value, right as a loss."""
    return bounded(logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, elementwise: unbiased, never negative, low variance."""
    return schulman_k3(logprobs - ref_logprobs)


KLInLoss: TypeAlias = Literal["k2", "k1", "k3", "k3_direct"]
"""An estimator of the KL in the loss; `k1` and `k3` are values with the gradient of k2, `k3_direct` has its own."""


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLInLoss) -> Tensor:
    """Return the elementwise term of a KL penalty in the loss.

    With k = k1 or k3 the term is stopgrad(k) + k2 - stopgrad(k2): its value is unbiased for the KL, and its gradient,
    d grad log pi, is that of the reverse KL on samples of pi (straight-through, arXiv 2510.01555). `k3_direct` is k3
    with its own gradient, (1 - exp(-d)) grad log pi: GRPO, arXiv 2402.03300 eq. 4. It is that of the forward KL.
    """
    match estimator:
        case "k2":
            return k2(logprobs, ref_logprobs)
        case "k3_direct":
            return k3(logprobs, ref_logprobs)
        case "k1" | "k3":
            value = (k1 if estimator == "k1" else k3)(logprobs, ref_logprobs).detach()
            follows = k2(logprobs, ref_logprobs)
            return value + (follows - follows.detach())
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
        """Return itself; the observation does not matter."""
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

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if value <= 0:
                raise ConfigError(explain(f"kl.{name}", value, "must be > 0", "use a fixed coefficient to disable it"))

    def updated(self, kl: float, samples: int) -> Self:
        """Return the controller after observing a mean `kl` over `samples` sequences."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))


KLController: TypeAlias = FixedKL | AdaptiveKL
