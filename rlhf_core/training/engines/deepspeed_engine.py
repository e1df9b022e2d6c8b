"""Implement the DeepSpeed engine with ZeRO stages 0 to 3, on one rank or several.

Importing this module imports DeepSpeed, so `open_engine` imports it only for a model that DeepSpeed holds, after
`deepspeed_setup.set_environment`.

The trainer manages gradient accumulation (`managed_gradient_accumulation: false`): DeepSpeed does not scale losses by a
number of micro-batches, and reduces in `step`. It averages gradients over ranks, but losses are partial sums over
global denominators, so each loss is first multiplied by the number of ranks.

Resume ZeRO from a checkpoint of a different number of ranks, through DeepSpeed's universal checkpoint.

Rank 0 converts the ranks' partitions to one folder per parameter, next to them, and every rank reads its part of each.
"""

import contextlib
import io
import math
import os
from argparse import Namespace
from collections import OrderedDict
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
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from transformers.integrations import HfDeepSpeedConfig

from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.models.lora import WeightStream, adapted_stacks
from rlhf_core.models.parameter_sources import OpenFiles, ParameterSource
from rlhf_core.store.layout import remove_tree
from rlhf_core.training.adamw import ClippedAdamW, adamw, parameter_groups
from rlhf_core.training.engines.deepspeed_setup import deepspeed_config, quiet
from rlhf_core.training.engines.offload import module_tensors, optimizer_tensors
from rlhf_core.training.engines.tensor_parallel import check_partition, partition_settings, sum_head_norms, whole_layers
from rlhf_core.training.state import (
    copy_tensors,
    engine_settings,
    join,
    keep_in_memory,
    largest,
    load_state,
    load_training_state,
    on_first_rank,
    rank_and_world,
    refuse_engine_settings,
    save_engine_settings,
    training_state,
)

# ---------------------------------------------------------------- universal

_FOLDER = "universal"


