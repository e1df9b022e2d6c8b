"""Define objectives on preference data: pairs (DPO and variants) and single answers (KTO, BCO).

Three losses depend on the whole optimizer step before its gradient: KTO on the mean KL, BCO on the mean rewards, AOT on
the order of the log-ratios. `look_ahead` measures these over all samples of the step without gradients. The loss itself
is then a sum over samples again, independent of micro-batches and ranks.

Legend: B pairs or answers of a micro-batch, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss, RewardShift, kto_kl
from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod, length_desensitised
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.interfaces import Trainer, logprob_rows
from rlhf_core.models.batches import to_device
from rlhf_core.models.forward import token_logprobs
from rlhf_core.training.objectives.base import PlacedModel, count_tokens, total
from rlhf_core.types import AnswerSample, PreferenceSample, TokenSample
from rlhf_core.user_code.dependencies import UserFunction


@dataclass(frozen=True)
class PairObjective:
    """A loss on `PreferenceSample`s with precomputed reference log-probs.

    `nll_coef` adds the chosen answers' mean token loss with that weight (RPO, arXiv 2404.19733), which has its own
    denominator. With `length_alpha` < 1, tokens beyond the other answer's length have that weight (LD-DPO, arXiv
    2409.06411); the samples' reference log-probs must have been summed in the same way.
    """

    loss: PreferenceMethod
    nll_coef: float
    length_alpha: float
    function: UserFunction | None = None
    """User function for a loss of type custom."""

    def denominators(self, samples: Sequence[PreferenceSample]) -> dict[str, float]:
        """Count the pairs and the masked tokens of the chosen answers."""
        return {"pairs": float(len(samples)), "tokens": count_tokens([sample.chosen for sample in samples])}

    def compute(
        self, model: PlacedModel, samples: Sequence[PreferenceSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss, with metrics `loss`, `rewards/*`, `logprobs/*` and maybe `nll`."""
        pairs = _forward_pairs(model, samples, self.length_alpha)
        references = [[s.ref_chosen_logprob, s.ref_rejected_logprob] for s in samples]
        references_B2 = to_device(torch.tensor(references, dtype=torch.float32), model.device)
        ref_chosen_B, ref_rejected_B = references_B2.unbind(dim=1)
        output = self.loss.loss(
            PairBatch(
                chosen_logprobs=pairs.chosen_B,
                rejected_logprobs=pairs.rejected_B,
                ref_chosen_logprobs=ref_chosen_B,
                ref_rejected_logprobs=ref_rejected_B,
                chosen_lengths=pairs.chosen_length_B,
                rejected_lengths=pairs.rejected_length_B,
                pairs=denominators["pairs"],
                tokens=denominators["tokens"],
                function=None if self.function is None else self.function.load(key="loss.function"),
            )
        )
        if self.nll_coef == 0:
            return output
        nll = -pairs.plain_chosen_B.sum() / denominators["tokens"]  # -log pi(chosen), mean over tokens
        return total(output.loss + self.nll_coef * nll, output.metrics | {"nll": nll})

    def look_ahead(
        self, trainer: Trainer, samples: Sequence[PreferenceSample]
    ) -> tuple[PairObjective, list[PreferenceSample]]:
        """Rearrange the samples of a step if the loss depends on all of them (AOT)."""
        if not self.loss.looks_ahead:
            return self, list(samples)
        sides = [side for sample in samples for side in (sample.chosen, sample.rejected)]
        sums = [sum(row) for row in logprob_rows(trainer, sides)]
        return self, self.loss.rearranged(samples, sums[0::2], sums[1::2])


