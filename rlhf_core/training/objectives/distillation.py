"""Distill the distributions of one or several teachers at masked tokens into a student.

Legend: T masked tokens, C tokens of one chunk, V vocabulary, K a teacher's most likely tokens, N numbers of a chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from rlhf_core.algorithms.distillation import DivergenceKind, multi_teacher_loss
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.data.alignment import AlignedSample, AlignedTeacher, CrossTokenizerSample
from rlhf_core.interfaces import Trainer
from rlhf_core.models.batches import TokenBatch, to_device
from rlhf_core.models.forward import over_logits
from rlhf_core.training.objectives.base import PlacedModel, count_tokens
from rlhf_core.training.objectives.cross_tokenizer import teacher_outcomes
from rlhf_core.types import Column, DistillationSample, TokenSample, TopLogprobs

ONE_TEACHER = (("teacher", 1.0),)


@dataclass(frozen=True)
class DistillationObjective:
    """The divergence of a student from its teachers at the masked tokens of `DistillationSample`s, in nats per token.

    loss = (1 - kl_weight) * CE + kl_weight * divergence. `weights` are (name, weight) of the samples' teachers, in order;
    they add up to 1 (`normalized_weights`).
    """

    kind: DivergenceKind
    jsd_beta: float
    temperature: float
    kl_weight: float
    weights: tuple[tuple[str, float], ...] = ONE_TEACHER

    def denominators(self, samples: Sequence[DistillationSample]) -> dict[str, float]:
        """Count the masked tokens."""
        return {"tokens": count_tokens(samples)}

    def compute(
        self, model: PlacedModel, samples: Sequence[DistillationSample], denominators: Mapping[str, float]
    ) -> LossOutput:
        """Share of `samples` in the loss.

        The metrics are `loss`, `divergence`, `agreement` (same most likely token), `nll`, and with several teachers
        `divergence/<name>`.
        """
        plain = [TokenSample(sample.token_ids, sample.loss_mask) for sample in samples]
        batch = model.batch(plain)
        inputs = [
            to_device(torch.from_numpy(np.concatenate(parts)), model.device)
            for tops in zip(*(sample.teachers for sample in samples), strict=True)
            for parts in ([top.logprobs for top in tops], [top.ids for top in tops])
        ]
        names = [
            "divergence",
            "agreement",
            *(f"divergence/{name}" for name, _ in self.weights if len(self.weights) > 1),
        ]
        compute = partial(self._chunk, tokens=denominators["tokens"], names=names[2:])
        *measured, nll = over_logits(model.module, batch, compute, *inputs).sum(0).unbind()
        metrics = dict(zip(names, measured, strict=True)) | {"nll": nll}
        # Left out instead of weighted with 0, because 0 times infinity would make the gradient NaN.
        loss = self.kl_weight * metrics["divergence"]
        if self.kl_weight != 1:
            loss = loss + (1 - self.kl_weight) * nll  # kl_weight D + (1 - kl_weight) CE
        return LossOutput(loss, {name: value.detach() for name, value in (metrics | {"loss": loss}).items()})

    def _chunk(
        self, logits_CV: Tensor, targets_C: Tensor, *inputs_CK: Tensor, tokens: float, names: Sequence[str]
    ) -> Tensor:
        """Divergence, agreement, the divergence of each of `names`, and negative log-likelihood [1, N] of a chunk, each
        divided by `tokens`.
        """
        output = multi_teacher_loss(
            logits_CV,
            [(logprobs_CK, ids_CK.long()) for logprobs_CK, ids_CK in zip(inputs_CK[::2], inputs_CK[1::2], strict=True)],
            self.weights,
            kind=self.kind,
            jsd_beta=self.jsd_beta,
            temperature=self.temperature,
            tokens=tokens,
        )
        nll = cross_entropy(logits_CV, targets_C, reduction="sum") / tokens  # at temperature 1, as when it samples
        parts = [output.loss, output.metrics["agreement"], *(output.metrics[name] for name in names), nll]
        return torch.stack(parts).unsqueeze(0)


def top_logprobs(model: nn.Module, batch: TokenBatch, *, k: int, temperature: float) -> list[TopLogprobs]:
    """Compute the `k` most likely tokens of softmax(logits / temperature) at each masked position, on the CPU.

    k = 0 returns all tokens. `batch` must have one sample per row. Call it without gradients.
    """
    tops = over_logits(model, batch, partial(_top, k=k, temperature=temperature))
    ends = np.cumsum([int((mask_L != 0).sum()) for mask_L in batch.on_host.loss_mask_BL])[:-1]
    return [TopLogprobs(*parts) for parts in zip(*(np.split(part.numpy(), ends) for part in tops), strict=True)]


def _top(logits_CV: Tensor, targets_C: Tensor, *, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_CV = log_softmax(logits_CV / temperature, dim=-1)
    own_C = logprobs_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1).cpu()
    if k == 0:
        return logprobs_CV.cpu(), torch.empty((len(logprobs_CV), 0), dtype=torch.int32), own_C
    logprobs_CK, ids_CK = logprobs_CV.topk(k, dim=-1)
    return logprobs_CK.cpu(), ids_CK.int().cpu(), own_C


# ---------------------------------------------------------------- teachers


class Teachers(Protocol):
    """One or several frozen models that complete the samples which a student is trained on."""

    def taught(self, samples: Sequence[Any]) -> list[Any]:
        """Add the teachers' log-probs to each sample."""

    def elements(self, sample: Any) -> int:
        """Count the teacher log-probs of a sample, which limits the samples held at once."""