def load_universal(engine: Any, folder: Path, *, tag: str, rank: int) -> None:
    """Load the checkpoint `tag` of `folder` into DeepSpeed's `engine`. Every rank must call it with the same folder.

    `folder` needs disk space for a second copy until all ranks have read it.
    """
    universal = folder / _FOLDER

    def convert() -> None:
        remove_tree(universal)
        _convert(folder / tag, universal / tag)

    on_first_rank(convert)
    config = engine._config  # meant to be set before an engine is made, but the checkpoint is known only now
    config.load_universal_checkpoint = True
    try:
        with _own_groups_and_steps(engine.optimizer.optimizer):
            engine.load_checkpoint(str(universal), tag=tag, load_module_strict=False)
    finally:
        config.load_universal_checkpoint = False
    dist.barrier()
    if rank == 0:
        remove_tree(universal)


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
        sources: Mapping[str, ParameterSource] | None = None,
        prepare: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        """With `sources` (stage 3), partition parameters on the meta device, fill them from there, and then `prepare` the
        module: add adapters, for example.
        """
        self.module = module
        self.device = device
        self.rank, self._world = rank_and_world()
        self._stage = max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage
        # All ranks that share their rows have the gradient of the same loss.
        self._parallel = config.tensor_parallel
        self._weight = self._world / (config.sequence_parallel * self._parallel)
        self._trained = optimizer is not None
        self.writes_in_place = self._trained and config.offload_optimizer
        self._stream: WeightStream | None = None
        with quiet():
            if device.type == "cpu":
                # Its collectives for CPUs take a C++ compiler minutes on each node, and are for ranks that a launcher of
                # DeepSpeed's own has put on one (LOCAL_SIZE); torch reduces without them.
                deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
            join()
            if sources is not None:
                partition(module, deepspeed_config(None, config, stage=self._stage, trained=0), device=device)
                fill(module, sources, rank=self.rank)
                prepare(module)
        parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
        settings = deepspeed_config(optimizer, config, stage=self._stage, trained=trained)
        carrier: Any = _Carrier(module)
        if self._parallel > 1:
            check_partition(module, self._parallel, self._world)
            settings["tensor_parallel"] = partition_settings(self._parallel)
            carrier.config = module.config  # DeepSpeed reads the number of heads from it
        with quiet():
            if self._stage == 3:
                _gather_as_one(module)
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
        """Call `compute(module)` in DeepSpeed's forward pass so that its hooks see the model and the loss."""
        with saved_tensors_hooks(save_view, make_view) if self._stage == 3 else contextlib.nullcontext():
            visible, result = self._engine(compute)
        if isinstance(result, LossOutput):
            # ZeRO stage 3 returns other tensors than it received. The visible loss is the one to differentiate.
            return replace(result, loss=visible)  # type: ignore[return-value]
        return result

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`. Ranks are summed, except ranks that share their rows."""
        self._engine.backward(loss * self._weight)  # DeepSpeed divides by the number of ranks

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def passes(self, wanted: int) -> int:
        """The maximum `wanted` of all ranks: ZeRO reduces in every pass (2, 3) or needs every gradient (1)."""
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
        """Run `check(module)` without gradients on a model of ZeRO stage 3.

        Its passes differ from the passes of training. DeepSpeed would expect their order in all later passes, and
        gather and keep weights for it.
        """
        optimizer = self._engine.optimizer
        with torch.no_grad(), suspend_leaf_hooks(optimizer):
            self.forward(check)
        (optimizer.parameter_offload if self._trained else optimizer).get_param_coordinator()._invalidate_trace()
        optimizer.empty_partition_cache()

    def snapshot(self, folder: Path) -> dict[Path, Any]:
        """Copy trained weights and optimizer: rank 0's at stage 0 (ranks are equal), else DeepSpeed's.

        Offloaded states are not copied: host memory would have to hold them twice.
        """
        if not self._trained:
            return {}
        if self.rank == 0:
            save_engine_settings(folder, self._settings())
        if self._stage == 0:
            whole = self.rank == 0
            return {folder / STATE_FILE: training_state(self.module, self._engine.optimizer)} if whole else {}
        states: dict[Path, Any] = {}
        to_take = _replace(
            self._engine.checkpoint_engine,
            save=lambda state_dict, path: states.update(
                {Path(path): copy_tensors(state_dict, in_place=self.writes_in_place)}
            ),
        )
        with quiet(), to_take:
            self._engine.save_checkpoint(str(folder / ZERO_FOLDER), tag=ZERO_TAG, exclude_frozen_parameters=True)
        return states

    def load(self, folder: Path) -> None:
        """Restore a saved `snapshot`, which may be from a different number of ranks.

        Raises TrainingError for a different ZeRO stage or, with tensor parallelism, a different number of ranks.
        """
        if not self._trained:
            return
        written, own = engine_settings(folder), self._settings()
        split = "tensor_parallel" in own | written
        if written["zero_stage"] != self._stage or (split and written != own):
            raise refuse_engine_settings(written, own)
        if self._stage == 0:
            load_training_state(folder / STATE_FILE, self.module, self._engine.optimizer)
            self._engine.zero_grad()
            return
        # DeepSpeed copies the tensors of its files, which are therefore mapped instead of read whole.
        to_map = _replace(self._engine.checkpoint_engine, load=lambda path, map_location=None: load_state(Path(path)))
        with quiet(), _weights_only(), to_map:
            if written == own:
                self._engine.load_checkpoint(str(folder / ZERO_FOLDER), tag=ZERO_TAG, load_module_strict=False)
            else:
                load_universal(self._engine, folder / ZERO_FOLDER, tag=ZERO_TAG, rank=self.rank)
        keep_in_memory(self._engine.basic_optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weights or this rank's parts of them, gradients, and the optimizer states of a trained model."""
        yield from module_tensors(self.module)
        if self._stage == 3:
            module: Any = self.module
            yield from (one.ds_tensor.data for one in module.parameters())  # ZeRO adds `ds_tensor`
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
    """Divide each parameter on the meta device among the ranks, without values, one at a time; move the buffers.

    All get the dtype of the settings, to which DeepSpeed casts a whole model: some routers have float32 weights.
    """
    zero: Any = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings)
    made: dict[int, Any] = {}
    for layer in module.modules():
        for name, buffer in list(layer.named_buffers(recurse=False)):
            setattr(layer, name, buffer.to(device))
        for name, meta in list(layer.named_parameters(recurse=False)):
            if meta.is_meta and id(meta) not in made:
                one: Any = nn.Parameter(
                    torch.empty(meta.shape, dtype=zero.dtype, device=device), requires_grad=meta.requires_grad
                )
                # The public `convert_to_zero_parameters` would first send the values of rank 0 to all others.
                zero._convert_to_deepspeed_param(one)
                one.partition()
                made[id(meta)] = one
            if meta.is_meta:
                setattr(layer, name, made[id(meta)])  # tied ones stay so


READ_ELEMENTS = 2**24
"""Elements that `fill` reads at once, so that a large stack of experts is not twice in memory."""


@torch.no_grad()
def fill(module: nn.Module, sources: Mapping[str, ParameterSource], *, rank: int) -> None:
    """Read this rank's part of every parameter of `sources`, rounded to the parameter's dtype."""
    parameters: dict[str, Any] = dict(module.named_parameters())  # ZeRO adds `ds_tensor` and the size of the whole
    with OpenFiles() as files:
        for name, source in sources.items():
            whole, part = parameters[name].ds_numel, parameters[name].ds_tensor
            begin, end = (min(index * part.ds_numel, whole) for index in (rank, rank + 1))
            for low in range(begin, end, READ_ELEMENTS):
                high = min(end, low + READ_ELEMENTS)
                part.data[low - begin : high - begin].copy_(source.read(files, low, high))


def save_view(saved: Tensor) -> Any:
    """Save a view of a partitioned parameter for the backward pass without its storage.

    ZeRO 3 gathers a parameter for the forward pass of its module and then releases it. A view, such as the transposed stack of
    experts that `grouped_mm` saves, would keep all of them in memory until the backward pass, which gathers them again.
    For linear layers DeepSpeed has its own function.
    """
    if hasattr(saved._base, "ds_id"):
        return saved._base, saved.size(), saved.stride(), saved.storage_offset()
    return saved if saved.is_leaf else saved.detach()  # an operation may save its own output: a reference cycle


def make_view(saved: Any) -> Tensor:
    """The tensor that `save_view` has saved, whose parameter is gathered again."""
    return saved if isinstance(saved, Tensor) else torch.as_strided(*saved)


@contextmanager
def gather_on_call(module: nn.Module) -> Iterator[None]:
    """Gather the partitioned parameters of one layer at a time while `module` runs, before there is an engine.

    All ranks must run it on the same tokens. A layer is gathered as a whole because some compute with the weight of an
    inner module without calling it (Mamba).
    """
    hooks = []
    for unit, tensors in _gathered_units(module):
        parts: list[Any] = [one for one in tensors if hasattr(one, "ds_id")]
        if parts:
            hooks.append(
                unit.register_forward_pre_hook(lambda *_, parts=parts: parts[0].all_gather(param_list=parts) and None)
            )
            hooks.append(unit.register_forward_hook(lambda *_, parts=parts: parts[0].partition(param_list=parts)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _gathered_units(module: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, list(layer.parameters())) for layer in child)
        else:
            yield from _gathered_units(child)


@contextmanager
def let_peft_gather(config: TrainerConfig) -> Iterator[None]:
    """Make peft gather the partitioned weights that it computes with inside this context: the norms of DoRA.

    peft asks transformers whether ZeRO 3 is in use, and transformers looks for a living `HfDeepSpeedConfig`.
    """
    alive = HfDeepSpeedConfig(deepspeed_config(None, config, stage=3, trained=0))
    try:
        yield
    finally:
        del alive


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


def _gather_as_one(module: Any) -> None:
    """Make ZeRO 3 gather an LM head with inner layers (adapters) when the head is called, not when those layers are.

    The head computes its tokens in chunks, whose number differs between ranks (see `rlhf_core.models.forward`). Experts with
    adapters read the weights of their inner layers before they call any.
    """
    for experts in adapted_stacks(module):
        set_z3_leaf_module(experts, True)
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None and list(head.children()):
        set_z3_leaf_module(head, True)


@contextmanager
def suspend_leaf_hooks(optimizer: Any) -> Iterator[None]:
    """Keep DeepSpeed from reducing gradients of leaf modules inside this context.

    DeepSpeed makes the experts of Qwen and Mixtral leaf modules. Their hooks fire in any backward pass, also in one for the
    gradient of an activation alone, and the next reduction would fail because it has their parameters twice.
    """
    hooks = {leaf: leaf._backward_hooks for leaf in getattr(optimizer, "leaf_parameters", ())}
    for leaf in hooks:
        leaf._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for leaf, kept in hooks.items():
            leaf._backward_hooks = kept


@contextmanager
def _replace(owner: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one object inside this context."""
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)


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
