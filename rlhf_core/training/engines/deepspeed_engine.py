"""Implement the DeepSpeed engine with ZeRO stages 0 to 3, on one rank or several.

Importing this module imports DeepSpeed, which reads the variables of `deepspeed_setup.set_environment` then.

The trainer manages gradient accumulation (`managed_gradient_accumulation: false`): DeepSpeed does not scale losses by a
number of micro-batches, and reduces in `step`. It averages gradients over ranks, but losses are partial sums over
global denominators, so each loss is first multiplied by the number of ranks.

Resume ZeRO from a checkpoint of a different number of ranks, through DeepSpeed's universal checkpoint.

Rank 0 converts the ranks' partitions to one folder per parameter, beside them, and every rank reads its part of each.
"""

import contextlib
import io
import logging
import math
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import set_z3_leaf_module
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.lora import WeightStream
from rlhf_core.models.weight_files import Place
from rlhf_core.store.layout import remove_tree
from rlhf_core.training.adamw import ClippedAdamW, adamw, parameter_groups
from rlhf_core.training.engines.offload import module_tensors, optimizer_tensors
from rlhf_core.training.engines.tensor_parallel import check_partition, partition_settings, sum_head_norms, whole_layers
from rlhf_core.training.memory import BUCKET
from rlhf_core.training.state import (
    copied,
    engine_settings,
    join,
    keep_in_memory,
    largest,
    load_state,
    load_training_state,
    rank_and_world,
    refuse_engine_settings,
    save_engine_settings,
    training_state,
)

# ---------------------------------------------------------------- deepspeed setup

logger = logging.getLogger(__name__)


