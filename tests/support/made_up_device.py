"""A made-up `cuda:0` for a machine without a GPU: its tensors are ordinary CPU tensors whose storage is noted.

    with made_up_device():
        torch.zeros(3, device="cuda") + torch.zeros(3)      # RuntimeError, as on a GPU

Within it, tensors that are made on or moved to "cuda" say that they are there, and their numbers are computed on the CPU,
to the same bits. An operation on tensors of both devices raises as CUDA does; a copy does not, nor does a CPU tensor without
dimensions. It needs no support of libraries: DeepSpeed partitions such tensors, and gloo sends them. Autocast for "cuda" is
that of the CPU.

Where Python would wait for a GPU to finish its work is counted: it reads numbers of a tensor, needs to know how many
elements a mask selects, or copies without `non_blocking`.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
BY_INDEX = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that take indices on the CPU, too."""
WAITS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor),
}
"""Operations whose result is a number in Python, or a tensor whose size depends on numbers."""
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
        self.wanted: torch.device | None = None
        """The device that the call in progress asks for."""
        self.waits: Counter[str] = Counter()
        """How often Python waited for the GPU, by the function of `rlhf_core` in which it did."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the made-up GPU."""
        return self.of(tensor) == CUDA

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
        if func is Tensor.numpy and self._devices.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
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
        checked = [(one, device) for one, device in known if one.dim() > 0 and device is not None]
        if self._waits(func, args, kwargs or {}, any(device == CUDA for _, device in known)):
            self._devices.count_wait()
        if func in BY_INDEX and self._devices.of(args[0]) == CUDA:
            checked = [(one, device) for one, device in checked if one is args[0]]
        if func not in COPIES and len({device for _, device in checked}) > 1:
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
        if func in COPIES:
            target, source = (args[0], args[1]) if func is aten.copy_.default else (None, args[0])
            there = self._devices.wanted or self._devices.of(source) if target is None else self._devices.of(target)
            goes = (self._devices.holds(source), there == CUDA)
            asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
            return goes == (True, False) or (goes == (False, True) and not asynchronous)
        if func in BY_INDEX and self._devices.holds(args[0]):
            indices = [one for one in tree_flatten(args[1])[0] if isinstance(one, Tensor)]
            return any(one.dtype == torch.bool or not self._devices.holds(one) for one in indices)
        return on_gpu and func in WAITS


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
