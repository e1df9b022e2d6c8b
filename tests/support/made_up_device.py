"""A made-up `cuda:0` for a machine without a GPU: its tensors are ordinary CPU tensors whose storage is noted.

    with made_up_device():
        torch.zeros(3, device="cuda") + torch.zeros(3)      # RuntimeError, as on a GPU

Within it, tensors that are made on or moved to "cuda" say that they are there, and their numbers are computed on the CPU,
to the same bits. An operation on tensors of both devices raises as CUDA does; a copy does not, nor does a CPU tensor without
dimensions. It needs no support of libraries: DeepSpeed partitions such tensors, and gloo sends them. Autocast for "cuda" is
that of the CPU.

Where Python would wait for a GPU to finish its work is counted: it reads numbers of a tensor, needs to know how many
elements a mask selects, or copies without `non_blocking`, or from memory that is not pinned. torch's own tags of operations
say which depend on numbers; `waits_for` has the rest.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten: Any = torch.ops.aten
COPIES = {aten.copy_, aten._to_copy}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations that take indices on the CPU, too."""
DEPENDS_ON_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result is a number in Python, or a tensor whose size depends on numbers."""
UNTAGGED = {aten._linalg_check_errors, aten.embedding_renorm_, aten.isin, aten.multinomial, aten.normal}
"""Operations without such a tag that read numbers on CUDA, or may: whether a matrix has an inverse, the rows that are used
(`unique`, also for a long list in `isin`), and whether a probability or a deviation is negative."""
STAGED_BYTES = 64 << 10
"""Of memory that is not pinned, CUDA copies so much without waiting; of more "the driver may synchronize with the stream and
stage the copy" (CUDA Runtime API, API synchronization behavior)."""
GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device == CUDA,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device == CPU,  # type: ignore[attr-defined]
}
MOVES = {Tensor.cuda: CUDA, Tensor.cpu: CPU}


class MadeUpDevice:
    """The device of each storage. One that nobody has asked for, as those that a backward pass makes, has none."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.staged_bytes = STAGED_BYTES
        self.wanted: torch.device | None = None
        """The device that the call in progress asks for."""
        self.waits: Counter[str] = Counter()
        """How often Python waited for the GPU, by the function of `rlhf_core` in which it did."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the made-up GPU."""
        return self.of(tensor) == CUDA

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        if self.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        copy = tensor.clone()
        self._pinned[copy.untyped_storage()._cdata] = StorageWeakRef(copy.untyped_storage())
        return copy

    def copy_waits(self, source: Tensor, there: torch.device | None, *, non_blocking: bool) -> bool:
        """Whether Python waits for a copy from a tensor to a device."""
        if self.holds(source):
            return there != CUDA
        staged = source.untyped_storage()._cdata in self._pinned or source.nbytes <= self.staged_bytes
        # torch makes the value of `x[0] = 1.0` on the device of x: here nobody has asked for one.
        is_value = source.dim() == 0 and self.of(source) is None
        return there == CUDA and not is_value and not (non_blocking and staged)

    def count_wait(self) -> None:
        frame: FrameType | None = sys._getframe()
        while frame and not frame.f_globals.get("__name__", "").startswith("rlhf_core."):
            frame = frame.f_back
        place = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}" if frame else "elsewhere"
        self.waits[place.removeprefix("rlhf_core.")] += 1

    def of(self, tensor: Tensor) -> torch.device | None:
        _, device = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        return device

    def note(self, tensor: Tensor, device: torch.device | None) -> None:
        storage = tensor.untyped_storage()
        if device is None:
            self._known.pop(storage._cdata, None)
        else:  # with a weak reference no other storage gets its address
            self._known[storage._cdata] = StorageWeakRef(storage), device


class _Calls(TorchFunctionMode):
    """Answers calls of torch's Python functions about devices."""

    def __init__(self, devices: MadeUpDevice) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (
            torch.device,
            torch._C._nn._parse_to,
        ):  # `Module.to` moves its tensors to the device that it answers
            return func(*args, **(kwargs or {}))
        if func in GETTERS:
            return GETTERS[func](self._devices.of(args[0]) or CPU)
        if func is Tensor.pin_memory:
            return self._devices.pinned(args[0])
        if func is Tensor.numpy and self._devices.holds(args[0]):  # `numpy.asarray` comes here, too
            if not (kwargs or {}).get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            self._devices.count_wait()
        if func in MOVES:
            func, args = Tensor.to, (args[0], MOVES[func])
        flat, spec = tree_flatten((list(args), dict(kwargs or {})))
        asked = [torch.device(one) for one in flat if _is_device(one)]
        wanted = None if any(isinstance(one, Tensor) for one in flat) else CPU
        if asked:
            wanted = CUDA if asked[0].type == "cuda" else asked[0]
        made_here = func in (torch.tensor, torch.as_tensor) and wanted == CUDA
        if made_here or (func in (Tensor.new_tensor, Tensor.tolist) and self._devices.holds(args[0])):
            self._devices.count_wait()
        args, kwargs = tree_unflatten([_on_cpu(one) for one in flat], spec)
        if func is Tensor.to and wanted in (CPU, CUDA) and wanted != (self._devices.of(args[0]) or CPU):
            kwargs = {**kwargs, "copy": True}
        before, self._devices.wanted = self._devices.wanted, wanted
        try:
            made = func(*args, **kwargs)
        finally:
            self._devices.wanted = before
        if isinstance(made, Tensor) and wanted in (CPU, CUDA) and self._devices.of(made) is None:
            self._devices.note(made, wanted)  # of numbers or an array
        return made


