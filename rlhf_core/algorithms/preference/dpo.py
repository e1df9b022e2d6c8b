"""Losses on pairs of answers: DPO and its relatives, losses of each answer separately, reference-free losses."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from rlhf_core.algorithms.preference.base import (
    PairBatch,
    PreferenceMethod,
    ReferencedMethod,
    ReferenceFreeMethod,
    pair_output,
)
from rlhf_core.algorithms.token_math import LOG_RATIO_LIMIT, LossOutput, Tensor, bounded, check_terms, log_sigmoid
from rlhf_core.schema.base import CustomFunction
from rlhf_core.types import PreferenceSample

CERTAIN = -1e-6  # mean log-prob above which an answer's odds are taken as constant: at 0 they are infinite


class DPOLoss(ReferencedMethod):
    """Direct preference optimization: a logistic loss on the margin of the log-ratios.

    Formula: -log sigmoid(beta h).
    Reference: arXiv 2305.18290 eq. 7.
    """

    type: Literal["dpo"] = "dpo"

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return -log_sigmoid(chosen_B - rejected_B)


class CDPOLoss(ReferencedMethod):
    """Conservative DPO: DPO with label smoothing.

    Formula: -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing.
    Reference: Mitchell, "A note on DPO with noisy preferences", 2023.
    """

    type: Literal["cdpo"] = "cdpo"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return smoothed_logistic(chosen_B - rejected_B, label_smoothing=self.label_smoothing)


class RobustDPOLoss(ReferencedMethod):
    """Robust DPO: unbiased where labels are flipped.

    Formula: [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e), e = label_smoothing.
    Reference: arXiv 2403.00409.
    """

    type: Literal["robust"] = "robust"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        logit_B, e = chosen_B - rejected_B, self.label_smoothing
        return (-(1 - e) * log_sigmoid(logit_B) + e * log_sigmoid(-logit_B)) / (1 - 2 * e)


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

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return (1 - (chosen_B - rejected_B)).relu()


class EXOLoss(ReferencedMethod):
    """Efficient exact optimization on pairs: the reverse KL, where DPO has the forward one.

    Formula: KL((sig(beta h), sig(-beta h)) || (1 - e, e)), e = label_smoothing.
    Reference: arXiv 2402.00856 eq. 16.
    """

    type: Literal["exo"] = "exo"
    label_smoothing: float = Field(0.001, gt=0, lt=0.5)
    """Assumed share of wrong labels; with 0 the loss would be infinite."""

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        logit_B = chosen_B - rejected_B
        won_B = logit_B.sigmoid() * (log_sigmoid(logit_B) - math.log1p(-self.label_smoothing))
        lost_B = (-logit_B).sigmoid() * (log_sigmoid(-logit_B) - math.log(self.label_smoothing))
        return won_B + lost_B


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

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        logit_B = chosen_B - rejected_B
        exponential_B = (logit_B / self.tau).sigmoid() * bounded(-logit_B).exp()  # at the bound of +-20, m is 0
        return exponential_B - (-logit_B / self.tau).sigmoid() * log_sigmoid(logit_B)


class DPONormLoss(ReferencedMethod):
    """Length-normalized DPO: the mean log-ratio of an answer's tokens instead of the sum.

    Formula: -log sigmoid(beta (a / len_c - b / len_r)).
    Reference: arXiv 2411.15124 (Tulu 3).
    """

    type: Literal["dpo_norm"] = "dpo_norm"
    beta: float = Field(5.0, gt=0)
    """Strength of the pull to the reference; about the length of an answer times the `beta` of `dpo`."""

    @property
    def sums_logprobs(self) -> bool:
        """False, since the loss is on mean log-ratios."""
        return False

    def rewards(self, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        """The mean rewards of the tokens; without tokens a log-ratio is 0, and so is its mean."""
        chosen_B, rejected_B = super().rewards(pairs)
        return chosen_B / pairs.chosen_lengths.clamp(min=1), rejected_B / pairs.rejected_lengths.clamp(min=1)

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return -log_sigmoid(chosen_B - rejected_B)


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

    def rewards(self, pairs: PairBatch) -> tuple[Tensor, Tensor]:
        """The rewards beta f'(exp a) and beta f'(exp b)."""
        chosen_B, rejected_B = pairs.log_ratios
        return self.beta * self.derivative(chosen_B), self.beta * self.derivative(rejected_B)

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return -log_sigmoid(chosen_B - rejected_B)

    def derivative(self, log_u_B: Tensor) -> Tensor:
        """f'(u) of the divergence, up to a constant, from log u = log pi - log pi_ref of an answer.

        Beyond exponents of 20 an exponential continues as its tangent: finite, and with a gradient for an answer that
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


