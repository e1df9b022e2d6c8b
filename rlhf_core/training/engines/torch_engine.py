"""Implement the plain engine: one process, torch autograd, clipped AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import TrainingError, explain
from rlhf_core.training.adamw import ClippedAdamW, parameter_groups
from rlhf_core.training.engines.offload import module_tensors, optimizer_tensors
from rlhf_core.training.state import load_training_state, training_state

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
        self._compute_dtype = compute_dtype
        self._optimizer = None
        if optimizer is not None:
            groups = parameter_groups(module, weight_decay=optimizer.weight_decay)
            self._optimizer = ClippedAdamW(groups, optimizer, fused=True)

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """Return `compute(module)`."""
        mixed = self._compute_dtype not in (None, torch.float32)
        with torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=mixed):
            return compute(self.module)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`."""
        loss.backward()

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient and return its norm before clipping.

        The norm is infinite if the update was skipped.
        """
        optimizer = self._trained()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer.grad_norm

    def passes(self, wanted: int) -> int:
        """Return `wanted`, since there is no other rank to wait for."""
        return wanted

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because the weights are always whole."""
        return nullcontext()

    def snapshot(self, folder: Path) -> dict[Path, Any]:
        """Return copies of trained weights and optimizer, by file. A frozen model has none."""
        return {folder / STATE_FILE: training_state(self.module, self._optimizer)} if self._optimizer else {}

    def load(self, folder: Path) -> None:
        """Restore a saved `snapshot` and clear the gradient."""
        if self._optimizer is not None:
            load_training_state(folder / STATE_FILE, self.module, self._optimizer)
            self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the weights, the gradients, and the optimizer states of a trained model."""
        yield from module_tensors(self.module)
        if self._optimizer is not None:
            yield from optimizer_tensors(self._optimizer)

    def close(self) -> None:
        """Release the model and the optimizer."""
        self._optimizer = None
        self.module = nn.Module()

    def _trained(self) -> ClippedAdamW:
        if self._optimizer is None:
            raise TrainingError(
                explain("optimizer", None, "a frozen model cannot be trained", "give the role an optimizer")
            )
        return self._optimizer
