"""Two DeepSpeed ranks behind one handle give what one rank gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import HFSamplerConfig, OptimizerConfig, RuntimeConfig, SamplingConfig, TrainerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import ModelSpec, Trainer, Weights
from rlhf_core.runtime.handles import RaySampler, RayTrainer
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import SamplingRequest, TokenSample

pytestmark = pytest.mark.engine
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

# Seven samples of unequal lengths: the ranks get four and three, and different numbers of tokens.
SAMPLES = [TokenSample(tuple(range(10, 16 + 3 * i)), (0, 0) + (1,) * (4 + 3 * i)) for i in range(7)]
HF = HFSamplerConfig()


@pytest.fixture(scope="module")
def trainers(policies: tuple[Path, Path]) -> Iterator[tuple[Trainer, Trainer]]:
    """The same policy on two ranks of DeepSpeed and in this process."""
    two = RayRuntime(
        RuntimeConfig(
            train_workers=2, cpu_threads=1, worker_timeout_s=400, trainer=TrainerConfig(micro_batch=2), sampler=HF
        )
    )
    one = LocalRuntime(RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HF))
    spec = ModelSpec(str(policies[0]), "lm", None, 0)
    with contextlib.closing(two), two.trainer("policy", spec, OptimizerConfig()) as ranks:
        assert two.engines().keys() == {"ray", "torch", "transformers", "deepspeed"}
        with one.trainer("policy", spec, OptimizerConfig()) as alone:
            yield ranks, alone


def test_results_per_sample_come_back_in_order(trainers: tuple[Trainer, Trainer]) -> None:
    ranks, alone = (trainer.logprobs(SAMPLES, temperature=1.0) for trainer in trainers)
    for got, expected in zip(ranks, alone, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)


def test_the_likeliest_tokens_come_back_in_order(trainers: tuple[Trainer, Trainer]) -> None:
    ranks, alone = (trainer.top_logprobs(SAMPLES, k=3, temperature=1.0) for trainer in trainers)
    for got, expected in zip(ranks, alone, strict=True):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert got.ids[:, 0].tolist() == expected.ids[:, 0].tolist()


def test_steps_on_two_ranks_are_steps_on_the_whole_batch(trainers: tuple[Trainer, Trainer]) -> None:
    for _ in range(3):
        for name in ("forward_backward", "loss"):
            ranks, alone = (getattr(trainer, name)(SAMPLES, SftObjective(pack_to=None)) for trainer in trainers)
            assert ranks == pytest.approx(alone, rel=1e-4)
        ranks, alone = (trainer.optim_step(learning_rate=1e-3) for trainer in trainers)
        assert ranks == pytest.approx(alone, rel=1e-4)


def test_weights_of_another_runtime_are_refused() -> None:
    sampler = RaySampler(None, transfer="", tensor_parallel=1)  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match=r"weights\.payload = 'dict': does not come from this runtime's trainer"):
        sampler.load_weights(Weights({}, ""), version=1)


class Engines:
    """Two engines that finish the oldest of what they were given."""

    def __init__(self) -> None:
        self.actors = [None, None]
        self.given: list[list[int]] = [[], []]

    def call_each(self, role: str, method: str, arguments: list[tuple[Any, ...]]) -> list[list[tuple[int, str]]]:
        assert (role, method) == ("policy", "advance")
        for own, (new, _) in zip(self.given, arguments, strict=True):
            own += [number for number, _ in new]
        return [[(own.pop(0), "done")] if own else [] for own in self.given]


def test_a_new_request_goes_to_the_engine_with_the_fewest() -> None:
    engines = Engines()
    sampler = RaySampler(engines, transfer="", tensor_parallel=1)  # type: ignore[arg-type]
    request, sampling = SamplingRequest((1,), 7), SamplingConfig()
    assert [number for number, _ in sampler.advance([(n, request) for n in range(5)], sampling)] == [0, 1]
    assert engines.given == [[2, 4], [3]]
    sampler.advance([(5, request)], sampling)
    assert engines.given == [[4], [5]]
    assert [number for number, _ in sampler.advance([], sampling)] == [4, 5]
    assert sampler.advance([], sampling) == []


def test_ranks_that_share_rows_get_the_same_samples_and_one_answers() -> None:
    class FourWorkers:
        actors = range(4)

        def call_each(self, role: str, method: str, arguments: list[Any]) -> list[Any]:
            assert arguments[0][:2] == arguments[1][:2] and arguments[2][:2] == arguments[3][:2]
            assert sorted(len(arguments[rank][1]) for rank in (0, 2)) == [3, 4]
            if method == "forward_backward":
                return [{"loss": float(len(each[1]))} for each in arguments]
            return [[(float(len(sample.token_ids)),) for sample in each[1]] for each in arguments]

    trainer = RayTrainer(FourWorkers(), "policy", "policy-0", transfer="", ranks_per_share=2)  # type: ignore[arg-type]
    assert trainer.forward_backward(SAMPLES, SftObjective(pack_to=None)) == {"loss": 7.0}
    assert trainer.values(SAMPLES) == [(float(len(sample.token_ids)),) for sample in SAMPLES]


def test_the_ranks_get_scalars_by_name_and_samples_may_be_named_too() -> None:
    asked: list[Any] = []

    class OneWorker:
        actors = (None,)

        def call_each(self, role: str, method: str, arguments: list[Any], **keywords: Any) -> list[Any]:
            asked.append((method, arguments, keywords))
            return [[(0.0,)] * len(arguments[0][1])]

    trainer = RayTrainer(OneWorker(), "policy", "policy-0", transfer="")  # type: ignore[arg-type]
    assert trainer.top_logprobs(SAMPLES[:2], k=3, temperature=0.5) == [(0.0,)] * 2
    assert trainer.logprobs(samples=SAMPLES[:2], temperature=0.5) == [(0.0,)] * 2
    assert [(method, keywords) for method, _, keywords in asked] == [
        ("top_logprobs", {"k": 3, "temperature": 0.5}),
        ("logprobs", {"temperature": 0.5}),
    ]
    with pytest.raises(TypeError, match="temperature"):
        trainer.logprobs(SAMPLES)  # type: ignore[call-arg]
