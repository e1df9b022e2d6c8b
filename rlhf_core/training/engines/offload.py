"""Release GPU memory temporarily, for a sampling engine on the same GPU.

DeepSpeed's own `offload_states` is not enough: stage 0 has none, and stage 3 supports only DeepSpeed's FusedAdam. Here
the storages are emptied and filled again, so that all their views, including DeepSpeed's flat buffers, stay valid.

Keep the host memory that one training step frees for the next one.

glibc returns a freed block of more than 32 MiB to the system at once, and smaller ones when the end of its heap is free.
A training step on a CPU then writes gigabytes of fresh pages, each of which the system clears first. If they are kept,
they stay with the process between its steps, and gaps between blocks of many sizes make its memory grow. They are
released when the machine has little memory left.
"""

import ctypes
import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# ---------------------------------------------------------------- Keep the host memory that one training step frees for the next one

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of options in `man mallopt`."""
NEVER = -1
OWN_SETTINGS = frozenset({"GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
"""Environment variables by which a user sets them."""
SHORT = 0.25  # leaves a quarter to the page cache, engines and other runs
"""Share of the machine's memory."""


def keep_freed_memory() -> bool:
    """Keep memory that the main thread of this process frees; true if this is possible.

    It is not where the C library is no glibc, or where the environment has any of `OWN_SETTINGS`.
    """
    if not OWN_SETTINGS.isdisjoint(os.environ) or (libc := _glibc()) is None:
        return False
    return bool(libc.mallopt(MMAP_MAX, 0) and libc.mallopt(TRIM_THRESHOLD, NEVER))


def release_freed_memory() -> None:
    """Release all freed memory to the system, if the C library is glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def release_if_short() -> None:
    """Release all freed memory to the system if less than `SHORT` of its memory is left."""
    memory = psutil.virtual_memory()
    if memory.available < SHORT * memory.total:
        release_freed_memory()


def _glibc() -> Any:
    """The C library of this process if it is glibc, else None."""
    libc = ctypes.CDLL(None)
    return libc if all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")) else None


# ---------------------------------------------------------------- Release GPU memory temporarily, for a sampling engine on the same GPU


class HostCopies:
    """Copies in host memory of tensors whose device memory was released.

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
        """Copy the `tensors` that are on `device`, free them there and return the number of bytes freed.

        The tensors must not be read or written until `give_back`.
        """
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # On a CPU some storages are memory-mapped files. On a GPU all come from torch's allocator.
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
        """Restore all tensors, bit for bit."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._copies.pop()  # not earlier: memory may be short, and this is the only copy

    def forget(self) -> None:
        """Drop the copies, when their tensors are no longer needed."""
        self._copies.clear()


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights, buffers and gradients of `module`."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the weights that `optimizer` updates (float32 partitions under ZeRO) and its moments."""
    for group in optimizer.param_groups:
        yield from (parameter.data for parameter in group["params"])
    for parameter, state in optimizer.state.items():  # ZeRO 3 puts parameters into their group only during a step
        yield parameter.data
        yield from (value for value in state.values() if isinstance(value, Tensor))


def release_cached() -> None:
    """Release the freed memory of the GPU and of the host that this process keeps, so that others can use it."""
    gc.collect()
    release_freed_memory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
