"""Define objectives on preference data: pairs (DPO and variants) and single answers (KTO).

Two losses depend on the whole optimizer step before its gradient: KTO on the mean KL, AOT on the order of the
log-ratios. `look_ahead` measures these over all samples of the step without gradients. The loss itself is then a sum
over samples again, whatever the micro-batches and ranks.

Legend: B pairs or answers of a micro-batch, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod, length_desensitised
from rlhf_core.algorithms.preference.kto import KTOLoss, kto_kl
from rlhf_core.interfaces import Trainer
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import token_logprobs
from rlhf_core.training.objectives.base import count_tokens, total
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
        """Return the number of pairs and the number of masked tokens of the chosen answers."""
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
        """Return the share of `samples` in the loss, with metrics `loss`, `rewards/*`, `logprobs/*` and maybe `nll`."""
        pairs = _forward_pairs(model, samples, self.length_alpha, pad_id=pad_id, device=device)
        references = [[s.ref_chosen_logprob, s.ref_rejected_logprob] for s in samples]
        ref_chosen_B, ref_rejected_B = torch.tensor(references, dtype=torch.float32, device=device).unbind(dim=1)
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
        nll = -pairs.plain_chosen_B.sum() / denominators["tokens"]
        return total(output.loss + self.nll_coef * nll, output.metrics | {"nll": nll})

    def look_ahead(
        self, trainer: Trainer, samples: Sequence[PreferenceSample]
    ) -> tuple[PairObjective, list[PreferenceSample]]:
        """Return the objective and the samples of a step, rearranged if the loss depends on all of them (AOT)."""
        if not self.loss.looks_ahead:
            return self, list(samples)
        sides = [side for sample in samples for side in (sample.chosen, sample.rejected)]
        sums = [sum(row) for row in trainer.logprobs(sides, temperature=1.0)]
        return self, self.loss.rearranged(samples, sums[0::2], sums[1::2])


@dataclass(frozen=True)
class KTOObjective:
    """The loss of Kahneman-Tversky optimization (arXiv 2402.01306) on `AnswerSample`s. `look_ahead` sets `kl`."""

    loss: KTOLoss
    kl: float

    def denominators(self, samples: Sequence[AnswerSample]) -> dict[str, float]:
        """Return the number of answers and the number of desirable answers."""
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
        """Return the share of `samples` in the loss.

        The metrics are `loss`, `kl`, `rewards/desirable` and `rewards/undesirable`.
        """
        batch = collate([sample.answer for sample in samples], pad_id=pad_id).to(device)
        logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
        return self.loss.answer_loss(
            logprobs_BL.sum(dim=1),
            torch.tensor([sample.ref_logprob for sample in samples], dtype=torch.float32, device=device),
            torch.tensor([sample.desirable for sample in samples], device=device),
            kl=self.kl,
            rows=denominators["rows"],
            desirable_rows=denominators["desirable"],
        )

    def look_ahead(self, trainer: Trainer, samples: Sequence[AnswerSample]) -> tuple[KTOObjective, list[AnswerSample]]:
        """Return the objective with the step's KL estimate: mean log-ratio of answers to other prompts, at least 0."""
        sums = [sum(row) for row in trainer.logprobs([sample.mismatched for sample in samples], temperature=1.0)]
        references = [sample.ref_mismatched_logprob for sample in samples]
        kl = kto_kl(torch.tensor(sums), torch.tensor(references))
        return replace(self, kl=float(kl)), list(samples)


def answer_logprob(logprobs: Sequence[float], sample: TokenSample, other: TokenSample, *, alpha: float) -> float:
    """Return the summed log-prob of an answer, with weight `alpha` for tokens beyond the `other` answer's length."""
    row_1L, mask_1L, other_1L = (torch.tensor([row]) for row in (logprobs, sample.loss_mask, other.loss_mask))
    return float(length_desensitised(row_1L.double(), mask_1L, other_1L, alpha=alpha))


@dataclass(frozen=True)
class _Pairs:
    """Summed log-probs and masked tokens of both answers of each pair. `plain_chosen_B` counts every token fully."""

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
    chosen_B, rejected_B = length_desensitised(logprobs_BL, mask_BL, other_BL, alpha=alpha).split(len(samples))
    return _Pairs(chosen_B, rejected_B, chosen_length_B, rejected_length_B, plain_chosen_B)