@dataclass(frozen=True)
class SameVocabulary:
    """Teachers with the student's vocabulary: the `k` most likely tokens of each (0: all of the `vocabulary`)."""

    trainers: tuple[Trainer, ...]
    k: int
    temperature: float
    vocabulary: int

    def taught(self, samples: Sequence[TokenSample]) -> list[DistillationSample]:
        """Add the distributions of the teachers at its masked tokens to each sample."""
        tops = [one.top_logprobs(samples, k=self.k, temperature=self.temperature) for one in self.trainers]
        rows = zip(samples, *tops, strict=True)
        return [DistillationSample(one.token_ids, one.loss_mask, tuple(teachers)) for one, *teachers in rows]

    def elements(self, sample: TokenSample) -> int:
        """Count the log-probs of all teachers at the sample's masked tokens."""
        return sample.loss_mask.count(1) * (self.k or self.vocabulary) * len(self.trainers)


@dataclass(frozen=True, slots=True)
class RoutedSample:
    """A sequence with its trained tokens, and the number of the only teacher that teaches it."""

    token_ids: Column[int]
    loss_mask: Column[int]
    teacher: int


@dataclass(frozen=True)
class RoutedTeachers:
    """Teachers with the student's vocabulary, of which each sample has one."""

    trainers: tuple[Trainer, ...]
    k: int
    temperature: float
    vocabulary: int

    def taught(self, samples: Sequence[RoutedSample]) -> list[DistillationSample]:
        """Add the distribution of its teacher at its masked tokens to each sample."""
        made: dict[int, TopLogprobs] = {}
        for number, trainer in enumerate(self.trainers):
            own = [at for at, sample in enumerate(samples) if sample.teacher == number]
            shown = [TokenSample(samples[at].token_ids, samples[at].loss_mask) for at in own]
            if own:
                tops = trainer.top_logprobs(shown, k=self.k, temperature=self.temperature)
                made |= dict(zip(own, tops, strict=True))
        return [DistillationSample(one.token_ids, one.loss_mask, (made[at],)) for at, one in enumerate(samples)]

    def elements(self, sample: RoutedSample) -> int:
        """Count the log-probs of one teacher at the sample's masked tokens."""
        return sample.loss_mask.count(1) * (self.k or self.vocabulary)


@dataclass(frozen=True)
class OtherVocabularies:
    """Teachers with other tokenizers: the `k` likeliest outcomes at each group of tokens (0: all of them)."""

    trainers: tuple[Trainer, ...]
    k: int
    temperature: float
    vocabularies: tuple[int, ...]

    def taught(self, samples: Sequence[AlignedSample]) -> list[CrossTokenizerSample]:
        """Add the outcomes of the teachers at its groups to each sample."""
        outcomes = []
        for number, trainer in enumerate(self.trainers):
            theirs = [sample.teachers[number] for sample in samples]
            # One more than k, because the text's own token may be among them.
            tops = trainer.top_logprobs(
                [one.sample for one in theirs], k=self.k + 1 if self.k else 0, temperature=self.temperature
            )
            outcomes.append([teacher_outcomes(one, top, k=self.k) for one, top in zip(theirs, tops, strict=True)])
        rows = zip(samples, *outcomes, strict=True)
        return [CrossTokenizerSample(one.token_ids, one.loss_mask, tuple(own)) for one, *own in rows]

    def elements(self, sample: AlignedSample) -> int:
        """Count the log-probs of all teachers at the masked tokens of their own samples.

        With k = 0, at least the number of outcomes: every group has as many as the group with most tokens.
        """
        rows = zip(sample.teachers, self.vocabularies, strict=True)
        return sum(
            (tokens * (self.k + 1) if self.k else max(tokens, _padded(one)) * size)
            for one, size in rows
            for tokens in [one.sample.loss_mask.count(1)]
        )


def _padded(teacher: AlignedTeacher) -> int:
    """Count the teacher's tokens as if each group had as many as the widest."""
    return teacher.count * max((one.teacher_end - one.teacher_start for one in teacher.groups), default=0)
