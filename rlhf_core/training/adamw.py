"""Provide AdamW with clipping to a global gradient norm, which skips the update if the gradient is not finite."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import ConfigError

LONGEST = 2**18
"""Maximum number of float32 squares per sum. A CPU adds them one after another, so that a longer sum loses digits."""
BLOCK = 2**12  # 4096 additions lose at most 4096 * 2^-24 = 2.4e-4 of their sum
"""Number of elements per block for which a norm is computed first in longer gradients."""


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the trained parameters into non-empty groups: matrices with decay, vectors (norms, biases) without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: Any) -> int:
    """Number of dimensions of a parameter, of which ZeRO 3 may have left a flat part."""
    return len(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def adamw(module: nn.Module, config: OptimizerConfig, *, fused: bool) -> torch.optim.AdamW:
    """Build plain AdamW (arXiv 1711.05101) over `module`, for engines that clip and check gradients themselves."""
    return torch.optim.AdamW(
        parameter_groups(module, weight_decay=config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all `gradients` together. It stores norms of blocks, but no copy of a gradient.

    In a single sum on a CPU, the squares of 40 million elements lose 0.6 % of their sum.

    >>> gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]).item()
    5.0
    """
    return get_total_norm([_shortened(gradient) for gradient in gradients])


class ClippedAdamW(torch.optim.AdamW):
    """AdamW whose `step` first clips the gradient to `max_grad_norm`, and does nothing if its norm is not finite.

    It is a subclass because DeepSpeed at ZeRO stage 0 calls only `step`, and reads `_global_grad_norm` and `overflow`
    from the optimizer if they exist.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> None:
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
        self._max_grad_norm = config.max_grad_norm
        self._global_grad_norm = 0.0
        self.overflow = False

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step before clipping, infinite if that step was skipped."""
        return self._global_grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip the gradient, then update the weights unless it is not finite."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        total = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        clip_grads_with_norm_(parameters, self._max_grad_norm, total)
        norm = float(total)
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            super().step()


def _shortened(gradient: Tensor) -> Tensor:
    """Reduce `gradient` to at most `LONGEST` elements with the same norm: itself, or norms of its blocks."""
    while gradient.numel() > LONGEST:
        flat = gradient.reshape(-1)
        whole = flat.numel() // BLOCK * BLOCK
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)  # ||g||^2 = sum of ||block||^2
        gradient = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).reshape(1)])
    return gradient


# ---------------------------------------------------------------- Compute the learning rate of every optimizer step as a pure function of the step

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(
    step: int, *, total_steps: int, peak: float, schedule: Schedule, warmup_fraction: float, min_fraction: float
) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`, the exact number of optimizer steps.

    The warm-up takes ceil(warmup_fraction * total_steps) steps. Its first rate is above zero, and its last is the peak.
    The rate then falls from `peak` towards `min_fraction * peak`, which it would reach at step `total_steps`. The rate
    of the last step is still above it, so that no step is wasted with `min_fraction` 0. Raises ConfigError if `step` is
    not one of `total_steps`.

    >>> learning_rate(0, total_steps=10, peak=1.0, schedule="linear", warmup_fraction=0.2, min_fraction=0.0)
    0.5
    """
    if not 0 <= step < total_steps:
        raise ConfigError(
            "step", step, f"must be in [0, total_steps = {total_steps})", "set total_steps to the number of steps"
        )
    # Rounded before ceil: 0.07 * 100 is 7.000000000000001 in binary.
    warmup = math.ceil(round(warmup_fraction * total_steps, 9))
    if step < warmup:
        return peak * (step + 1) / warmup  # linear, from peak / warmup to peak
    progress = (step - warmup) / (total_steps - warmup)  # x in [0, 1)
    match schedule:
        case "constant":
            return peak
        case "linear":
            remaining = 1 - progress  # linear: 1 - x
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2  # cosine: (1 + cos(pi x)) / 2, arXiv 1608.03983
        case _:
            assert_never(schedule)
    return peak * (min_fraction + (1 - min_fraction) * remaining)  # from peak towards min_fraction * peak


def scheduled_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """The `learning_rate` of a step for an optimizer configuration."""
    return learning_rate(
        step,
        total_steps=total_steps,
        peak=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_fraction=optimizer.warmup_fraction,
        min_fraction=optimizer.min_lr_fraction,
    )
