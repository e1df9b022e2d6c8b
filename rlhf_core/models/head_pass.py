"""Call an LM head once per forward pass, regardless of the number of chunks.

Under ZeRO 3, a module's weights are gathered when it is called, released, and gathered again in its backward pass.
These are collective calls, so every rank must make the same number in the same order, but the number of chunks depends
on a rank's tokens. The loop over the chunks therefore runs inside a single call of the head, where its weights stay
gathered, also while a chunk is recomputed in the backward pass.

Legend: T the positions that the loss mask selects, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

R = TypeVar("R", Tensor, tuple[Tensor, ...])


def in_one_call(head: nn.Module, compute: Callable[[Callable[[Tensor], Tensor], Tensor], R], hidden_TH: Tensor) -> R:
    """Return `compute(apply, hidden_TH)`, run as one call of `head`. `apply` is the head's own forward pass.

    For a backward pass, `compute` must return exactly one tensor on every rank, because DeepSpeed gathers weights at
    each tensor that receives a gradient, and records each time.
    """
    any_head: Any = head
    apply = any_head.forward
    # Set on the instance, so that `head(...)` runs all its hooks around `compute`.
    replaced = vars(head).get("forward")
    any_head.forward = lambda hidden: compute(apply, hidden)
    try:
        return any_head(hidden_TH)  # type: ignore[no-any-return]
    finally:
        if replaced is None:
            del any_head.forward
        else:
            any_head.forward = replaced
