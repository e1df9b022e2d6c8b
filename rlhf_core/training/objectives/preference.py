"""Objectives on preference data: pairs (DPO and its kin), single answers (KTO), and what some need to know of a step.

Two losses look at the whole optimizer step before its gradient: KTO at the mean KL, AOT at the order of the log-ratios.
`look_ahead` measures that over all samples of the step without gradients, so that the loss itself is a sum over samples
again, whatever the micro-batches and ranks.

Legend: B pairs or answers of a micro-batch, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlhf_core.algorithms import preference as losses
from rlhf_core.algorithms.custom import custom_pair_loss
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.config.preference import (
    AOTLoss,
    APODownLoss,
    APOZeroLoss,
    CDPOLoss,
    CustomPreferenceLoss,
    DiscoPOPLoss,
    DPOLoss,
    EXOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    NCALoss,
    ORPOLoss,
    PreferenceLoss,
    RobustDPOLoss,
    SimPOLoss,
    SPPOLoss,
)
from rlhf_core.errors import ConfigError, explain
from rlhf_core.interfaces import Trainer
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import token_logprobs
from rlhf_core.training.objectives.base import count_tokens, total
from rlhf_core.types import AnswerSample, PreferenceSample, TokenSample
from rlhf_core.user_code.dependencies import UserFunction


@dataclass(frozen=True)
class PairObjective:
    """A loss on `PreferenceSample`s, whose reference log-probs were computed before.

    `nll_coef` adds that much of the chosen answers' mean token loss (RPO, arXiv 2404.19733), which has its own
    denominator. With `length_alpha` < 1 the tokens beyond the other answer's length count so much (LD-DPO, arXiv
    2409.06411); the samples' references must have been summed in the same way.
    """

    loss: PreferenceLoss
    nll_coef: float
    length_alpha: float
    function: UserFunction | None = None
    """The user's function, for a loss of type custom."""

    def denominators(self, samples: Sequence[PreferenceSample]) -> dict[str, float]:
        """Return the pairs, and the masked tokens of the chosen answers."""
        return {"pairs": float(len(samples)), "tokens": count_tokens([sample.chosen for sample in samples])}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[PreferenceSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss`, `rewards/*`, `logprobs/*` and, if used, `nll`."""
        pairs = _forward_pairs(model, samples, self.length_alpha, pad_id=pad_id, device=device)
        references = [[s.ref_chosen_logprob, s.ref_rejected_logprob] for s in samples]
        ref_chosen_B, ref_rejected_B = torch.tensor(references, dtype=torch.float32, device=device).unbind(dim=1)
        output = self._pair_loss(pairs, ref_chosen_B, ref_rejected_B, denominators)
        if self.nll_coef == 0:
            return output
        nll = -pairs.plain_chosen_B.sum() / denominators["tokens"]
        return total(output.loss + self.nll_coef * nll, output.metrics | {"nll": nll})

    def look_ahead(
        self, trainer: Trainer, samples: Sequence[PreferenceSample]
    ) -> tuple[PairObjective, list[PreferenceSample]]:
        """Return the objective and the samples of a step; for AOT the pairs of the sorted columns, else themselves."""
        if not isinstance(self.loss, AOTLoss):
            return self, list(samples)
        sides = [side for sample in samples for side in (sample.chosen, sample.rejected)]
        sums = [sum(row) for row in trainer.logprobs(sides, temperature=1.0)]
        return self, matched(samples, sums[0::2], sums[1::2], paired=self.loss.paired)

    def _pair_loss(
        self, pairs: _Pairs, ref_chosen_B: Tensor, ref_rejected_B: Tensor, denominators: Mapping[str, float]
    ) -> LossOutput:
        loss, count = self.loss, denominators["pairs"]
        four = (pairs.chosen_B, pairs.rejected_B, ref_chosen_B, ref_rejected_B)
        two = (pairs.chosen_B, pairs.rejected_B)
        lengths = {"chosen_lengths": pairs.chosen_length_B, "rejected_lengths": pairs.rejected_length_B}
        match loss:
            case DPOLoss():
                return losses.dpo_loss(*four, beta=loss.beta, pairs=count)
            case CDPOLoss() | AOTLoss():  # the samples of AOT are matched already
                return losses.dpo_loss(*four, beta=loss.beta, label_smoothing=loss.label_smoothing, pairs=count)
            case RobustDPOLoss():
                return losses.robust_dpo_loss(*four, beta=loss.beta, label_smoothing=loss.label_smoothing, pairs=count)
            case IPOLoss():
                average = loss.length_average
                return losses.ipo_loss(*four, **lengths, beta=loss.beta, length_average=average, pairs=count)
            case HingeLoss():
                return losses.hinge_loss(*four, beta=loss.beta, pairs=count)
            case APOZeroLoss():
                return losses.apo_zero_loss(*four, beta=loss.beta, pairs=count)
            case APODownLoss():
                return losses.apo_down_loss(*four, beta=loss.beta, pairs=count)
            case SPPOLoss():
                return losses.sppo_loss(*four, beta=loss.beta, pairs=count)
            case NCALoss():
                return losses.nca_loss(*four, beta=loss.beta, pairs=count)
            case EXOLoss():
                return losses.exo_loss(*four, beta=loss.beta, label_smoothing=loss.label_smoothing, pairs=count)
            case DiscoPOPLoss():
                return losses.discopop_loss(*four, beta=loss.beta, tau=loss.tau, pairs=count)
            case SimPOLoss():
                return losses.simpo_loss(*two, **lengths, beta=loss.beta, gamma=loss.gamma, pairs=count)
            case ORPOLoss():
                tokens = denominators["tokens"]
                return losses.orpo_loss(*two, **lengths, lambda_=loss.odds_weight, pairs=count, tokens=tokens)
            case CustomPreferenceLoss():
                assert self.function is not None
                function = self.function.load(key="loss.function")
                return custom_pair_loss(function, *four, **lengths, arguments=loss.arguments, pairs=count)
            case KTOLoss():
                rule = "judges single answers"
                raise ConfigError(explain("dpo.loss.type", loss.type, rule, "use KTOObjective"))


@dataclass(frozen=True)
class KTOObjective:
    """Kahneman-Tversky optimisation (arXiv 2402.01306) on `AnswerSample`s; `kl` is the step's, set by `look_ahead`."""

    loss: KTOLoss
    kl: float

    def denominators(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Return the answers, and the desirable ones among them."""
        return {"rows": float(len(samples)), "desirable": float(sum(sample.desirable for sample in samples))}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[AnswerSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss; metrics `loss`, `kl`, `rewards/desirable`, `rewards/undesirable`."""
        batch = collate([sample.answer for sample in samples], pad_id=pad_id).to(device)
        logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
        return losses.kto_loss(
            logprobs_BL.sum(dim=1),
            torch.tensor([sample.ref_logprob for sample in samples], dtype=torch.float32, device=device),
            torch.tensor([sample.desirable for sample in samples], device=device),
            kl=self.kl,
            beta=self.loss.beta,
            desirable_weight=self.loss.desirable_weight,
            undesirable_weight=self.loss.undesirable_weight,
            rows=denominators["rows"],
            desirable_rows=denominators["desirable"],
        )

    def look_ahead(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> tuple[KTOObjective, list[AnswerSample]]:
        """Return the objective with the step's KL estimate: the mean log-ratio of answers to other prompts, at least 0."""
        sums = [sum(row) for row in trainer.logprobs([sample.mismatched for sample in samples], temperature=1.0)]
        references = [sample.ref_mismatched_logprob for sample in samples]
        kl = losses.kto_kl(torch.tensor(sums), torch.tensor(references))
        return replace(self, kl=float(kl)), list(samples)


def matched(
    samples: Sequence[PreferenceSample], chosen: Sequence[float], rejected: Sequence[float], *, paired: bool
) -> list[PreferenceSample]:
    """Return pairs on which DPO's loss is AOT's (arXiv 2406.05882): equal ranks of two sorted columns stand together.

    `chosen` and `rejected` are the policy's summed log-probs now. `paired` gives every sample the reference's margin of
    the same rank as its own margin; otherwise the rejected answer whose log-ratio has the rank of the chosen one's.
    """
    if paired:
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


def answer_logprob(logprobs: Sequence[float], sample: TokenSample, other: TokenSample, *, alpha: float) -> float:
    """Return the summed log-prob of an answer in which tokens beyond the `other` answer's length count `alpha`."""
    row_1L, mask_1L, other_1L = (torch.tensor([row]) for row in (logprobs, sample.loss_mask, other.loss_mask))
    return float(losses.length_desensitised(row_1L.double(), mask_1L, other_1L, alpha=alpha))


@dataclass(frozen=True)
class _Pairs:
    """Summed log-probs of both answers of each pair, and their masked tokens; `plain_chosen_B` counts every token."""

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_length_B: Tensor
    rejected_length_B: Tensor
    plain_chosen_B: Tensor


def _forward_pairs(
    model: nn.Module, samples: Sequence[PreferenceSample], alpha: float, *, pad_id: int, device: torch.device
) -> _Pairs:
    sides = [sample.chosen for sample in samples] + [sample.rejected for sample in samples]
    batch = collate(sides, pad_id=pad_id).to(device)
    logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    plain_chosen_B, plain_rejected_B = logprobs_BL.sum(dim=1).split(len(samples))
    lengths = batch.loss_mask_BL.sum(dim=1).split(len(samples))
    chosen_length_B, rejected_length_B = lengths[0], lengths[1]
    if alpha == 1:
        return _Pairs(plain_chosen_B, plain_rejected_B, chosen_length_B, rejected_length_B, plain_chosen_B)
    mask_BL = batch.loss_mask_BL
    other_BL = mask_BL.roll(len(samples), dims=0)
    chosen_B, rejected_B = losses.length_desensitised(logprobs_BL, mask_BL, other_BL, alpha=alpha).split(len(samples))
    return _Pairs(chosen_B, rejected_B, chosen_length_B, rejected_length_B, plain_chosen_B)


def _order(values: Sequence[float]) -> list[int]:
    """Return the indices of `values` from the smallest to the largest; equal ones keep their order."""
    return sorted(range(len(values)), key=lambda index: values[index])
