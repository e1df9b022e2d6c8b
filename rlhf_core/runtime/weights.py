"""Weights in Ray's object store: packed once by the trainer's rank 0, read by every engine without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredWeights:
    """Payload of `Weights` on its way through host memory. Inside a dataclass Ray does not resolve the reference."""

    ref: Any


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes, because numpy has no bfloat16. `data` is a 1-D uint8 array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def pack(tensors: Mapping[str, Any]) -> list[PackedTensor]:
    """Return name -> tensor as bytes that Ray keeps out of the pickle, so that readers map them instead of copying."""
    import torch

    packed = []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(PackedTensor(name, dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()))
    return packed


def unpack(packed: list[PackedTensor]) -> dict[str, Any]:
    """Return name -> CPU tensor that shares the memory of `packed`, in its order. The tensors must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return {
            item.name: torch.from_numpy(item.data).view(getattr(torch, item.dtype)).reshape(item.shape)
            for item in packed
        }
