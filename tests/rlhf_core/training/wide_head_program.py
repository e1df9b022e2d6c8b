"""Run by test_wide_head.py: `python wide_head_program.py <cases.pt> <out>`, as several ranks under ZeRO 3.

A case is a `Case`; what the trainers make of it goes to <out>/<case>_<rank>.pt. Every parameter is
partitioned, so each use of one is a collective call: ranks that do not make the same calls in the same order hang or abort.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.models import forward
from rlhf_core.models.piece_sizes import LOGPROB_ELEMENTS
from rlhf_core.training.state import rank_and_world
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.support.rounding import round_by_batch_if_asked

# A step far below the gradient's sign: Adam would turn the rounding of a tiny gradient into a whole step.
OPTIMIZER = OptimizerConfig(eps=1.0, weight_decay=0.01)
ELEMENTS = LOGPROB_ELEMENTS // 4
"""Logits that are computed at a time: a quarter, so that rows of a quarter of the length have as many chunks."""


@dataclass(frozen=True)
class Case:
    """What one model is trained and asked for: the samples of each step, and those that are measured at the end."""

    spec: ModelSpec
    config: TrainerConfig
    objective: Any
    steps: list[list[Any]]
    measured: list[TokenSample]
    frozen: bool = False


def made(case: Case) -> dict[str, Any]:
    """Return what each step says on this rank, what is measured of its share of the samples, and the weights."""
    rank, world = rank_and_world()
    trainer = LocalTrainer(case.spec, None if case.frozen else OPTIMIZER, case.config)
    start = {} if case.frozen else {name: tensor.clone() for name, tensor in trainer.weights().payload.items()}
    steps = []
    for samples in case.steps:
        counts = case.objective.denominators(samples)
        if case.frozen:
            steps.append([trainer.loss(samples[rank::world], case.objective, counts)])
            continue
        shard = trainer.forward_backward(samples[rank::world], case.objective, counts)
        steps.append([shard, trainer.optim_step(learning_rate=0.1)])
    # Between the passes with gradients and at their end: DeepSpeed notes the order of the modules and reads ahead.
    own = case.measured[rank::world]
    answers: dict[str, Any] = {"logprobs": logprob_rows(trainer, own, temperature=0.7)}
    if case.frozen:
        top = trainer.top_logprobs(own, k=3, temperature=1.0)
        answers["top"] = [torch.from_numpy(one.logprobs).double().tolist() for one in top]
    weights = {} if case.frozen else trainer.weights().payload
    if case.config.zero_stage == 3 and world > 1:
        answers["whole"] = most_whole_weights(trainer)
    trainer.close()
    return {"steps": steps, "weights": weights, "start": start, **answers}


def most_whole_weights(trainer: LocalTrainer) -> tuple[int, int]:
    """Return how many parameters are whole at the same time while the weights are streamed, at most, and of how many."""
    parameters = list(trainer._engine.module.parameters())
    counts = [sum(one.numel() > 0 for one in parameters) for _ in trainer.stream()]
    return max(counts), len(parameters)


def partition_everything() -> None:
    """Leave no parameter whole on every rank: DeepSpeed would keep those of less than 100,000 elements."""
    from rlhf_core.training.engines import deepspeed_engine

    usual = deepspeed_engine.deepspeed_config

    def without_persistence(*args: Any, **kwargs: Any) -> dict[str, Any]:
        settings = usual(*args, **kwargs)
        settings["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        return settings

    deepspeed_engine.deepspeed_config = without_persistence


def main() -> None:
    round_by_batch_if_asked()
    torch.set_num_threads(1)
    forward.LOGPROB_ELEMENTS = ELEMENTS
    partition_everything()
    cases, out = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    rank, _ = rank_and_world()
    for name, case in cases.items():
        torch.save(made(case), out / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main()
