"""Compute digests of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

PROBES = 8
"""Number of tensors whose bytes a weights digest reads."""


def weights_digest(named_tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of every tensor's name, dtype and shape and of the bytes of `PROBES` tensors.

    The probes are spread evenly over the sorted names, including the first and the last. They detect a stale layer, a
    missing tensor or a wrong cast at a cost that does not grow with the model's depth.
    """
    digest = hashlib.sha256()
    names = sorted(named_tensors)
    last = len(names) - 1
    probes = {names[round(index * last / (PROBES - 1))] for index in range(PROBES)} if names else set()
    for name in names:
        tensor = named_tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if name in probes:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
