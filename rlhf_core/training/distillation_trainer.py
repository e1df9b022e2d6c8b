"""A student beside its teacher: a `Trainer` whose samples get the teacher's distributions on the way, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.interfaces import Metrics, Trainer, Weights
from rlhf_core.training.batching import reduce
from rlhf_core.training.objectives.base import TrainingObjective
from rlhf_core.training.objectives.router import step_counts
from rlhf_core.types import DistillationSample, TokenSample, TopLogprobs

PIECE_ELEMENTS = 2**25
"""Log-probs of the teacher held at once: 128 MiB, and as much again for the ids."""


@dataclass(frozen=True)
class PartOfStep:
    """An objective whose samples are a part of an optimizer step, with the `counts` of the whole step."""

    objective: TrainingObjective
    counts: Mapping[str, float]

    def denominators(self, samples: Sequence[Any]) -> dict[str, float]:
        """Return the counts of the whole step."""
        return dict(self.counts)

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` as the objective has it."""
        return self.objective.compute(model, samples, denominators, pad_id=pad_id, device=device)


class DistillationTrainer:
    """The student's `Trainer`, which takes `TokenSample`s and trains on what `teacher` says of their masked tokens.

    The teacher is asked for its `k` likeliest tokens (0: all of the `vocabulary`) when a sample is used, and what it
    says is forgotten after it, so a step or an evaluation of any size holds `PIECE_ELEMENTS` of it.
    """

    def __init__(self, student: Trainer, teacher: Trainer, *, k: int, temperature: float, vocabulary: int) -> None:
        self._student = student
        self._teacher = teacher
        self._k = k
        self._temperature = temperature
        self._width = k or vocabulary

    def forward_backward(self, samples: Sequence[Any], objective: Any) -> Metrics:
        """Accumulate the gradient over all `samples` of the step; return the metrics."""
        part = PartOfStep(objective, step_counts(objective, samples))
        return reduce([self._student.forward_backward(self._taught(piece), part) for piece in self._pieces(samples)])

    def loss(self, samples: Sequence[Any], objective: Any) -> Metrics:
        """Return the metrics without gradients."""
        part = PartOfStep(objective, step_counts(objective, samples))
        return reduce([self._student.loss(self._taught(piece), part) for piece in self._pieces(samples)])

    def _taught(self, samples: Sequence[TokenSample]) -> list[DistillationSample]:
        told = self._teacher.top_logprobs(samples, k=self._k, temperature=self._temperature)
        return [DistillationSample(one.token_ids, one.loss_mask, top) for one, top in zip(samples, told, strict=True)]

    def _pieces(self, samples: Sequence[TokenSample]) -> Iterator[list[TokenSample]]:
        """Yield consecutive samples of at most `PIECE_ELEMENTS` log-probs, or a single one of more."""
        piece: list[TokenSample] = []
        elements = 0
        for sample in samples:
            size = sum(sample.loss_mask) * self._width
            if piece and elements + size > PIECE_ELEMENTS:
                yield piece
                piece, elements = [], 0
            piece.append(sample)
            elements += size
        yield piece

    # ------------------------------------------------------------ the student's own

    def optim_step(self, *, learning_rate: float) -> Metrics:
        return self._student.optim_step(learning_rate=learning_rate)

    def logprobs(self, samples: Sequence[TokenSample], *, temperature: float) -> list[tuple[float, ...]]:
        return self._student.logprobs(samples, temperature=temperature)

    def top_logprobs(self, samples: Sequence[TokenSample], *, k: int, temperature: float) -> list[TopLogprobs]:
        return self._student.top_logprobs(samples, k=k, temperature=temperature)

    def values(self, samples: Sequence[TokenSample]) -> list[tuple[float, ...]]:
        return self._student.values(samples)

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        return self._student.scores(sequences)

    def step_scores(self, samples: Sequence[TokenSample]) -> list[tuple[float, ...]]:
        return self._student.step_scores(samples)

    def weights(self) -> Weights:
        return self._student.weights()

    def save(self, folder: Path) -> None:
        self._student.save(folder)

    def load(self, folder: Path) -> None:
        self._student.load(folder)

    def export(self, folder: Path) -> None:
        self._student.export(folder)
