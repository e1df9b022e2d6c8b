"""Run by test_offloaded.py: `python offloaded_program.py <policy> <folder> <stage> <dtype>`.

Trains with an offloaded optimizer, saves, goes on, and goes on from what was saved with a new engine. Prints JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample

ROWS = [TokenSample((5, 6, 7, 8, 9), (0, 1, 1, 1, 1)), TokenSample((9, 8, 7, 6), (0, 1, 1, 1))]


def train(trainer: LocalTrainer) -> float:
    objective = SftObjective(pack_to=None)
    made = trainer.forward_backward(ROWS, objective, objective.denominators(ROWS))
    trainer.optim_step(learning_rate=1e-3)
    return made["loss"]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for item in value.values() for one in tensors(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in tensors(item)]
    return []


def main() -> None:
    policy, folder, stage, dtype = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    config = TrainerConfig(zero_stage=stage, dtype=dtype, offload_optimizer=True)  # type: ignore[arg-type]
    spec, optimizer = ModelSpec(policy, "lm", None, 3), OptimizerConfig(learning_rate=1e-3)
    trainer = LocalTrainer(spec, optimizer, config)
    engine: Any = trainer._engine
    (folder / "unwritten").mkdir()
    made: dict[str, Any] = {"losses": [train(trainer), train(trainer)]}
    taken = tensors(engine.snapshot(folder / "unwritten"))
    moments = [one for state in engine._engine.basic_optimizer.state.values() for one in tensors(state)]
    addresses = {one.data_ptr() for one in taken}
    made["moments"] = len(moments)
    made["copied"] = sum(one.data_ptr() not in addresses for one in moments)
    made["of_one_number"] = sum(one.ndim == 0 for one in taken)
    trainer.save(folder / "saved")
    made["notes"] = [path.name for path in (folder / "saved").glob(".*")]
    made["losses"] += [train(trainer), train(trainer)]
    trainer.close()
    resumed = LocalTrainer(spec, optimizer, config)
    resumed.load(folder / "saved")
    made["resumed"] = [train(resumed), train(resumed)]
    sys.stdout.write("\n" + json.dumps(made) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
