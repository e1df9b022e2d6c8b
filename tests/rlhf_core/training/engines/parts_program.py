"""Run by test_parts.py: `python parts_program.py <cases.pt> <out> [until-killed | made-up-gpu]`, as several ranks.

Trains each model for two steps under ZeRO 3, read in parts and read whole by every rank, and writes what it saw to
<out>/<case>_<rank>.pt. A case with a `checkpoint` of the first step makes only the second step, in parts. Parameters are
released when their modules have run, as in large models: DeepSpeed would keep those of less than 100,000 elements.

With `until-killed`, trains each model in parts for one step, saves it to <out>/<case>, and begins the second step. Then it
makes the file <out>/begun_<rank>, and waits to be killed. With `made-up-gpu`, it trains in parts on a made-up device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch.multiprocessing.reductions import StorageWeakRef

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.sequences import Sequences
from rlhf_core.stage.checkpoints import wait_for_parts
from rlhf_core.training.engines import base, deepspeed_engine, deepspeed_setup
from rlhf_core.training.engines.base import open_engine
from rlhf_core.training.objectives.base import SftObjective, ValueObjective
from rlhf_core.training.state import rank_and_world
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.support.made_up_device import CUDA, made_up_device

OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
OBJECTIVES: dict[str, Any] = {"lm": SftObjective(pack_to=None), "value": ValueObjective(clip=None)}


def release_small_parameters(*arguments: Any, **options: Any) -> dict[str, Any]:
    settings = deepspeed_setup.deepspeed_config(*arguments, **options)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


deepspeed_engine.deepspeed_config = release_small_parameters


def rows(step: int) -> Sequences:
    """Four sequences of 12 tokens, with returns for a value model."""
    dice = np.random.default_rng(step)
    made = Sequences.of([TokenSample(dice.integers(10, 250, 12), (0, *(1,) * 11)) for _ in range(4)])
    returns = dice.normal(size=48).astype(np.float32)
    return made.with_fields(returns=returns, old_values=np.zeros(48, np.float32))


def opened(case: dict[str, Any]) -> tuple[LocalTrainer, Any]:
    spec = ModelSpec(case["folder"], case["head"], case["lora"], 3)
    config = TrainerConfig(zero_stage=3, dtype=case["dtype"], attention=case["attention"])
    engine = open_engine(spec, OPTIMIZER, config)
    return LocalTrainer(spec, OPTIMIZER, config, engine=engine), engine


def accumulate(trainer: LocalTrainer, case: dict[str, Any], step: int) -> float:
    """Accumulate the gradient of this rank's rows of a step, and give its part of the loss."""
    (rank, world), batch, objective = rank_and_world(), rows(step), OBJECTIVES[case["head"]]
    mine = batch.select(range(rank, 4, world))
    return trainer.forward_backward(mine, objective, objective.denominators(batch))["loss"]


def watch_stacks(engine: Any) -> list[list[bool]]:
    """For each backward pass that follows, whether each stack of experts of the forward passes before is still in memory."""
    gathered: list[StorageWeakRef] = []
    kept: list[list[bool]] = []
    for layer in engine.module.modules():
        for one in layer.parameters(recurse=False):
            if len(one.ds_shape) == 3:
                layer.register_forward_pre_hook(
                    lambda *_, one=one: gathered.append(StorageWeakRef(one.untyped_storage()))
                )
    run = engine.backward

    def backward(loss: torch.Tensor) -> None:
        kept.append([not one.expired() for one in gathered])
        run(loss)

    engine.backward = backward
    return kept


def trained(
    case: dict[str, Any], out: Path, is_there: Callable[[torch.Tensor], bool] = lambda _: True
) -> dict[str, Any]:
    trainer, engine = opened(case)
    history, kept = [], watch_stacks(engine)
    if case["checkpoint"]:
        trainer.load(Path(case["checkpoint"]))
    for step in (1,) if case["checkpoint"] else (0, 1):
        history.append((accumulate(trainer, case, step), trainer.optim_step(learning_rate=1e-2)["grad_norm"]))
    weights = {name: weight.clone() for name, weight in engine.stream()}
    buffers = {name: one.clone() for name, one in engine.module.named_buffers()}
    idle = sorted(name for name, one in engine.module.named_parameters() if ".lora_" in name and not one.requires_grad)
    leaves = len(getattr(engine._engine.optimizer, "leaf_parameters", ()))
    strays = [tuple(one.shape) for one in engine.tensors() if not is_there(one)]
    trainer.export(out)
    trainer.close()
    return {
        "history": history,
        "weights": weights,
        "buffers": buffers,
        "idle": idle,
        "leaves": leaves,
        "strays": strays,
        "kept": kept[0],
    }


def train_until_killed(cases: dict[str, Any], out: Path) -> None:
    trainers = []
    for name, case in cases.items():
        trainer, engine = opened(case)
        accumulate(trainer, case, 0)
        trainer.optim_step(learning_rate=1e-2)
        trainer.save(out / name)
        engine.stream().digest()  # all ranks have begun to write
        wait_for_parts(out / name)
        accumulate(trainer, case, 1)
        trainers.append(trainer)
    (out / f"begun_{rank_and_world()[0]}").touch()
    time.sleep(600)


def train_on_made_up_gpus(cases: dict[str, Any], out: Path) -> None:
    rank, world = rank_and_world()
    base.local_device = lambda: CUDA
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False  # compiled for collectives of CPUs
    accelerator = get_accelerator()
    accelerator.device_name = accelerator.current_device_name = lambda *_: "cuda:0"
    accelerator.on_accelerator = lambda tensor: tensor.is_cuda
    for name, case in cases.items():
        with made_up_device() as device:
            made = trained(case, out / f"{name}_parts_of_{world}", device.holds)
        torch.save({"parts": made}, out / f"{name}_{rank}.pt")


def train_both_ways(cases: dict[str, Any], out: Path) -> None:
    (rank, world), own, reasons = rank_and_world(), base.open_parts, []
    send, sent = comm.broadcast, []

    def broadcast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return send(tensor, *arguments, **options)

    comm.broadcast = broadcast

    def in_parts(*arguments: Any, **options: Any) -> Any:
        parts = own(*arguments, **options)
        reasons.append(parts is not None)
        return parts

    for name, case in cases.items():
        ways = {}
        for way, open_parts in (("parts", in_parts), ("whole", lambda *_, **__: None)):
            if way == "whole" and case["checkpoint"]:
                continue
            base.open_parts = open_parts
            sent.clear()
            ways[way] = trained(case, out / f"{name}_{way}_of_{world}") | {"sent": sum(sent)}
        torch.save({**ways, "in_parts": reasons[-1]}, out / f"{name}_{rank}.pt")


WAYS = {"until-killed": train_until_killed, "made-up-gpu": train_on_made_up_gpus}

if __name__ == "__main__":
    train = WAYS[sys.argv[3]] if sys.argv[3:] else train_both_ways
    train(torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2]))
