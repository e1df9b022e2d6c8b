"""Train a student on its teachers' log-probs, computed in pieces during training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.interfaces import Metrics, Objective, Trainer
from rlhf_core.training.batching import reduce, step_counts
from rlhf_core.training.objectives.base import PlacedModel
from rlhf_core.training.objectives.distillation import Teachers

P = ParamSpec("P")
T = TypeVar("T")

PIECE_ELEMENTS = 2**25  # 4 bytes each: 2^27 bytes
"""Maximum number of teacher log-probs in memory: 128 MiB in float32, and the same again for the token IDs."""


@dataclass(frozen=True)
class PartOfStep:
    """An objective on a part of the samples of an optimizer step, with the `counts` of the whole step."""

    objective: Objective
    counts: Mapping[str, float]

    def denominators(self, samples: Sequence[Any]) -> dict[str, float]:
        """The counts of the whole step."""
        return dict(self.counts)

    def compute(self, model: PlacedModel, samples: Sequence[Any], denominators: Mapping[str, float]) -> LossOutput:
        """Compute the objective's share of `samples`."""
        return self.objective.compute(model, samples, denominators)


def _of_student(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[DistillationTrainer, P], T]:
    """Build a method that calls `method` on the student."""

    @functools.wraps(method)
    def call(self: DistillationTrainer, *arguments: P.args, **keywords: P.kwargs) -> T:
        result: T = getattr(self._student, method.__name__)(*arguments, **keywords)
        return result

    return call


class DistillationTrainer:
    """A `Trainer` of a student on samples that its `teachers` complete when they are used.

    The teachers' log-probs are dropped after use, so that a step or an evaluation of any size holds at most
    `PIECE_ELEMENTS` of their log-probs.
    """

    def __init__(self, student: Trainer, teachers: Teachers) -> None:
        self._student = student
        self._teachers = teachers

    def forward_backward(self, samples: Any, objective: Any) -> Metrics:
        """Accumulate the gradient over all `samples` of the step and return the metrics."""
        return self._reduced(self._student.forward_backward, samples, objective)

    def loss(self, samples: Any, objective: Any) -> Metrics:
        """Evaluate the metrics without computing gradients."""
        return self._reduced(self._student.loss, samples, objective)

    def _reduced(self, method: Callable[[Any, PartOfStep], Metrics], samples: Any, objective: Any) -> Metrics:
        part = PartOfStep(objective, step_counts(objective, samples))
        return reduce([method(self._teachers.taught(piece), part) for piece in self._pieces(samples)])

    def _pieces(self, samples: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield lists of consecutive samples with at most `PIECE_ELEMENTS` log-probs, or one sample with more."""
        piece: list[Any] = []
        elements = 0
        for sample in samples:
            size = self._teachers.elements(sample)
            if piece and elements + size > PIECE_ELEMENTS:
                yield piece
                piece, elements = [], 0
            piece.append(sample)
            elements += size
        yield piece

    # ------------------------------------------------------------ the student's own

    optim_step = _of_student(Trainer.optim_step)
    logprobs = _of_student(Trainer.logprobs)
    top_logprobs = _of_student(Trainer.top_logprobs)
    values = _of_student(Trainer.values)
    scores = _of_student(Trainer.scores)
    step_scores = _of_student(Trainer.step_scores)
    keep = _of_student(Trainer.keep)
    compute = _of_student(Trainer.compute)
    weights = _of_student(Trainer.weights)
    save = _of_student(Trainer.save)
    load = _of_student(Trainer.load)
    damage = _of_student(Trainer.damage)
    export = _of_student(Trainer.export)
