"""One use of an LM head per forward pass, however many pieces its work is cut into.

Under ZeRO 3 a module's weights are gathered when it is called, in its backward pass once more, and let go in between:
collective calls, of which every rank must make the same number in the same order. How many pieces there are depends on a
rank's tokens. So the loop over the pieces runs inside a single call of the head, where its weights stay together, and
the recomputation of a piece in the backward pass finds them there too.

Legend: T the positions that the loss mask selects, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

R = TypeVar("R", Tensor, tuple[Tensor, ...])


def in_one_call(head: nn.Module, compute: Callable[[Callable[[Tensor], Tensor], Tensor], R], hidden_TH: Tensor) -> R:
    """Return `compute(apply, hidden_TH)`, run as one call of `head`; `apply` is the head's own forward pass.

    What `compute` returns for a backward pass must be one tensor, whatever a rank's share and whatever it is asked for:
    DeepSpeed gathers at each tensor that a gradient comes in by, and notes each such time.
    """
    any_head: Any = head
    apply = any_head.forward
    # Set on the instance, so that `head(...)` and with it every hook runs around `compute`.
    replaced = vars(head).get("forward")
    any_head.forward = lambda hidden: compute(apply, hidden)
    try:
        return any_head(hidden_TH)  # type: ignore[no-any-return]
    finally:
        if replaced is None:
            del any_head.forward
        else:
            any_head.forward = replaced
