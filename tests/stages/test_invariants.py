"""Invariants of the whole loop that no single module owns; the others are listed in docs/algorithms.md."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.interfaces import ModelSpec, Sampler, Trainer, logprob_rows
from rlhf_core.types import SamplingRequest, TokenSample
from tests.support.policies import SHAPE
from tests.support.tolerances import of_model
from tests.support.workshop import workshop

FAST = OptimizerConfig(learning_rate=3e-3, schedule="constant")
SYNCS = 4


@contextmanager
def engines(folder: Path, tmp_path: Path) -> Iterator[tuple[Trainer, Sampler]]:
    shop = workshop(tmp_path)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=1)
    with shop.runtime.trainer("policy", spec, FAST) as trainer, shop.runtime.sampler(folder) as sampler:
        yield trainer, sampler


def mismatch(trainer: Trainer, sampler: Sampler) -> list[float]:
    """Return log pi_old - log mu of every token that the sampler draws from fixed seeds."""
    requests = [SamplingRequest((5, 6, 7, 8), seed=seed) for seed in range(8)]
    completions = sampler.generate(requests, SamplingConfig(max_tokens=8))
    samples = [
        TokenSample(r.prompt_ids + c.token_ids, (0,) * len(r.prompt_ids) + (1,) * len(c.token_ids))
        for r, c in zip(requests, completions, strict=True)
    ]
    rows = logprob_rows(trainer, samples)
    return [
        ours - theirs
        for row, completion in zip(rows, completions, strict=True)
        for ours, theirs in zip(row[4:], completion.logprobs, strict=True)
    ]


def test_at_learning_rate_0_nothing_drifts_however_often_the_weights_are_synced(tmp_path, policy):
    from rlhf_core.training.objectives.base import SftObjective

    with engines(policy, tmp_path) as (trainer, sampler):
        rows = [TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1))]
        seen = []
        for version in range(SYNCS):
            sampler.load_weights(trainer.weights(), version=version)
            seen.append(mismatch(trainer, sampler))
            trainer.forward_backward(rows, SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=0.0)
    assert max(abs(value) for value in seen[0]) < of_model(SHAPE) * math.log(SHAPE.vocab_size)
    assert all(values == seen[0] for values in seen)


def test_every_tensor_of_the_policy_arrives_in_the_sampler(tmp_path, policy):
    from rlhf_core.training.objectives.base import SftObjective

    with engines(policy, tmp_path) as (trainer, sampler):
        trainer.forward_backward([TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1))], SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-2)
        weights = trainer.weights()
        sampler.load_weights(weights, version=1)
        made: Any = sampler
        served = made._model.state_dict()
    assert weights.payload.keys() <= served.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in weights.payload.items())
