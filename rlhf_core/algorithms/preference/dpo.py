"""DPO and other losses on the margin between the implicit rewards of the chosen and the rejected answer."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

import math
from typing import Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LOG_RATIO_LIMIT, LossOutput, Tensor, bounded, log_sigmoid


class DPOLoss(ReferencedMethod):
    """Direct preference optimization: a logistic loss on the margin of the log-ratios.

    Formula: -log sigmoid(beta h).
    Reference: arXiv 2305.18290 eq. 7.
    """

    type: Literal["dpo"] = "dpo"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        return pair_output(-log_sigmoid(chosen_B - rejected_B), chosen_B, rejected_B, pairs)


class CDPOLoss(ReferencedMethod):
    """Conservative DPO: DPO with label smoothing.

    Formula: -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing.
    Reference: Mitchell, "A note on DPO with noisy preferences", 2023.
    """

    type: Literal["cdpo"] = "cdpo"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        loss_B = smoothed_logistic(chosen_B - rejected_B, label_smoothing=self.label_smoothing)
        return pair_output(loss_B, chosen_B, rejected_B, pairs)


class RobustDPOLoss(ReferencedMethod):
    """Robust DPO: unbiased where labels are flipped.

    Formula: [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e), e = label_smoothing.
    Reference: arXiv 2403.00409.
    """

    type: Literal["robust"] = "robust"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        logit_B, e = chosen_B - rejected_B, self.label_smoothing
        loss_B = (-(1 - e) * log_sigmoid(logit_B) + e * log_sigmoid(-logit_B)) / (1 - 2 * e)
        return pair_output(loss_B, chosen_B, rejected_B, pairs)


class IPOLoss(ReferencedMethod):
    """Identity preference optimization: a squared distance of the margin to a target.

    Formula: (h - 1/(2 beta))^2.
    Reference: arXiv 2310.12036 eq. 17 (their tau is `beta`).
    """

    type: Literal["ipo"] = "ipo"
    length_average: bool = True
    """Divide each answer's log-ratio by its length (as TRL does; the paper and OpenRLHF use sums)."""

    @property
    def sums_logprobs(self) -> bool:
        """Whether the log-ratios are sums, as in the paper, and not divided by the lengths."""
        return not self.length_average

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = pairs.log_ratios
        if self.length_average:
            chosen_B, rejected_B = chosen_B / pairs.chosen_lengths, rejected_B / pairs.rejected_lengths
        loss_B = (chosen_B - rejected_B - 1 / (2 * self.beta)).square()
        return pair_output(loss_B, self.beta * chosen_B, self.beta * rejected_B, pairs)


class HingeLoss(ReferencedMethod):
    """The hinge of SLiC and RSO: a pair whose margin is large enough adds nothing.

    Formula: max(0, 1 - beta h).
    Reference: arXiv 2305.10425 (SLiC), arXiv 2309.06657 (RSO).
    """

    type: Literal["hinge"] = "hinge"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        return pair_output((1 - (chosen_B - rejected_B)).relu(), chosen_B, rejected_B, pairs)


class EXOLoss(ReferencedMethod):
    """Efficient exact optimization on pairs: the reverse KL, where DPO has the forward one.

    Formula: KL((sig(beta h), sig(-beta h)) || (1 - e, e)), e = label_smoothing.
    Reference: arXiv 2402.00856 eq. 16.
    """

    type: Literal["exo"] = "exo"
    label_smoothing: float = Field(0.001, gt=0, lt=0.5)
    """The labels' doubt; the loss is infinite without."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        logit_B = chosen_B - rejected_B
        won_B = logit_B.sigmoid() * (log_sigmoid(logit_B) - math.log1p(-self.label_smoothing))
        lost_B = (-logit_B).sigmoid() * (log_sigmoid(-logit_B) - math.log(self.label_smoothing))
        return pair_output(won_B + lost_B, chosen_B, rejected_B, pairs)


class DiscoPOPLoss(ReferencedMethod):
    """DiscoPOP: the log-ratio modulated loss that was found by search.

    Formula: -(1-m) log sigmoid(beta h) + m exp(-beta h), m = sigmoid(beta h / tau).
    Reference: arXiv 2406.08414 eq. 5.

    Not convex: from h = 0 its gradient lowers the chosen answer, and it rewards pairs only beyond a hump. A policy that
    starts at its reference may stay on the wrong side.
    """

    type: Literal["discopop"] = "discopop"
    beta: float = Field(0.05, gt=0)
    tau: float = Field(0.05, gt=0)
    """Temperature of the modulation."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        logit_B = chosen_B - rejected_B
        exponential_B = (logit_B / self.tau).sigmoid() * bounded(-logit_B).exp()  # at the bound of +-20, m is 0
        loss_B = exponential_B - (-logit_B / self.tau).sigmoid() * log_sigmoid(logit_B)
        return pair_output(loss_B, chosen_B, rejected_B, pairs)


