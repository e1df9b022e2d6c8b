"""What teachers say of a student's samples: distributions over its own vocabulary, or outcomes of groups of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_core.data.alignment import AlignedSample, AlignedTeacher, CrossTokenizerSample
from rlhf_core.interfaces import Trainer
from rlhf_core.training.objectives.cross_tokenizer import teacher_outcomes
from rlhf_core.types import DistillationSample, TokenSample


class Teachers(Protocol):
    """One or several frozen models that complete the samples which a student is trained on."""

    def taught(self, samples: Sequence[Any]) -> list[Any]:
        """Return each sample with what the teachers say of it."""
        ...

    def elements(self, sample: Any) -> int:
        """Return how many log-probs the teachers give for a sample: what decides how many samples are held at once."""
        ...


@dataclass(frozen=True)
class SameVocabulary:
    """Teachers with the student's vocabulary: the `k` most likely tokens of each (0: all of the `vocabulary`)."""

    trainers: tuple[Trainer, ...]
    k: int
    temperature: float
    vocabulary: int

    def taught(self, samples: Sequence[TokenSample]) -> list[DistillationSample]:
        """Return each sample with the distributions of the teachers at its masked tokens."""
        tops = [one.top_logprobs(samples, k=self.k, temperature=self.temperature) for one in self.trainers]
        rows = zip(samples, *tops, strict=True)
        return [DistillationSample(one.token_ids, one.loss_mask, tuple(told)) for one, *told in rows]

    def elements(self, sample: TokenSample) -> int:
        """Return the number of log-probs of all teachers at the sample's masked tokens."""
        return sum(sample.loss_mask) * (self.k or self.vocabulary) * len(self.trainers)


@dataclass(frozen=True)
class OtherVocabularies:
    """Teachers with tokenizers of their own: the `k` likeliest outcomes at each group of tokens (0: all of them)."""

    trainers: tuple[Trainer, ...]
    k: int
    temperature: float
    vocabularies: tuple[int, ...]

    def taught(self, samples: Sequence[AlignedSample]) -> list[CrossTokenizerSample]:
        """Return each sample with the outcomes of the teachers at its groups."""
        told = []
        for number, trainer in enumerate(self.trainers):
            theirs = [sample.teachers[number] for sample in samples]
            # One more than k, because the text's own token may be among them.
            tops = trainer.top_logprobs(
                [one.sample for one in theirs], k=self.k + 1 if self.k else 0, temperature=self.temperature
            )
            told.append([teacher_outcomes(one, top, k=self.k) for one, top in zip(theirs, tops, strict=True)])
        rows = zip(samples, *told, strict=True)
        return [CrossTokenizerSample(one.token_ids, one.loss_mask, tuple(outcomes)) for one, *outcomes in rows]

    def elements(self, sample: AlignedSample) -> int:
        """Return the number of log-probs of all teachers at the masked tokens of their own samples.

        With k = 0, at least the number of outcomes: every group has as many as the group with most tokens.
        """
        rows = zip(sample.teachers, self.vocabularies, strict=True)
        return sum(
            sum(one.sample.loss_mask) * (self.k + 1) if self.k else max(sum(one.sample.loss_mask), _padded(one)) * size
            for one, size in rows
        )


def _padded(teacher: AlignedTeacher) -> int:
    """Return the number of the teacher's tokens if each group had as many as the widest."""
    return teacher.count * max((one.teacher_end - one.teacher_start for one in teacher.groups), default=0)
