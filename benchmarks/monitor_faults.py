"""Faults of policy optimization, each planted at a step, that `benchmarks.monitors` has to detect.

A fault wraps the engines between the runtime and the stage, where a real fault would occur. The stage and its metrics
are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from rlhf_core.algorithms.token_math import k1, k3
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.rewards import FunctionReward, RewardModelReward, RewardsConfig
from rlhf_core.interfaces import Metrics, Role
from rlhf_core.sequences import Subset
from rlhf_core.types import Completion, Generation, SamplingRequest


@dataclass
class Clock:
    """The current step of the run (the version of the last sent weights), and whether the fault has begun."""

    begins: int
    step: int = 0

    @property
    def faulty(self) -> bool:
        """Whether the fault is active."""
        return self.step >= self.begins


class Through:
    """An engine that forwards all calls; a fault overrides the calls that it breaks."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class CountingSampler(Through):
    """Tells the clock the current step."""

    def load_weights(self, weights: Any, *, version: int) -> None:
        """Load the weights of the step `version`."""
        self._clock.step = version
        self._engine.load_weights(weights, version=version)


class StaleSampler(CountingSampler):
    """Claims to have the new weights, but keeps the old ones."""

    def load_weights(self, weights: Any, *, version: int) -> None:
        """Load the weights, until the fault begins."""
        self._clock.step = version
        if not self._clock.faulty:
            self._engine.load_weights(weights, version=version)
        else:
            self._engine._version = version


class WrongTemplateSampler(CountingSampler):
    """Answers prompts without the last tokens of the template, which announce the assistant."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Sample answers to truncated prompts."""
        if self._clock.faulty:
            requests = [replace(one, prompt_ids=one.prompt_ids[:-3]) for one in requests]
        return list(self._engine.generate(requests, sampling))


class OtherTemperatureSampler(CountingSampler):
    """Samples at 0.7 of the requested temperature."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Sample answers at a lower temperature."""
        factor = 0.7 if self._clock.faulty else 1.0
        colder = sampling.model_copy(update={"temperature": factor * sampling.temperature})
        return list(self._engine.generate(requests, colder))


class CutSampler(CountingSampler):
    """Loses the last tokens of every answer that ended by itself."""

    def __init__(self, engine: Any, clock: Clock, *, keep: Callable[[int], int]) -> None:
        super().__init__(engine, clock)
        self._keep = keep

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Sample answers and remove their ends."""
        made = list(self._engine.generate(requests, sampling))
        return [self._cut(one) if self._clock.faulty else one for one in made]

    def _cut(self, one: Completion) -> Completion:
        if one.finish_reason != "stop":
            return one
        left = max(1, self._keep(len(one.token_ids)))
        text = self._engine._tokenizer.decode(one.token_ids[:left], skip_special_tokens=True)
        return replace(one, token_ids=one.token_ids[:left], logprobs=one.logprobs[:left], text=text)


class FastTrainer(Through):
    """Takes steps that are too large."""

    def __init__(self, engine: Any, clock: Clock, *, factor: float) -> None:
        super().__init__(engine, clock)
        self._factor = factor

    def optim_step(self, *, learning_rate: float) -> Metrics:
        """Update with a multiple of the learning rate."""
        return dict(self._engine.optim_step(learning_rate=learning_rate * (self._factor if self._clock.faulty else 1)))


class FlippedJudge(Through):
    """Negates the reward model's scores."""

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        """Score with the opposite sign."""
        sign = -1.0 if self._clock.faulty else 1.0
        return [sign * score for score in self._engine.scores(sequences)]


class BadRankTrainer(Through):
    """Has one rank of four with wrong log-probs, as from a damaged copy of the weights."""

    def logprobs(self, samples: Subset, *, temperature: float) -> NDArray[np.float32]:
        """Compute the log-probs, with noise on every fourth row."""
        values_S: NDArray[np.float32] = self._engine.logprobs(samples, temperature=temperature).copy()
        noise = np.random.default_rng(self._clock.step)
        for row in np.split(values_S, np.cumsum(samples.lengths)[:-1])[3::4] if self._clock.faulty else ():
            row -= np.abs(noise.normal(size=len(row))) * (row != 0)
        return values_S


# ---------------------------------------------------------------- the table of faults

Patch = Callable[[Clock], Any]


@dataclass(frozen=True)
class Fault:
    """A fault: how it breaks the sampler, a trainer by role, the rewards, or a function of the code."""

    sampler: Callable[[Any, Clock], Any] = CountingSampler
    trainers: Mapping[Role, Callable[[Any, Clock], Any]] = field(default_factory=dict)
    rewards: RewardsConfig | None = None
    patch: Patch = lambda clock: nullcontext()
    from_start: bool = False


def _k1_replaced(by: Callable[[Any, Any], Any]) -> Patch:
    @contextmanager
    def patched(clock: Clock) -> Iterator[None]:
        def estimator(logprobs: Any, ref_logprobs: Any) -> Any:
            return (by if clock.faulty else k1)(logprobs, ref_logprobs)

        with mock.patch("rlhf_core.training.experience.k1", estimator):
            yield

    return patched


def repeats(generations: Sequence[Generation]) -> list[float]:
    """Reward repeated words, a hack that a reward model may have learned."""
    texts = [row.completion.text.split() for row in generations]
    return [float(len(said) - len(set(said))) for said in texts]


HACKED = RewardsConfig(
    terms={"reward_model": RewardModelReward(), "hack": FunctionReward(function=f"{__name__}:repeats", timeout_s=600.0)}
)

FAULTS: Mapping[str, Fault] = {
    "learning rate x10": Fault(trainers={"policy": lambda engine, clock: FastTrainer(engine, clock, factor=10.0)}),
    "learning rate x100": Fault(trainers={"policy": lambda engine, clock: FastTrainer(engine, clock, factor=100.0)}),
    "stale weights": Fault(sampler=StaleSampler),
    "wrong chat template at sampling": Fault(sampler=WrongTemplateSampler),
    "dropped end token": Fault(sampler=lambda engine, clock: CutSampler(engine, clock, keep=lambda size: size - 1)),
    "truncated tails": Fault(sampler=lambda engine, clock: CutSampler(engine, clock, keep=lambda size: size // 2)),
    "temperature mismatch": Fault(sampler=OtherTemperatureSampler),
    "reward sign flip": Fault(trainers={"reward_model": FlippedJudge}),
    "KL estimator: the other direction": Fault(patch=_k1_replaced(lambda ours, theirs: k1(theirs, ours))),
    "KL estimator: k3 for k1": Fault(patch=_k1_replaced(k3)),
    "reward hack in the reward model": Fault(rewards=HACKED, from_start=True),
    "one bad rank": Fault(trainers={"policy": BadRankTrainer}),
}