# ---------------------------------------------------------------- each answer on its own


class APOZeroLoss(ReferencedMethod):
    """APO-zero: anchored preference optimization for chosen answers better than the policy's own.

    Formula: 1 - sigmoid(beta a) + sigmoid(beta b).
    Reference: arXiv 2408.06266 eq. 7.

    Raises chosen answers and lowers rejected ones.
    """

    type: Literal["apo_zero"] = "apo_zero"

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return (-chosen_B).sigmoid() + rejected_B.sigmoid()  # sigmoid(-x) for 1 - sigmoid(x), which cancels for large x


class APODownLoss(ReferencedMethod):
    """APO-down: anchored preference optimization for chosen answers worse than the policy's own.

    Formula: sigmoid(beta a) + 1 - sigmoid(beta h).
    Reference: arXiv 2408.06266 eq. 8.

    Lowers both answers, the rejected one more.
    """

    type: Literal["apo_down"] = "apo_down"

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return chosen_B.sigmoid() + (rejected_B - chosen_B).sigmoid()


class SPPOLoss(ReferencedMethod):
    """Self-play preference optimization with hard labels.

    Formula: (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2.
    Reference: arXiv 2405.00675 eq. 4.7, hard form (their eta is 1 / beta).

    The win probability of the paper is 1 for the chosen answer and 0 for the rejected one.
    """

    type: Literal["sppo"] = "sppo"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = pairs.log_ratios
        target = 1 / (2 * self.beta)
        loss_B = (chosen_B - target).square() + (rejected_B + target).square()
        return pair_output(loss_B, self.beta * chosen_B, self.beta * rejected_B, pairs)


class NCALoss(ReferencedMethod):
    """Noise contrastive alignment on pairs.

    Formula: -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2.
    Reference: arXiv 2402.05369.

    Unlike DPO it keeps the chosen answer's likelihood from falling.
    """

    type: Literal["nca"] = "nca"

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return -log_sigmoid(chosen_B) - (log_sigmoid(-chosen_B) + log_sigmoid(-rejected_B)) / 2


# ---------------------------------------------------------------- the step as a whole


class AOTLoss(ReferencedMethod):
    """Alignment by optimal transport: the DPO loss between sorted columns of the whole optimizer step.

    Formula: -(1-e) log sigmoid(beta d) - e log sigmoid(-beta d), d the difference of equal ranks of two columns.
    Reference: arXiv 2406.05882.
    """

    type: Literal["aot"] = "aot"
    paired: bool = True
    """Compare the distribution of h with the reference's; False: compare chosen with rejected rewards."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    looks_ahead: ClassVar[bool] = True

    @property
    def sums_logprobs(self) -> bool:
        """False, since the pairs of the loss are not the pairs of the data."""
        return False

    def term(self, chosen_B: Tensor, rejected_B: Tensor) -> Tensor:  # of pairs that `rearranged` made of the whole step
        return smoothed_logistic(chosen_B - rejected_B, label_smoothing=self.label_smoothing)

    def rearranged(
        self, samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float]
    ) -> list[PreferenceSample]:
        """Build pairs on which DPO's loss equals AOT's: equal ranks of two sorted columns are paired.

        `chosen` and `rejected` are the policy's current summed log-probs. `paired` gives every sample the reference's
        margin of the same rank as the sample's margin; otherwise the rejected answer whose log-ratio has the same rank
        as the chosen answer's.
        """
        if self.paired:
            margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
            reference = sorted(sample.ref_chosen_logprob - sample.ref_rejected_logprob for sample in samples)
            rank = {index: position for position, index in enumerate(_order(margins))}
            return [
                replace(sample, ref_chosen_logprob=reference[rank[index]] + sample.ref_rejected_logprob)
                for index, sample in enumerate(samples)
            ]
        up = _order([c - sample.ref_chosen_logprob for c, sample in zip(chosen, samples, strict=True)])
        down = _order([r - sample.ref_rejected_logprob for r, sample in zip(rejected, samples, strict=True)])
        return [
            replace(samples[i], rejected=samples[j].rejected, ref_rejected_logprob=samples[j].ref_rejected_logprob)
            for i, j in zip(up, down, strict=True)
        ]


# ---------------------------------------------------------------- without a reference


class SimPOLoss(ReferenceFreeMethod):
    """SimPO: mean log-probs with a target margin, without a reference.

    Formula: -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma).
    Reference: arXiv 2405.14734 eq. 6.
    """

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0)
    """Target margin, in units of the scaled reward."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B = self.beta * pairs.chosen_logprobs / pairs.chosen_lengths
        rejected_B = self.beta * pairs.rejected_logprobs / pairs.rejected_lengths
        return pair_output(-log_sigmoid(chosen_B - rejected_B - self.gamma), chosen_B, rejected_B, pairs)


