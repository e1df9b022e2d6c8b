"""Check the weights that a sampler receives from a trainer through host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import SamplingError, explain
from rlhf_core.interfaces import Weights


def tensors_of(weights: Weights) -> Mapping[str, Any]:
    """Return the payload of `weights`, Hugging Face name -> CPU tensor. Raises SamplingError if it is anything else.

    >>> tensors_of(Weights(payload={}, digest=""))
    {}
    """
    if not isinstance(weights.payload, Mapping):
        kind = type(weights.payload).__name__
        raise SamplingError(explain("weights.payload", kind, "must map names to tensors", "resolve it first"))
    return weights.payload


def received_tensors(weights: Weights) -> Mapping[str, Any]:
    """Return name -> CPU tensor. Raises SamplingError if the digest differs from that of the tensors that were sent."""
    from rlhf_core.models.digest import weights_digest  # imports torch, which planning must not

    tensors = tensors_of(weights)
    received = weights_digest(tensors)
    if received != weights.digest:
        rule = f"the trainer sent {weights.digest[:12]}"
        raise SamplingError(
            explain("weights.digest", received[:12], rule, "please report this as a bug in the transfer")
        )
    return tensors
