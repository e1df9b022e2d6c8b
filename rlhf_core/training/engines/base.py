"""Define the engine interface of the trainer: forward, backward, step, and a state that can be saved.

An engine owns one model on this rank and, unless the model is frozen, its optimizer.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig, check_lora
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.forward import backbone_of, check_routers, compute_in_float32
from rlhf_core.models.loading import (
    check_computation,
    check_kernels,
    checkpoint_activations,
    load_model,
    use_liger,
    without_dropout,
)
from rlhf_core.models.lora import WeightStream, apply_lora, check_adapters
from rlhf_core.models.parts import open_parts
from rlhf_core.training.adamw import ClippedAdamW, parameter_groups
from rlhf_core.training.engines.deepspeed_setup import quiet, set_environment
from rlhf_core.training.engines.offload import module_tensors, optimizer_tensors
from rlhf_core.training.sequence_parallel import spread_rows
from rlhf_core.training.state import load_training_state, local_device, rank_and_world, training_state

# ---------------------------------------------------------------- Implement the plain engine: one process, torch autograd, clipped AdamW

T = TypeVar("T")
STATE_FILE = "training_state.pt"


class TorchEngine:
    """An engine that trains `module` in this process, or serves it frozen if there is no optimizer.

    With `compute_dtype` bfloat16, the module computes under autocast and keeps float32 weights, trained or frozen, so
    that an equal policy and reference give equal results. With None, it computes in the dtype of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig | None,
        *,
        device: torch.device,
        rank: int,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.module = module
        self.device = device
        self.rank = rank
        self.writes_in_place = False
        self._compute_dtype = compute_dtype
        self._stream: WeightStream | None = None
        self._optimizer = None
        if optimizer is not None:
            groups = parameter_groups(module, weight_decay=optimizer.weight_decay)
            self._optimizer = ClippedAdamW(groups, optimizer, fused=True)

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        mixed = self._compute_dtype not in (None, torch.float32)
        with torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=mixed):
            return compute(self.module)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        optimizer = self._trained()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer.grad_norm

    def passes(self, wanted: int) -> int:
        return wanted  # no other rank has to be waited for

    def stream(self) -> WeightStream:
        if self._stream is None:
            self._stream = WeightStream(self.module)
        return self._stream

    def snapshot(self, folder: Path) -> dict[Path, Any]:
        return {folder / STATE_FILE: training_state(self.module, self._optimizer)} if self._optimizer else {}

    def load(self, folder: Path) -> None:
        if self._optimizer is not None:
            load_training_state(folder / STATE_FILE, self.module, self._optimizer)
            self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[Tensor]:
        yield from module_tensors(self.module)
        if self._optimizer is not None:
            yield from optimizer_tensors(self._optimizer)

    def close(self) -> None:
        self._optimizer = self._stream = None
        self.module = nn.Module()

    def _trained(self) -> ClippedAdamW:
        if self._optimizer is None:
            raise TrainingError("optimizer", None, "a frozen model cannot be trained", "give the role an optimizer")
        return self._optimizer


# ---------------------------------------------------------------- base


