"""Weights in Ray's object store: packed once by the trainer's rank 0, in buckets, read by every engine without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKET_BYTES = 2**28
"""Most bytes of one object in the store, unless a single tensor has more. The store finds room for a bucket where it would
not for a whole model, spills it alone, and another node pulls several at once."""


@dataclass(frozen=True)
class StoredWeights:
    """Payload of `Weights` on its way through host memory: a reference for each bucket, which Ray does not resolve here."""

    refs: tuple[Any, ...]


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes, because numpy has no bfloat16. `data` is a 1-D uint8 array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def buckets(tensors: Mapping[str, Any], *, most_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Any]]:
    """Yield name -> tensor in parts of at most `most_bytes`, in order; a larger tensor is a part of its own.

    >>> import torch
    >>> [list(part) for part in buckets({name: torch.zeros(3) for name in "abc"}, most_bytes=24)]
    [['a', 'b'], ['c']]
    """
    part: dict[str, Any] = {}
    held = 0
    for name, tensor in tensors.items():
        if part and held + tensor.nbytes > most_bytes:
            yield part
            part, held = {}, 0
        part[name] = tensor
        held += tensor.nbytes
    if part:
        yield part


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
