"""Keep weights in Ray's object store: rank 0 packs them once, in buckets, and every engine reads them uncopied."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BUCKET_BYTES = 2**28
"""Maximum size of one object in the store, unless a single tensor is larger. The store has room for a bucket where a
whole model would not fit, spills buckets one by one, and another node pulls several at once.
"""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes, because numpy has no bfloat16. `data` is a 1-D uint8 array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def buckets(weights: Iterable[tuple[str, Any]], *, most_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Any]]:
    """Yield name -> copy of the tensor on the CPU in parts of at most `most_bytes`, in order, each when it is full.

    A larger tensor forms a separate part.

    >>> import torch
    >>> [list(part) for part in buckets([(name, torch.zeros(3)) for name in "abc"], most_bytes=24)]
    [['a', 'b'], ['c']]
    """
    part: dict[str, Any] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > most_bytes:
            yield part
            part, held = {}, 0
        part[name] = tensor.to("cpu", copy=True)
        held += tensor.nbytes
        del tensor  # not kept while the next one is gathered
    if part:
        yield part


def pack_weights(tensors: Mapping[str, Any]) -> list[PackedTensor]:
    """Pack name -> tensor as bytes outside the pickle, so that Ray's readers map them instead of copying."""
    packed = []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(PackedTensor(name, dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()))
    return packed


def unpack_weights(packed: list[PackedTensor]) -> dict[str, Any]:
    """Map name -> CPU tensor that shares the memory of `packed`, in its order. The tensors must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return {
            item.name: torch.from_numpy(item.data).view(getattr(torch, item.dtype)).reshape(item.shape)
            for item in packed
        }
