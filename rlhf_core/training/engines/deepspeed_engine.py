"""Implement the DeepSpeed engine with ZeRO stages 0 to 3, on one rank or several.

Importing this module imports DeepSpeed, which reads the variables of `deepspeed_setup.set_environment` then.

The trainer manages gradient accumulation (`managed_gradient_accumulation: false`): DeepSpeed does not scale losses by a
number of micro-batches, and reduces in `step`. It averages gradients over ranks, but losses are partial sums over
global denominators, so each loss is first multiplied by the number of ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import set_z3_leaf_module
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.utils.cpp_extension import get_default_build_root

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.training.adamw import ClippedAdamW, adamw, parameter_groups
from rlhf_core.training.distributed import join, largest, rank_and_world
from rlhf_core.training.engines.deepspeed_setup import deepspeed_config, one_at_a_time, quiet, remove_stale_locks
from rlhf_core.training.engines.offload import module_tensors, optimizer_tensors
from rlhf_core.training.engines.tensor_parallel import check_partition, partition_settings, sum_head_norms, whole_layers
from rlhf_core.training.engines.universal import load_universal
from rlhf_core.training.state import (
    copied,
    engine_settings,
    load_training_state,
    refuse_engine_settings,
    save_engine_settings,
    training_state,
)

T = TypeVar("T")
STATE_FILE = "training_state.pt"
ZERO_FOLDER = "zero"
ZERO_TAG = "state"


class DeepSpeedEngine:
    """An engine that trains `module` with DeepSpeed, or serves partitioned weights without an optimizer (ZeRO stage 3).

    In bfloat16, stage 0 runs as stage 1, where DeepSpeed accumulates gradients in float32.
    """

    def __init__(
        self, module: nn.Module, optimizer: OptimizerConfig | None, config: TrainerConfig, *, device: torch.device
    ) -> None:
        self.module = module
        self.device = device
        self.rank, self._world = rank_and_world()
        self._stage = max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage
        # All ranks that share their rows have the gradient of the same loss.
        self._parallel = config.tensor_parallel
        self._weight = self._world / (config.sequence_parallel * self._parallel)
        self._trained = optimizer is not None
        settings = deepspeed_config(optimizer, config, stage=self._stage)
        carrier: Any = _Carrier(module)
        if self._parallel > 1:
            check_partition(module, self._parallel, self._world)
            settings["tensor_parallel"] = partition_settings(self._parallel)
            carrier.config = module.config  # DeepSpeed reads the number of heads from it
        with quiet():
            if device.type == "cpu":
                _prepare_collectives(self._world)
            join()
            if self._stage == 3:
                _gather_heads_as_one(module)
            self._engine: Any = deepspeed.initialize(
                model=carrier,
                optimizer=None if optimizer is None else self._client_optimizer(optimizer, config),
                config=settings,
                dist_init_required=False,
            )[0]
        if self._parallel > 1:
            # This hook compares the arguments of the first forward pass on all ranks, but ours is a function.
            self._engine.first_dataloader_check.remove()
            sum_head_norms(module, deepspeed.utils.groups.get_tensor_model_parallel_group())

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """Return `compute(module)`, run in DeepSpeed's forward pass so that its hooks see the model and the loss."""
        visible, result = self._engine(compute)
        if isinstance(result, LossOutput):
            # ZeRO stage 3 returns other tensors than it received. The visible loss is the one to differentiate.
            return replace(result, loss=visible)  # type: ignore[return-value]
        return result

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`. Ranks are summed, except those that share their rows."""
        self._engine.backward(loss * self._weight)

    def step(self, learning_rate: float) -> float:
        """Reduce and clip the gradient, update the weights, clear the gradient and return its norm before clipping.

        The norm is infinite if the update was skipped.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def passes(self, wanted: int) -> int:
        """Return the maximum `wanted` of all ranks: ZeRO reduces in every pass (2, 3) or needs every gradient (1)."""
        return wanted if self._world == 1 else largest(wanted)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the whole weights in `module` on every rank inside this context."""
        parameters = list(self.module.parameters())
        whole = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None, enabled=self._stage == 3)
        layers = whole_layers(self.module) if self._parallel > 1 else contextlib.nullcontext()
        with whole, layers, _own_storage(parameters):
            yield

    def snapshot(self, folder: Path) -> dict[Path, Any]:
        """Return copies of trained weights and optimizer: rank 0's at stage 0 (ranks are equal), else DeepSpeed's."""
        if not self._trained:
            return {}
        if self.rank == 0:
            save_engine_settings(folder, self._settings())
        if self._stage == 0:
            whole = self.rank == 0
            return {folder / STATE_FILE: training_state(self.module, self._engine.optimizer)} if whole else {}
        states: dict[Path, Any] = {}
        with quiet(), _taking(self._engine, states):
            self._engine.save_checkpoint(str(folder / ZERO_FOLDER), tag=ZERO_TAG, exclude_frozen_parameters=True)
        return states

    def load(self, folder: Path) -> None:
        """Restore a saved `snapshot`, which may be from a different number of ranks.

        Raises TrainingError for a different ZeRO stage or, with tensor parallelism, a different number of ranks.
        """
        if not self._trained:
            return
        written = engine_settings(folder)
        split = "tensor_parallel" in self._settings() | written
        if written["zero_stage"] != self._stage or (split and written != self._settings()):
            raise refuse_engine_settings(written, self._settings())
        if self._stage == 0:
            load_training_state(folder / STATE_FILE, self.module, self._engine.optimizer)
            self._engine.zero_grad()
            return
        with quiet(), _weights_only():
            if written == self._settings():
                self._engine.load_checkpoint(str(folder / ZERO_FOLDER), tag=ZERO_TAG, load_module_strict=False)
            else:
                load_universal(self._engine, folder / ZERO_FOLDER, tag=ZERO_TAG, rank=self.rank)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weights or this rank's parts of them, gradients, and the optimizer states of a trained model."""
        yield from module_tensors(self.module)
        if self._stage == 3:
            yield from (parameter.ds_tensor.data for parameter in self.module.parameters())
        if self._trained:
            yield from optimizer_tensors(self._engine.basic_optimizer)
            if self._stage == 3:
                yield self._engine.optimizer.grad_partitions_flat_buffer  # kept from step to step

    def close(self) -> None:
        """Release the model and the optimizer. The process group stays for the next engine."""
        self._engine.destroy()
        self._engine = None
        self.module = nn.Module()

    def _settings(self) -> dict[str, int]:
        settings = {"zero_stage": self._stage, "workers": self._world}
        return settings | ({"tensor_parallel": self._parallel} if self._parallel > 1 else {})

    def _client_optimizer(self, optimizer: OptimizerConfig, config: TrainerConfig) -> torch.optim.AdamW:
        fused = not config.offload_optimizer
        if self._stage > 0:
            return adamw(self.module, optimizer, fused=fused)
        groups = parameter_groups(self.module, weight_decay=optimizer.weight_decay)
        return ClippedAdamW(groups, optimizer, fused=fused)


class _Carrier(nn.Module):
    """A module for DeepSpeed whose forward pass runs the computation of the objective with the model.

    The loss is also returned separately, because DeepSpeed looks for tensors in tuples but not in dataclasses.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> tuple[Tensor | None, Any]:
        result = compute(self.model)
        return (result.loss if isinstance(result, LossOutput) else None), result


def _gather_heads_as_one(module: nn.Module) -> None:
    """Make ZeRO 3 gather an LM head with inner layers (adapters) when the head is called, not when those layers are.

    The head computes its tokens in chunks, whose number differs between ranks (see `rlhf_core.models.head_pass`).
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None and list(head.children()):
        set_z3_leaf_module(head, True)


@cache
def _prepare_collectives(world: int) -> None:
    """Compile DeepSpeed's collectives for CPUs once per machine, even if a process was killed while compiling them.

    A single rank has nobody to exchange anything with, so it needs neither them nor the half minute of a C++ compiler.
    torch guards the compiler with a lock file. A killed process leaves it behind, and later ones wait for it forever.
    """
    if world == 1:
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(root / ".one-at-a-time"):
        remove_stale_locks(root)
        build_shm_op()


@contextmanager
def _taking(engine: Any, states: dict[Path, Any]) -> Iterator[None]:
    """Make DeepSpeed's `engine` put copies of what it would write into `states`, by file."""
    writer = engine.checkpoint_engine

    def take(state_dict: Any, path: str) -> None:
        states[Path(path)] = copied(state_dict)

    writer.save = take
    try:
        yield
    finally:
        del writer.save


@contextmanager
def _own_storage(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Move parameters out of ZeRO's flat buffers in this context. safetensors refuses to write parts of a buffer."""
    shared = [p for p in parameters if p.untyped_storage().nbytes() > p.numel() * p.element_size()]
    views = [parameter.data for parameter in shared]
    for parameter in shared:
        parameter.data = parameter.data.clone()
    try:
        yield
    finally:
        for parameter, view in zip(shared, views, strict=True):
            parameter.data = view


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make DeepSpeed's `torch.load` refuse to run code from a checkpoint, but allow its three plain value types."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