class Engine(Protocol):
    """The model and optimizer of one rank. Gradients of several `backward` calls accumulate until `step`."""

    @property
    def module(self) -> nn.Module:
        """The bare model, for reading only. Pass computations with it to `forward`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def writes_in_place(self) -> bool:
        """Whether a `snapshot` must be written before the next step, which changes its tensors."""

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """Call `compute(model)`. Under ZeRO, the weights are available only inside `compute`."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, a partial sum over global denominators. Ranks are summed, not averaged."""

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient and return its norm before clipping.

        The norm is infinite if the gradient was not finite and the update was skipped.
        """

    def passes(self, wanted: int) -> int:
        """Number of forward passes that this rank must make if it has work for `wanted` (collective under ZeRO)."""

    def stream(self) -> WeightStream:
        """Stream the whole, merged weights under their names in a checkpoint; every rank must iterate it.

        In addition to its resident weights, a rank holds the yielded weight, or its layer where transformers changes
        names.
        """

    def snapshot(self, folder: Path) -> dict[Path, Any]:
        """Copy the values that this rank must write for a checkpoint in `folder`, by file.

        With `writes_in_place` they are the states themselves. Every rank must call it with the same folder.
        """

    def load(self, folder: Path) -> None:
        """Restore a saved `snapshot`, bit for bit, and clear the gradient."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that this rank keeps between steps: weights, gradients and optimizer states.

        A frozen model has weights alone, and nothing in `snapshot`.
        """

    def close(self) -> None:
        """Release the model and the optimizer. The process stays usable."""


def open_engine(spec: ModelSpec, optimizer: OptimizerConfig | None, config: TrainerConfig) -> Engine:
    """Open the engine of `config` for the model of `spec`, which is frozen without an optimizer.

    A frozen model that is not partitioned (ZeRO below stage 3) does not need DeepSpeed and uses the plain engine.
    Raises ConfigError for training with the plain engine on several ranks.
    """
    rank, world = rank_and_world()
    device = local_device()
    check_lora(spec.lora, config, key="lora")
    check_kernels(config.attention, liger=config.liger, device=device.type)
    if optimizer is not None and optimizer.ema_decay > 0 and config.zero_stage == 3:
        rule = "under ZeRO 3 no rank has all weights, so they cannot be averaged"
        raise ConfigError("optimizer.ema_decay", optimizer.ema_decay, rule, "use zero_stage <= 2, or 0 here")
    if config.tensor_parallel > 1 and optimizer is not None:
        for name, used in (("lora", spec.lora is not None), ("optimizer.ema_decay", optimizer.ema_decay > 0)):
            if used:
                rule = (
                    "cannot be combined with runtime.trainer.tensor_parallel, where each rank has a part of the weights"
                )
                raise ConfigError(name, "set", rule, "remove one of them")
    if config.engine == "deepspeed" and (optimizer is not None or config.zero_stage == 3):
        return _open_deepspeed(spec, optimizer, config, device)
    if optimizer is not None and world > 1:
        rule = f"trains in one process, but there are {world} train workers"
        raise ConfigError("runtime.trainer.engine", "torch", rule, "use deepspeed, or one worker")
    if config.engine == "deepspeed":
        # Same dtype as models that DeepSpeed trains: they compute with bfloat16 weights and update a float32 copy.
        module = _load(spec, config, dtype=config.dtype, trained=False, device=device)
        return TorchEngine(module, None, device=device, rank=rank, compute_dtype=None)
    # Updates of 1e-6 vanish in bfloat16 weights, so a trained model keeps float32 weights and computes under autocast.
    # A frozen model does the same, because autocast computes all but matrix products in float32, and bfloat16 weights
    # would not.
    module = _load(spec, config, dtype="float32", trained=optimizer is not None, device=device)
    return TorchEngine(module, optimizer, device=device, rank=rank, compute_dtype=getattr(torch, config.dtype))


def _open_deepspeed(
    spec: ModelSpec, optimizer: OptimizerConfig | None, config: TrainerConfig, device: torch.device
) -> Engine:
    trained = optimizer is not None
    set_environment(device)  # first: libraries that load models may import DeepSpeed
    parts = open_parts(spec, dtype=config.dtype, attention=config.attention) if config.zero_stage == 3 else None
    module = parts.module if parts else _load(spec, config, dtype=config.dtype, trained=trained, device=device)
    with quiet():  # 8 to 15 s, which only models that DeepSpeed holds are worth
        from rlhf_core.training.engines.deepspeed_engine import DeepSpeedEngine

    def prepare(partitioned: nn.Module) -> None:
        if spec.lora is not None:
            add_adapters(partitioned, spec, config)
        _prepare(partitioned, spec, config, trained=trained)

    engine = DeepSpeedEngine(
        module, optimizer, config, device=device, sources=parts.sources if parts else None, prepare=prepare
    )
    if parts is not None:
        engine.try_out(lambda model: check_computation(model, spec))
        if config.gradient_checkpointing and trained:
            checkpoint_activations(module)
        if config.sequence_parallel > 1:
            spread_rows(module, config.sequence_parallel)
    return engine


def add_adapters(partitioned: nn.Module, spec: ModelSpec, config: TrainerConfig) -> None:
    """Add adapters to a model whose parameters ZeRO 3 has partitioned, as `load_model` does to a whole one.

    Every rank makes all adapters. They are partitioned with the engine.
    """
    from rlhf_core.training.engines.deepspeed_engine import gather_on_call, let_peft_gather

    assert spec.lora is not None
    adapted = partitioned if spec.head == "lm" else backbone_of(partitioned)
    with let_peft_gather(config):
        apply_lora(adapted, spec.lora, seed=spec.seed)
    without_dropout(partitioned)
    with gather_on_call(adapted):
        check_adapters(adapted, spec.lora)


def _load(spec: ModelSpec, config: TrainerConfig, *, dtype: str, trained: bool, device: torch.device) -> nn.Module:
    module = load_model(
        spec,
        dtype=dtype,
        attention=config.attention,
        gradient_checkpointing=config.gradient_checkpointing and trained,
        device=str(device),
    )
    module = _prepare(module, spec, config, trained=trained)
    if config.sequence_parallel > 1:
        spread_rows(module, config.sequence_parallel)
    return module


def _prepare(module: Any, spec: ModelSpec, config: TrainerConfig, *, trained: bool) -> nn.Module:
    if config.fp32_lm_head and spec.head == "lm":
        compute_in_float32(module.get_output_embeddings())
    if config.liger:
        use_liger(module)
    if trained and config.router_aux_coef > 0:
        check_routers(module)
    return module if trained else module.requires_grad_(False)
