"""Compute the exponential moving average of a model's trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_core.training.state import trained_parameters


class WeightAverage:
    """A float32 average of weights that starts at the initial weights.

    After every update, average <- decay * average + (1 - decay) * weights.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = model.weight.data.fill_(1.0)
    >>> average = WeightAverage(model, decay=0.75)
    >>> _ = model.weight.data.fill_(3.0)
    >>> average.update(model)
    >>> average.state()["weight"].item()
    1.5
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._average = {name: weight.float().clone() for name, weight in trained_parameters(module).items()}

    def update(self, module: nn.Module) -> None:
        """Add the weights of `module` to the average after an optimizer update."""
        for name, weight in trained_parameters(module).items():
            self._average[name].lerp_(weight.float(), 1 - self._decay)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the average."""
        yield from self._average.values()

    def state(self) -> dict[str, Tensor]:
        """Return copies of the average on the CPU, for a checkpoint."""
        return {name: weight.to("cpu", copy=True) for name, weight in self._average.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the average from `state`."""
        for name, weight in self._average.items():
            weight.copy_(state[name])

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Replace the weights of `module` with the average, rounded to their precision, inside this context."""
        weights = trained_parameters(module)
        own = {name: weight.clone() for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.copy_(self._average[name])
            yield
        finally:
            for name, weight in weights.items():
                weight.copy_(own[name])


def average_of(module: nn.Module, *, decay: float, rank: int) -> WeightAverage | None:
    """Return the average on rank 0 if `decay` is not 0, else None. One is enough, as all ranks hold whole weights."""
    if decay == 0 or rank > 0:
        return None
    with torch.no_grad():
        return WeightAverage(module, decay=decay)
