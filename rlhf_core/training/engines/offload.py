"""Giving memory of a GPU back for a while, to an engine that samples on it.

DeepSpeed's own `offload_states` will not do: stage 0 has none, and stage 3 takes DeepSpeed's FusedAdam alone. Here it is the
storages that are emptied and filled again, so every view of them, DeepSpeed's flat buffers among them, stays as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class HostCopies:
    """Copies in host memory of tensors whose own memory was given back.

    >>> whole = torch.arange(4.0)
    >>> part, copies = whole[1:3], HostCopies()
    >>> copies.take([whole, part], torch.device("cpu"))
    16
    >>> whole.untyped_storage().nbytes()
    0
    >>> copies.give_back()
    >>> part.tolist()
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def take(self, tensors: Iterable[Tensor], device: torch.device) -> int:
        """Copy what of `tensors` lies on `device`, and free it there; return how many bytes that is.

        Nobody may read or write the tensors until `give_back`.
        """
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # On CPU some are of a file that is mapped; on a GPU all are of torch's own allocator.
            if storage.device.type == device.type and storage.nbytes() > 0 and storage.resizable():
                storages[storage.data_ptr()] = storage
        if device.type == "cuda":
            torch.cuda.synchronize()  # other streams may still write
        freed = 0
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())
            copy.copy_(storage)
            freed += storage.nbytes()
            self._copies.append((storage, copy))
            storage.resize_(0)
        return freed

    def give_back(self) -> None:
        """Put everything back where it was, bit for bit."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._copies.pop()  # not before: there may be no room, and the copy is the only one

    def forget(self) -> None:
        """Drop the copies: their tensors are not needed any more."""
        self._copies.clear()


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights, buffers and gradients of `module`."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the weights that `optimizer` moves, which under ZeRO are parts in float32, and its moments."""
    for group in optimizer.param_groups:
        yield from (parameter.data for parameter in group["params"])
    for parameter, state in optimizer.state.items():  # ZeRO 3 puts parameters into their group for a step only
        yield parameter.data
        yield from (value for value in state.values() if isinstance(value, Tensor))


def release_cached() -> None:
    """Hand what torch keeps of freed GPU memory back to the driver, where other processes can have it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