class ORPOLoss(ReferenceFreeMethod):
    """ORPO: likelihood of the chosen answer and its odds against the rejected one, without a reference.

    Formula: NLL(chosen) + lambda * mean of -log sigmoid(log odds_c - log odds_r), odds = p / (1 - p).
    Reference: arXiv 2403.07691 eq. 6 and 7.

    log p is the mean log-prob of an answer. The first term is a mean over the tokens of the step's chosen answers, the
    second one over its pairs. Metrics of `pair_output` (rewards are lambda log p), and `nll`, `odds_ratio_loss` (before
    lambda), `log_odds_ratio`.
    """

    type: Literal["orpo"] = "orpo"
    odds_weight: float = Field(0.1, gt=0)
    """lambda of the paper."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B = pairs.chosen_logprobs / pairs.chosen_lengths
        rejected_B = pairs.rejected_logprobs / pairs.rejected_lengths
        log_odds_ratio_B = _log_odds(chosen_B) - _log_odds(rejected_B)
        rewards = (self.odds_weight * chosen_B, self.odds_weight * rejected_B)
        ratio = pair_output(-log_sigmoid(log_odds_ratio_B), *rewards, pairs)  # eq. 7
        nll = -pairs.chosen_logprobs.sum() / pairs.tokens
        loss = nll + self.odds_weight * ratio.loss  # eq. 6
        metrics = ratio.metrics | {
            "loss": loss,
            "nll": nll,
            "odds_ratio_loss": ratio.loss,
            "log_odds_ratio": log_odds_ratio_B.sum() / pairs.pairs,
        }
        return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


# ---------------------------------------------------------------- a user's own


class CustomPreferenceLoss(CustomFunction, PreferenceMethod):
    """A user's custom loss on pairs.

    Formula: the value that the user's function returns for each pair.
    Reference: docs/custom.md.

    The rewards in the metrics are the log-ratios to the reference.
    """

    type: Literal["custom"] = "custom"
    reference: bool = True
    """Whether it compares with a reference. False skips the reference's forward pass; the function receives zeros
    instead."""

    @property
    def uses_reference(self) -> bool:
        """Whether the user's function compares with a reference."""
        return self.reference

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Call the function with the four log-probs [B], the lengths by keyword (tokens, [B]) and the `arguments`."""
        assert pairs.function is not None
        loss_B = pairs.function(
            pairs.chosen_logprobs,
            pairs.rejected_logprobs,
            pairs.ref_chosen_logprobs,
            pairs.ref_rejected_logprobs,
            chosen_lengths=pairs.chosen_lengths,
            rejected_lengths=pairs.rejected_lengths,
            **self.arguments,
        )
        check_terms(loss_B, pairs.chosen_logprobs, "one loss for each pair")
        return pair_output(loss_B, *pairs.log_ratios, pairs)


# ---------------------------------------------------------------- terms


def smoothed_logistic(logit_B: Tensor, *, label_smoothing: float) -> Tensor:
    """Smoothed logistic loss -(1-e) log sigmoid(x) - e log sigmoid(-x), elementwise."""
    return -(1 - label_smoothing) * log_sigmoid(logit_B) - label_smoothing * log_sigmoid(-logit_B)


def _tangent_expm1(x_B: Tensor) -> Tensor:
    """exp(x) - 1, beyond the bound its tangent there: the gradient is exp(bound), neither 0 nor infinite."""
    return x_B.clamp(max=LOG_RATIO_LIMIT).expm1() + math.exp(LOG_RATIO_LIMIT) * (x_B - LOG_RATIO_LIMIT).clamp(min=0)


def _log_odds(mean_logprob_B: Tensor) -> Tensor:
    # expm1 keeps 1 - p exact to the last digits where p is near 1.
    certain_B = mean_logprob_B.clamp(max=CERTAIN)
    return certain_B - (-certain_B.expm1()).log()


def _order(values: Sequence[float]) -> list[int]:
    """The indices of `values` from the smallest to the largest; ties keep their order."""
    return sorted(range(len(values)), key=lambda index: values[index])