@dataclass(frozen=True)
class KTOObjective:
    """The loss of Kahneman-Tversky optimization (arXiv 2402.01306) on `AnswerSample`s. `look_ahead` sets `kl`."""

    loss: KTOLoss
    kl: float

    def denominators(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Count the answers and the desirable answers."""
        return _answer_counts(samples)

    def compute(
        self, model: PlacedModel, samples: Sequence[AnswerSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss.

        The metrics are `loss`, `kl`, `rewards/desirable` and `rewards/undesirable`.
        """
        return self.loss.answer_loss(
            *_forward_answers(model, samples),
            kl=self.kl,
            rows=denominators["rows"],
            desirable_rows=denominators["desirable"],
        )

    def look_ahead(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> tuple[KTOObjective, list[AnswerSample]]:
        """Estimate the step's KL for the objective: mean log-ratio of answers to other prompts, at least 0."""
        sums = [sum(row) for row in logprob_rows(trainer, [sample.mismatched for sample in samples])]
        references = [sample.ref_mismatched_logprob for sample in samples]
        kl = kto_kl(torch.tensor(sums), torch.tensor(references))
        return replace(self, kl=float(kl)), list(samples)


@dataclass(frozen=True)
class BCOObjective:
    """The loss of binary classifier optimization (arXiv 2404.04656) on `AnswerSample`s, with the rewards' running means."""

    loss: BCOLoss
    shift: RewardShift = RewardShift()

    def denominators(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Count the answers and the desirable answers."""
        return _answer_counts(samples)

    def compute(
        self, model: PlacedModel, samples: Sequence[AnswerSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss.

        The metrics are `loss`, `shift`, `rewards/desirable` and `rewards/undesirable`.
        """
        return self.loss.answer_loss(
            *_forward_answers(model, samples),
            shift=self.shift.delta,
            rows=denominators["rows"],
            desirable_rows=denominators["desirable"],
        )

    def shifted(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> BCOObjective:
        """The objective with running means updated by the rewards of `samples` under the present policy."""
        sums = [sum(row) for row in logprob_rows(trainer, [sample.answer for sample in samples])]
        rewards = [self.loss.beta * (now - sample.ref_logprob) for now, sample in zip(sums, samples, strict=True)]
        labeled = list(zip(rewards, samples, strict=True))
        return replace(
            self,
            shift=self.shift.after(
                desirable=[reward for reward, sample in labeled if sample.desirable],
                undesirable=[reward for reward, sample in labeled if not sample.desirable],
                decay=self.loss.shift_decay,
            ),
        )


class RunningShift:
    """Carries the running means of BCO from step to step, and into checkpoints (`rlhf_core.training.fit.Carried`)."""

    def __init__(self, objective: BCOObjective) -> None:
        self._objective = objective

    def __call__(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> tuple[BCOObjective, list[AnswerSample]]:
        """The objective of a training step: the means move with the step's rewards."""
        self._objective = self._objective.shifted(trainer, samples)
        return self._objective, list(samples)

    def evaluated(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> tuple[BCOObjective, list[AnswerSample]]:
        """The objective of an evaluation, with unchanged means; before the first step the means of `samples`."""
        if self._objective.shift == RewardShift():
            return self._objective.shifted(trainer, samples), list(samples)
        return self._objective, list(samples)

    def state(self) -> dict[str, float | None]:
        """The means for a checkpoint."""
        shift = self._objective.shift
        return {"desirable": shift.desirable, "undesirable": shift.undesirable}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Take over the means of a checkpoint."""
        self._objective = replace(self._objective, shift=RewardShift(**state))


def answer_logprob(logprobs: Sequence[float], sample: TokenSample, other: TokenSample, *, alpha: float) -> float:
    """Summed log-prob of an answer, with weight `alpha` for tokens beyond the `other` answer's length."""
    row_1L, mask_1L, other_1L = (torch.tensor([row]) for row in (logprobs, sample.loss_mask, other.loss_mask))
    return float(length_desensitised(row_1L.double(), mask_1L, other_1L, alpha=alpha))


def _answer_counts(samples: Sequence[AnswerSample]) -> dict[str, float]:
    return {"rows": float(len(samples)), "desirable": float(sum(sample.desirable for sample in samples))}


def _forward_answers(model: PlacedModel, samples: Sequence[AnswerSample]) -> tuple[Tensor, Tensor, Tensor]:
    """Summed log-probs of the model and of the reference, and whether each answer is desirable [B]."""
    batch = model.batch([sample.answer for sample in samples])
    logprobs_BL, _ = token_logprobs(model.module, batch, temperature=1.0, with_entropy=False)
    return (
        logprobs_BL.sum(dim=1),
        to_device(torch.tensor([sample.ref_logprob for sample in samples], dtype=torch.float32), model.device),
        to_device(torch.tensor([sample.desirable for sample in samples]), model.device),
    )


@dataclass(frozen=True)
class _Pairs:
    """Summed log-probs and masked tokens of both answers of each pair. `plain_chosen_B` counts every token fully."""

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_length_B: Tensor
    rejected_length_B: Tensor
    plain_chosen_B: Tensor


def _forward_pairs(model: PlacedModel, samples: Sequence[PreferenceSample], alpha: float) -> _Pairs:
    sides = [sample.chosen for sample in samples] + [sample.rejected for sample in samples]
    batch = model.batch(sides)
    logprobs_BL, _ = token_logprobs(model.module, batch, temperature=1.0, with_entropy=False)
    plain_chosen_B, plain_rejected_B = logprobs_BL.sum(dim=1).split(len(samples))
    lengths = batch.loss_mask_BL.sum(dim=1).split(len(samples))
    chosen_length_B, rejected_length_B = lengths[0], lengths[1]
    if alpha == 1:
        return _Pairs(plain_chosen_B, plain_rejected_B, chosen_length_B, rejected_length_B, plain_chosen_B)
    mask_BL = batch.loss_mask_BL
    other_BL = mask_BL.roll(len(samples), dims=0)  # chosen and rejected rows change places
    chosen_B, rejected_B = length_desensitised(logprobs_BL, mask_BL, other_BL, alpha=alpha).split(len(samples))
    return _Pairs(chosen_B, rejected_B, chosen_length_B, rejected_length_B, plain_chosen_B)