def set_environment(device: torch.device) -> None:
    """Set the variables that DeepSpeed reads when it is imported."""
    # Without it, DeepSpeed probes for the accelerator. The launcher's variable is required even without a launcher.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's start-up messages (prints, and its own logger on stdout), but not errors."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def deepspeed_config(
    optimizer: OptimizerConfig | None, config: TrainerConfig, *, stage: int, trained: int
) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a number of trained parameters.

    Raises ConfigError for offloading at stage 0, which partitions nothing.
    """
    zero: dict[str, Any] = {"stage": stage}
    if trained:
        zero["reduce_bucket_size"] = min(BUCKET, 2 * trained)
    if config.offload_optimizer:
        if stage == 0:
            key, remedy = "runtime.trainer.offload_optimizer", "set zero_stage to 1, 2 or 3"
            raise ConfigError(key, True, "ZeRO stage 0 keeps the optimizer on its device", remedy)
        # A GPU reads and writes pinned memory at several times the rate of any other.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings: dict[str, Any] = {
        # The trainer sets batch sizes. DeepSpeed only requires consistent numbers.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        # Stage 0 in float32 does not check for a non-finite gradient, so the optimizer clips and checks there.
        "gradient_clipping": 0.0 if stage == 0 or optimizer is None else optimizer.max_grad_norm,
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if config.fp32_reduce:
            settings["communication_data_type"] = "fp32"
    return settings


# ---------------------------------------------------------------- universal

_FOLDER = "universal"


def load_universal(engine: Any, folder: Path, *, tag: str, rank: int) -> None:
    """Load the checkpoint `tag` of `folder` into DeepSpeed's `engine`. Every rank must call it with the same folder.

    `folder` needs disk space for a second copy until all ranks have read it.
    """
    universal = folder / _FOLDER
    if rank == 0:
        remove_tree(universal)
        _convert(folder / tag, universal / tag)
    dist.barrier()
    with _own_groups_and_steps(engine.optimizer.optimizer):
        _load(engine, universal, tag)
    dist.barrier()
    if rank == 0:
        remove_tree(universal)


def _load(engine: Any, universal: Path, tag: str) -> None:
    config = engine._config  # meant to be set before an engine is made, but the checkpoint is known only now
    config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(universal), tag=tag, load_module_strict=False)
    finally:
        config.load_universal_checkpoint = False


@contextmanager
def _own_groups_and_steps(optimizer: Optimizer) -> Iterator[None]:
    """Restore parameter groups and step counters, since stage 3 gives all groups the weight decay of the first and one
    shared step counter.

    Every group would increment the shared counter in every step.
    """
    kept = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)
    for state in [state for state in optimizer.state.values() if "step" in state]:
        state["step"] = state["step"].clone()


def _convert(partitions: Path, universal: Path) -> None:
    settings = Namespace(
        input_folder=str(partitions),
        output_folder=str(universal),
        # Use this process, because every child process would import torch again.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # The state that it calls missing concerns tensor parallelism, which is not used here.
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(settings)


# ---------------------------------------------------------------- Implement the DeepSpeed engine with ZeRO stages 0 to 3, on one rank or several

T = TypeVar("T")
STATE_FILE = "training_state.pt"
ZERO_FOLDER = "zero"
ZERO_TAG = "state"


class DeepSpeedEngine:
    """An engine that trains `module` with DeepSpeed, or serves partitioned weights without an optimizer (ZeRO stage 3).

    In bfloat16, stage 0 runs as stage 1, where DeepSpeed accumulates gradients in float32.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig | None,
        config: TrainerConfig,
        *,
        device: torch.device,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        """With `places`, parameters on the meta device are filled from there, part by part (stage 3)."""
        self.module = module
        self.device = device
        self.rank, self._world = rank_and_world()
        self._stage = max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage
        # All ranks that share their rows have the gradient of the same loss.
        self._parallel = config.tensor_parallel
        self._weight = self._world / (config.sequence_parallel * self._parallel)
        self._trained = optimizer is not None
        self._stream: WeightStream | None = None
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        settings = deepspeed_config(optimizer, config, stage=self._stage, trained=trained)
        carrier: Any = _Carrier(module)
        if self._parallel > 1:
            check_partition(module, self._parallel, self._world)
            settings["tensor_parallel"] = partition_settings(self._parallel)
            carrier.config = module.config  # DeepSpeed reads the number of heads from it
        with quiet():
            if device.type == "cpu":
                # Its collectives for CPUs take a C++ compiler minutes on each node, and are for ranks that a launcher of
                # DeepSpeed's own has put on one (LOCAL_SIZE); torch reduces without them.
                deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
            join()
            if places is not None:
                partition(module, settings, device=device)
                fill(module, places, rank=self.rank)
            if self._stage == 3:
                _gather_heads_as_one(module)
            self._engine: Any = deepspeed.initialize(
                model=carrier,
                optimizer=None if optimizer is None else self._client_optimizer(optimizer),
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
        self._engine.backward(loss * self._weight)  # DeepSpeed divides by the number of ranks

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def passes(self, wanted: int) -> int:
        """Return the maximum `wanted` of all ranks: ZeRO reduces in every pass (2, 3) or needs every gradient (1)."""
        return wanted if self._world == 1 else largest(wanted)

    def stream(self) -> WeightStream:
        if self._stream is None:
            self._stream = WeightStream(self.module, whole=self._whole)
            if self._parallel > 1:
                self._stream.measure()  # an AutoTP layer does not keep the shape of its whole weight
        if self._stage == 3:
            self._engine.optimizer.empty_partition_cache()  # passes without gradients may leave weights gathered
        return self._stream

    def try_out(self, check: Callable[[nn.Module], None]) -> None:
        """Run `check(module)` without gradients, whose passes are not those of training, with a model of ZeRO stage 3.

        DeepSpeed would take their order for that of all later passes, and gather and keep weights for it.
        """
        with torch.no_grad():
            self.forward(check)
        optimizer = self._engine.optimizer
        (optimizer.parameter_offload if self._trained else optimizer).get_param_coordinator()._invalidate_trace()
        optimizer.empty_partition_cache()

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
        with quiet(), _weights_only(), _mapping(self._engine):
            if written == self._settings():
                self._engine.load_checkpoint(str(folder / ZERO_FOLDER), tag=ZERO_TAG, load_module_strict=False)
            else:
                load_universal(self._engine, folder / ZERO_FOLDER, tag=ZERO_TAG, rank=self.rank)
        keep_in_memory(self._engine.basic_optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weights or this rank's parts of them, gradients, and the optimizer states of a trained model."""
        yield from module_tensors(self.module)
        if self._stage == 3:
            parts: list[Any] = list(self.module.parameters())  # ZeRO adds `ds_tensor`
            yield from (part.ds_tensor.data for part in parts)
        if self._trained:
            yield from optimizer_tensors(self._engine.basic_optimizer)
            if self._stage == 3:
                yield self._engine.optimizer.grad_partitions_flat_buffer  # kept from step to step

    def close(self) -> None:
        self._engine.destroy()  # the process group stays for the next engine
        self._engine = self._stream = None
        self.module = nn.Module()

    @contextmanager
    def _whole(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Make `tensors` whole on every rank inside this context, for reading only."""
        gathered = deepspeed.zero.GatheredParameters(tensors, modifier_rank=None, enabled=self._stage == 3)
        with gathered, whole_layers(self.module, tensors) if self._parallel > 1 else contextlib.nullcontext():
            yield

    def _settings(self) -> dict[str, int]:
        settings = {"zero_stage": self._stage, "workers": self._world}
        return settings | ({"tensor_parallel": self._parallel} if self._parallel > 1 else {})

    def _client_optimizer(self, optimizer: OptimizerConfig) -> torch.optim.AdamW:
        # Fused on CPUs, too, where offloaded states are updated: as fast as DeepSpeedCPUAdam, which takes minutes to compile.
        if self._stage > 0:
            return adamw(self.module, optimizer, fused=True)
        groups = parameter_groups(self.module, weight_decay=optimizer.weight_decay)
        return ClippedAdamW(groups, optimizer, fused=True)


def partition(module: nn.Module, settings: dict[str, Any], *, device: torch.device) -> None:
    """Give each parameter on the meta device memory and divide it among the ranks, one layer at a time; move the buffers."""
    made: dict[int, nn.Parameter] = {}
    first: Any = None
    for layer in module.modules():
        for name, buffer in list(layer.named_buffers(recurse=False)):
            setattr(layer, name, buffer.to(device))
        for name, meta in list(layer.named_parameters(recurse=False)):
            if not meta.is_meta:
                continue
            if id(meta) not in made:
                empty = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                made[id(meta)] = nn.Parameter(empty, requires_grad=meta.requires_grad)
                del empty
                holder = nn.Module()
                holder.weight = made[id(meta)]
                if first is None:
                    deepspeed.zero.Init(module=holder, config_dict_or_path=settings, dtype=meta.dtype)
                    first = holder.weight
                else:
                    first.convert_to_zero_parameters(param_list=[holder.weight])
            setattr(layer, name, made[id(meta)])  # tied ones stay so


@torch.no_grad()
def fill(module: nn.Module, places: Mapping[str, Place], *, rank: int) -> None:
    """Read this rank's part of every parameter of `places`, rounded to the parameter's dtype."""
    parameters: dict[str, Any] = dict(module.named_parameters())  # ZeRO adds `ds_tensor` and the size of the whole
    for name, place in places.items():
        whole, part = parameters[name].ds_numel, parameters[name].ds_tensor
        begin, end = (min(index * part.ds_numel, whole) for index in (rank, rank + 1))
        if begin < end:
            part.data[: end - begin].copy_(place.read(begin, end))


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


def _gather_heads_as_one(module: Any) -> None:
    """Make ZeRO 3 gather an LM head with inner layers (adapters) when the head is called, not when those layers are.

    The head computes its tokens in chunks, whose number differs between ranks (see `rlhf_core.models.forward`).
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None and list(head.children()):
        set_z3_leaf_module(head, True)


@contextmanager
def _taking(engine: Any, states: dict[Path, Any]) -> Iterator[None]:
    """Make DeepSpeed's `engine` put copies of its checkpoint files into `states`, by file."""
    writer = engine.checkpoint_engine

    def take(state_dict: Any, path: str) -> None:
        states[Path(path)] = copied(state_dict)

    writer.save = take
    try:
        yield
    finally:
        del writer.save


@contextmanager
def _mapping(engine: Any) -> Iterator[None]:
    """Make DeepSpeed's `engine` map the files of a checkpoint, whose tensors it copies, in place of reading them whole."""
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: load_state(Path(path))
    try:
        yield
    finally:
        del reader.load


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
