"""Digests notice every kind of change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_core.models.lora import weights_digest


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{index:02d}": torch.full((2, 3), float(index)) for index in range(20)}


def test_the_digest_does_not_depend_on_order_or_memory_layout() -> None:
    shuffled = dict(reversed(list(tensors().items())))
    strided = {name: tensor.repeat(1, 2)[:, :3] for name, tensor in tensors().items()}
    assert weights_digest(tensors()) == weights_digest(shuffled) == weights_digest(strided)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["layer.00"].add_(1e-6),
        lambda state: state["layer.19"][1, 2].add_(1e-4),
        lambda state: state.pop("layer.01"),
        lambda state: state.update({"layer.01": state["layer.01"].to(torch.bfloat16)}),
        lambda state: state.update({"layer.01": state["layer.01"].reshape(3, 2)}),
    ],
    ids=["first", "last", "missing", "dtype", "shape"],
)
def test_the_digest_notices_a_change(change: Any) -> None:
    state = tensors()
    change(state)
    assert weights_digest(state) != weights_digest(tensors())


def test_the_digest_reads_bfloat16_and_single_tensors() -> None:
    one = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    two = {"w": torch.tensor([1.0, 2.5], dtype=torch.bfloat16)}
    assert weights_digest(one) != weights_digest(two)
    assert len(weights_digest(one)) == 64
