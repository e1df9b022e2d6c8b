from __future__ import annotations

import threading
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.interfaces import Weights
from rlhf_core.runtime.handles import RaySampler, RayTrainer
from rlhf_core.runtime.sample_worker import SampleWorker
from rlhf_core.runtime.turns import Turns
from rlhf_core.runtime.weights import StoredWeights
from rlhf_core.types import SamplingRequest, TokenSample

REQUESTS = [SamplingRequest((1, 2), seed=7)]
SAMPLES = [TokenSample((1, 2, 3), (0, 1, 1))]


class Workers:
    """A `WorkerGroup` of one that writes down who was asked what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.actors = [None]
        self.broken = False
        self._name = name
        self._log = log

    def call(self, role: str, method: str, *arguments: Any) -> list[Any]:
        self._log.append(f"{self._name} {method}")
        return [(1, "digest")]

    def call_each(self, role: str, method: str, arguments: list[Any]) -> list[Any]:
        self._log.append(f"{self._name} {method}")
        return [[(0.0,)]] if method == "logprobs" else [[]]

    def call_first(self, role: str, method: str, *arguments: Any) -> None:
        self._log.append(f"{self._name} {method}")


def handles(log: list[str], *, sleeps: bool) -> tuple[RayTrainer, RaySampler]:
    """Return a trainer and a sampler that share a GPU."""
    train: Any = Workers("trainer", log)
    sample: Any = Workers("engine", log)
    turns = Turns(lambda: sample) if sleeps else Turns()
    trainer = RayTrainer(train, "policy", "policy-1", transfer="ipc", turns=turns)
    return trainer, RaySampler(sample, transfer="ipc", tensor_parallel=1, turns=turns)


def step(trainer: RayTrainer, sampler: RaySampler) -> None:
    sampler.generate(REQUESTS, SamplingConfig())
    trainer.logprobs(SAMPLES, temperature=1.0)
    trainer.optim_step(learning_rate=0.1)
    sampler.load_weights(trainer.weights(), version=1)
    sampler.advance([], SamplingConfig())


def test_an_engine_sleeps_while_models_train_and_wakes_to_take_weights_and_to_sample() -> None:
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True)
    step(trainer, sampler)
    step(trainer, sampler)
    once = [
        *("engine generate", "engine sleep", "trainer logprobs", "trainer optim_step", "trainer stage_weights"),
        *("engine wake", "trainer send_weights", "engine adopt", "engine advance"),
    ]
    assert log == once * 2


def test_an_engine_that_may_not_sleep_never_does() -> None:
    log: list[str] = []
    step(*handles(log, sleeps=False))
    assert not {"engine sleep", "engine wake"} & set(log)


def test_weights_from_host_memory_are_taken_awake() -> None:
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True)
    trainer.optim_step(learning_rate=0.1)
    sampler.load_weights(Weights(StoredWeights(()), "digest"), version=1)
    assert log == ["engine sleep", "trainer optim_step", "engine wake", "engine load_weights"]


def test_engines_that_are_gone_or_not_there_yet_are_not_put_to_sleep() -> None:
    log: list[str] = []
    gone: Any = Workers("engine", log)
    gone.broken = True
    for engines in (None, gone):
        with Turns(lambda engines=engines: engines).training():  # type: ignore[misc]
            pass
    assert log == []
    SampleWorker.sleep(SampleWorker(None, 1))  # type: ignore[arg-type]  # a worker that has opened nothing


def test_training_waits_until_the_sampling_is_over() -> None:
    order: list[str] = []
    log: list[str] = []
    workers: Any = Workers("engine", log)
    turns = Turns(lambda: workers)
    sampling = threading.Event()

    def train() -> None:
        sampling.wait(10)
        with turns.training():
            order.append("trained")

    thread = threading.Thread(target=train)
    thread.start()
    with turns.sampling():
        sampling.set()
        thread.join(0.2)
        order.append("sampled")
    thread.join(10)
    assert order == ["sampled", "trained"]
