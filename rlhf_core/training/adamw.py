"""AdamW that clips to a global gradient norm and leaves the model alone when the gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from rlhf_core.config.engines import OptimizerConfig


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices decay, vectors (norms, biases) do not; empty ones left out."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(module: nn.Module, config: OptimizerConfig, *, fused: bool) -> torch.optim.AdamW:
    """Return plain AdamW (arXiv 1711.05101) over `module`, for engines that clip and check by themselves."""
    return torch.optim.AdamW(
        parameter_groups(module, weight_decay=config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


class ClippedAdamW(torch.optim.AdamW):
    """AdamW whose `step` first clips the gradient to `max_grad_norm`, and does nothing if its norm is not finite.

    A subclass because DeepSpeed at ZeRO stage 0 calls nothing but `step`, and reads `_global_grad_norm` and `overflow`
    from the optimizer when it has them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> None:
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
        self._max_grad_norm = config.max_grad_norm
        self._global_grad_norm = 0.0
        self.overflow = False

    @property
    def grad_norm(self) -> float:
        """The norm before clipping of the last step; infinite if that step was skipped."""
        return self._global_grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, then update unless the gradient is not finite."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = float(clip_grad_norm_(parameters, self._max_grad_norm))
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            super().step()
