"""Distill teachers with other tokenizers into a student, by universal logit distillation (`rlhf_core.algorithms.distillation`).

Legend: T masked tokens, C tokens of one chunk, V vocabulary, K likeliest other tokens, G groups, N outcomes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from rlhf_core.algorithms.distillation import UldKind, group_outcomes, other_tokens, uld_loss
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.data.alignment import AlignedSample, AlignedTeacher, CrossTokenizerSample, TeacherOutcomes
from rlhf_core.models.forward import over_logits
from rlhf_core.training.objectives.base import PlacedModel, count_tokens
from rlhf_core.types import TokenSample, TopLogprobs


@dataclass(frozen=True)
class CrossTokenizerObjective:
    """The distance of a student from teachers with other tokenizers, on `CrossTokenizerSample`s.

    loss = (1 - kl_weight) * CE + kl_weight * sum_m w_m ULD_m: CE a mean over the masked tokens, in nats, ULD_m a mean over
    the groups that the student has in common with teacher m. `weights` are (name, weight) of the samples' teachers, in
    order; they add up to 1. `k` is the number of outcomes that count one by one; 0 means all.
    """

    kind: UldKind
    temperature: float
    kl_weight: float
    k: int
    weights: tuple[tuple[str, float], ...]

    def denominators(self, samples: Sequence[AlignedSample] | Sequence[CrossTokenizerSample]) -> dict[str, float]:
        """Count the masked tokens, and the groups of each teacher (at least 1)."""
        counts = {"tokens": count_tokens([TokenSample(sample.token_ids, sample.loss_mask) for sample in samples])}
        for number, (name, _) in enumerate(self.weights):
            counts[f"groups/{name}"] = max(1.0, float(sum(sample.teachers[number].count for sample in samples)))
        return counts

    def compute(
        self, model: PlacedModel, samples: Sequence[CrossTokenizerSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss.

        The metrics are `loss`, `divergence`, `nll`, `aligned` (share of the masked tokens that are in a group) and
        `logprob_gap` (mean difference of the log-probs of a group's text), both weighted over the teachers, and with
        several teachers `divergence/<name>`.
        """
        batch = model.batch([TokenSample(one.token_ids, one.loss_mask) for one in samples])
        parts_TN = over_logits(model.module, batch, partial(_chunk, k=self.k, temperature=self.temperature))
        nll = parts_TN[:, 0].sum() / denominators["tokens"]
        zero = torch.zeros_like(nll)
        divergence, sums = zero, {"aligned": zero, "logprob_gap": zero}
        metrics: dict[str, Tensor] = {}
        for number, (name, weight) in enumerate(self.weights):
            outcomes = [sample.teachers[number] for sample in samples]
            spans = _spans(samples, outcomes)
            output = uld_loss(
                *group_outcomes(parts_TN[:, 1], parts_TN[:, 2:], spans, k=self.k),
                torch.from_numpy(np.concatenate([one.text_logprobs for one in outcomes])).to(model.device),
                torch.from_numpy(_stacked([one.others for one in outcomes])).to(model.device),
                kind=self.kind,
                k=self.k,
                groups=denominators[f"groups/{name}"],
            )
            if weight:  # left out instead of multiplied by 0, because 0 times infinity would make the gradient NaN
                divergence = divergence + weight * output.loss  # sum_m w_m ULD_m
            aligned = sum(end - start for start, end in spans) / denominators["tokens"]
            sums["aligned"] = sums["aligned"] + weight * aligned
            sums["logprob_gap"] = sums["logprob_gap"] + weight * output.metrics["logprob_gap"]
            if len(self.weights) > 1:
                metrics[f"divergence/{name}"] = output.metrics["loss"]
        loss = self.kl_weight * divergence
        if self.kl_weight != 1:
            loss = loss + (1 - self.kl_weight) * nll
        metrics |= sums | {"loss": loss, "divergence": divergence, "nll": nll}
        return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def teacher_outcomes(teacher: AlignedTeacher, top: TopLogprobs, *, k: int) -> TeacherOutcomes:
    """The teacher's outcomes at the groups of a sample.

    `top` are the teacher's log-probs at the masked tokens of its own sample: of the `k` + 1 likeliest tokens, which may
    include the text's own, or of all for k = 0.
    """
    own_ids = [
        token for token, masked in zip(teacher.sample.token_ids, teacher.sample.loss_mask, strict=True) if masked
    ]
    own_T1 = torch.tensor(own_ids, dtype=torch.long).unsqueeze(1)
    logprobs_TK = torch.from_numpy(top.logprobs)
    ids_TK = torch.from_numpy(top.ids).long() if k else torch.arange(logprobs_TK.shape[1]).expand_as(logprobs_TK)
    others_TK = logprobs_TK.masked_fill(ids_TK == own_T1, -torch.inf)
    others_TK = others_TK.topk(k or others_TK.shape[1] - 1, dim=1).values
    spans = [(group.teacher_start, group.teacher_end) for group in teacher.groups]
    text_G, others_GN = group_outcomes(torch.from_numpy(top.token_logprobs), others_TK, spans, k=k)
    return TeacherOutcomes(
        tuple((group.start, group.end) for group in teacher.groups), text_G.numpy(), others_GN.numpy()
    )


def _chunk(logits_CV: Tensor, targets_C: Tensor, *, k: int, temperature: float) -> Tensor:
    """Negative log-likelihood, log-prob of the text's token, and log-probs of other tokens [C, 2 + K]."""
    nll_C = cross_entropy(logits_CV, targets_C, reduction="none")
    logprobs_CV = log_softmax(logits_CV / temperature, dim=-1)
    own_C1 = logprobs_CV.gather(1, targets_C.unsqueeze(1))
    return torch.cat([nll_C.unsqueeze(1), own_C1, other_tokens(logprobs_CV, targets_C, k=k)], dim=1)


def _spans(samples: Sequence[CrossTokenizerSample], outcomes: Sequence[TeacherOutcomes]) -> list[tuple[int, int]]:
    """Groups of all samples, counted in the masked tokens of the batch."""
    before = accumulate((sample.loss_mask.count(1) for sample in samples), initial=0)
    return [
        (first + start, first + end) for first, one in zip(before, outcomes, strict=False) for start, end in one.spans
    ]


def _stacked(others: Sequence[np.ndarray]) -> np.ndarray:
    """Stack the outcomes of all groups, padded with zeros to the widest."""
    width = max(one.shape[1] for one in others)
    return np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in others])