class _Operations(TorchDispatchMode):
    """Checks the devices of each operation, and notes those of its results. Backward passes come here, too."""

    def __init__(self, devices: MadeUpDevice) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor) and not one.is_meta]
        known = [(one, self._devices.of(one)) for one in given]
        checked = [(one, device) for one, device in known if device == CUDA or (one.dim() and device is not None)]
        if self._waits(func, args, kwargs or {}, any(device == CUDA for _, device in known)):
            self._devices.count_wait()
        if func.overloadpacket in BY_INDEX and self._devices.of(args[0]) == CUDA:
            checked = [(one, device) for one, device in checked if one is args[0]]
        if func.overloadpacket not in COPIES and len({device for _, device in checked}) > 1:
            shapes = {device: tuple(one.shape) for one, device in checked}
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {shapes}")
        if func is aten.histc.default and not args[0].is_floating_point():  # of which CPUs have none
            made = func(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        else:
            made = func(*args, **(kwargs or {}))
        own = {one.untyped_storage()._cdata for one in given}
        device = CUDA if any(device == CUDA for _, device in known) else next((d for _, d in checked), None)
        if func is aten._to_copy.default or not given:
            device = self._devices.wanted or device
        for one in tree_flatten(made)[0]:
            if isinstance(one, Tensor) and not one.is_meta and one.untyped_storage()._cdata not in own:
                self._devices.note(one, device)
        return made

    def _waits(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_gpu: bool) -> bool:
        """Whether Python waits for the GPU in this operation."""
        packet = func.overloadpacket
        if packet in COPIES:
            target, source = (args[0], args[1]) if packet is aten.copy_ else (None, args[0])
            there = self._devices.wanted or self._devices.of(source) if target is None else self._devices.of(target)
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            return self._devices.copy_waits(source, there, non_blocking=non_blocking)
        if packet in BY_INDEX:
            indices = [one for one in tree_flatten(args[1])[0] if isinstance(one, Tensor)]
            masks = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
            filled = packet is not aten.index and args[2].numel() == 1  # which CUDA does as `masked_fill`
            return self._devices.holds(args[0]) and (
                (masks and not filled) or any(not self._devices.holds(one) for one in indices)
            )
        if packet is aten.repeat_interleave and kwargs.get("output_size") is not None:
            return False
        if packet is aten.histc:  # of no bounds it needs those of the numbers
            low, high = (*args[2:4], kwargs.get("min", 0), kwargs.get("max", 0))[:2]
            return on_gpu and low == high
        return on_gpu and (packet in UNTAGGED or not DEPENDS_ON_NUMBERS.isdisjoint(func.tags))


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "meta")
    )


def _on_cpu(value: Any) -> Any:
    return CPU if _is_device(value) and torch.device(value).type == "cuda" else value


class _Autocast(torch.autocast):
    """Autocast in which "cuda" is the CPU."""

    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *arguments, **options)


@contextmanager
def made_up_device() -> Iterator[MadeUpDevice]:
    """Make "cuda" a device inside this context."""
    devices = MadeUpDevice()
    is_enabled = torch.is_autocast_enabled
    # torch's functions in Python would hide what they call: they hand themselves over as a whole.
    modules = [torch.nn.functional, torch._tensor, torch.functional, torch.autograd]
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    hidden = [
        patch.object(module, name, lambda *_: False) for module in modules for name in names if hasattr(module, name)
    ]
    hidden.append(patch.object(torch.cuda, "get_device_capability", lambda *_: (8, 0)))
    by_device = clip_grad._group_tensors_by_device_and_dtype

    def by_noted_device(tensors: list[list[Tensor]], **options: Any) -> Any:
        """In groups of the real device, which moved the factor of clipping to the CPU and back."""
        groups = by_device(tensors, **options).items()
        return {(devices.of(group[0][0][0]) or device, dtype): group for (device, dtype), group in groups}

    hidden.append(patch.object(clip_grad, "_group_tensors_by_device_and_dtype", by_noted_device))
    hidden += [patch.object(module, "autocast", _Autocast) for module in (torch, torch.amp)]
    hidden.append(
        patch.object(torch, "is_autocast_enabled", lambda kind="cuda": is_enabled("cpu" if kind == "cuda" else kind))
    )
    for one in hidden:
        one.start()
    try:
        with _Operations(devices), _Calls(devices):
            yield devices
    finally:
        for one in hidden:
            one.stop()