class DPONormLoss(ReferencedMethod):
    """Length-normalized DPO: the mean log-ratio of an answer's tokens instead of the sum.

    Formula: -log sigmoid(beta (a / len_c - b / len_r)).
    Reference: arXiv 2411.15124 (Tulu 3).
    """

    type: Literal["dpo_norm"] = "dpo_norm"
    beta: float = Field(5.0, gt=0)
    """Strength of the pull to the reference; of the size of a length times that of `dpo`."""

    @property
    def sums_logprobs(self) -> bool:
        """Return False: the loss is on mean log-ratios."""
        return False

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        chosen_B = chosen_B / pairs.chosen_lengths.clamp(min=1)  # without tokens a log-ratio is 0, and so its mean
        rejected_B = rejected_B / pairs.rejected_lengths.clamp(min=1)
        return pair_output(-log_sigmoid(chosen_B - rejected_B), chosen_B, rejected_B, pairs)


Divergence: TypeAlias = Literal["reverse_kl", "forward_kl", "js", "alpha"]


class FDPOLoss(ReferencedMethod):
    """f-DPO: DPO whose constraint to the reference is another f-divergence.

    Formula: -log sigmoid(beta (f'(exp a) - f'(exp b))), f' of u: forward KL -1/u, JS log(2u / (1 + u)), alpha (1 - u^-alpha) / alpha.
    Reference: arXiv 2309.16240, theorem 1 and table 1.
    """

    type: Literal["f_dpo"] = "f_dpo"
    divergence: Divergence = "js"
    """`reverse_kl` is DPO itself; `forward_kl` covers the reference most, `js` and `alpha` lie between."""
    alpha: float = Field(0.5, gt=0, lt=1)
    """Order of the divergence `alpha`: near 0 the reverse KL, near 1 the forward KL."""

    @model_validator(mode="after")
    def _check_alpha(self) -> Self:
        if self.divergence != "alpha" and self.alpha != type(self).model_fields["alpha"].default:
            raise ValueError(f'alpha = {self.alpha}: applies only to divergence = "alpha"; remove it, or set that')
        return self

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = (self.beta * self.derivative(log_u_B) for log_u_B in pairs.log_ratios)
        return pair_output(-log_sigmoid(chosen_B - rejected_B), chosen_B, rejected_B, pairs)

    def derivative(self, log_u_B: Tensor) -> Tensor:
        """Return f'(u) of the divergence, up to a constant, from log u = log pi - log pi_ref of an answer.

        Beyond exponents of 20 an exponential goes on as its tangent: finite, and with a gradient for an answer that
        became e^20 times as unlikely.
        """
        match self.divergence:
            case "reverse_kl":
                return log_u_B  # f' = log u + 1
            case "forward_kl":
                return -_tangent_expm1(-log_u_B) - 1  # f' = -1 / u
            case "js":
                return math.log(2) + log_sigmoid(log_u_B)  # f' = log(2u / (1 + u))
            case "alpha":
                return -_tangent_expm1(-self.alpha * log_u_B) / self.alpha  # f' = (1 - u^-alpha) / alpha
            case _:
                assert_never(self.divergence)


def smoothed_logistic(logit_B: Tensor, *, label_smoothing: float) -> Tensor:
    """Return -(1-e) log sigmoid(x) - e log sigmoid(-x), elementwise."""
    return -(1 - label_smoothing) * log_sigmoid(logit_B) - label_smoothing * log_sigmoid(-logit_B)


def _tangent_expm1(x_B: Tensor) -> Tensor:
    """Return exp(x) - 1, beyond the bound its tangent there: the gradient is exp(bound), neither 0 nor infinite."""
    return x_B.clamp(max=LOG_RATIO_LIMIT).expm1() + math.exp(LOG_RATIO_LIMIT) * (x_B - LOG_RATIO_LIMIT).clamp(min=0)
