"""Log-ratios to the reference against numbers worked out by hand, with a reference that is a constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.evaluation import metrics
from rlhf_core.types import ActionSpan, Completion, Generation, Message, PolicyRef, Prompt, TokenSample

REFERENCE = PolicyRef(uri="file:///reference", digest="d")


class ConstantReference:
    """Context, runtime and trainer in one: every token of the mask has log-probability -3."""

    seed = 0

    def __init__(self) -> None:
        self.runtime = self
        self.calls = 0

    def path(self, ref: PolicyRef) -> Path:
        return Path("reference")

    def progress(self, done: int, total: int, text: str) -> None:
        assert done <= total

    @contextmanager
    def trainer(self, *_: Any) -> Iterator[ConstantReference]:
        yield self

    def logprobs(self, samples: Sequence[TokenSample], *, temperature: float) -> list[tuple[float, ...]]:
        self.calls += 1
        return [tuple(-3.0 * part for part in sample.loss_mask) for sample in samples]


def ratios(rows: list[Generation], context: ConstantReference) -> tuple[float, ...]:
    sampling = {"ppo": SamplingConfig(max_tokens=8)}
    return metrics.log_ratios(REFERENCE, {"ppo": rows}, sampling, context)["ppo"]  # type: ignore[arg-type]


def generation(logprobs: tuple[float, ...], spans: tuple[ActionSpan, ...] = ()) -> Generation:
    completion = Completion((5,) * len(logprobs), logprobs, "text", "stop", 0, 0, spans)
    return Generation(Prompt("p", (Message("user", "p"),), "", "test"), (1, 2), completion)


def test_what_an_environment_wrote_does_not_count_as_distance() -> None:
    spans = (ActionSpan(0, 5, 0), ActionSpan(95, 100, 0))
    played = generation((-3.0,) * 5 + (0.0,) * 90 + (-3.0,) * 5, spans)
    assert ratios([played, generation((-1.0, -2.0))], ConstantReference()) == (0.0, 3.0)  # -3 + 3 + 3


def test_answers_go_to_the_reference_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "KL_BATCH", 2)
    context = ConstantReference()
    assert ratios([generation((float(-n),)) for n in range(5)], context) == (3.0, 2.0, 1.0, 0.0, -1.0)
    assert context.calls == 3
