"""Run by test_sequence_parallel.py: `python sequence_parallel_program.py <cases.pt> <out>` as two ranks that share rows or weights.

A case is a model, a trainer's settings, an objective and samples; what the trainer makes of them goes to
<out>/<case>_<rank>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.sequences import Sequences
from rlhf_core.training.state import rank_and_world
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.support.rounding import round_by_batch_if_asked

# A step far below the gradient's sign: Adam would turn the rounding of a tiny gradient into a whole step.
OPTIMIZER = OptimizerConfig(eps=1.0, weight_decay=0.01)


def trained(trainer: LocalTrainer, objective: Any, samples: list[Any]) -> list[dict[str, float]]:
    """Return what one optimizer step says."""
    made = trainer.forward_backward(samples, objective, objective.denominators(samples))
    return [made, trainer.optim_step(learning_rate=0.1)]


def made(spec: ModelSpec, config: TrainerConfig, objective: Any, samples: list[Any], folder: Path) -> dict[str, Any]:
    """Return what two optimizer steps say and leave behind, and what the second says when resumed from `folder`."""
    trainer = LocalTrainer(spec, OPTIMIZER, config)
    start = {name: tensor.clone() for name, tensor in trainer.weights().payload.items()}
    steps = trained(trainer, objective, samples)
    trainer.save(folder)
    trainer.weights()  # between two steps, as for a sampler
    steps += trained(trainer, objective, samples[3:])
    plain = Sequences.of([TokenSample(s.token_ids, s.loss_mask) for s in samples if hasattr(s, "token_ids")])
    values = trainer.values(plain) if spec.head == "value" else trainer.logprobs(plain, temperature=1.0)
    measured = [row.tolist() for row in plain.split(values)]
    weights = trainer.weights().payload
    trainer.close()
    again = LocalTrainer(spec, OPTIMIZER, config)
    again.load(folder)
    resumed = trained(again, objective, samples[3:])
    again.close()
    return {"steps": steps, "measured": measured, "weights": weights, "start": start, "resumed": resumed}


def main() -> None:
    round_by_batch_if_asked()
    cases, out = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    rank, _ = rank_and_world()
    for name, (spec, config, objective, samples) in cases.items():
        torch.save(made(spec, config, objective, samples, out / name), out / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main()
