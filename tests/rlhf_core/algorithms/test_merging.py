"""Merges against their formulas, written here once more in NumPy, and their properties."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rlhf_core.algorithms.merging import Merge, SlerpMerge, TiesMerge

METHODS: list[dict[str, Any]] = [
    {"type": "linear"},
    {"type": "task_arithmetic", "scale": 0.7},
    {"type": "ties", "density": 0.4},
    {"type": "ties", "density": 1.0, "scale": 1.3},
    {"type": "slerp"},
]


def by_hand(method: dict[str, Any], models: list[Any], weights: list[float], base: Any) -> Any:
    scale = method.get("scale", 1.0)
    if method["type"] == "linear":
        return sum(w * m for w, m in zip(weights, models)) / sum(weights)
    if method["type"] == "task_arithmetic":
        return base + scale * sum(w * (m - base) for w, m in zip(weights, models))
    if method["type"] == "slerp":
        a, b, t = models[0], models[1], weights[1] / sum(weights)
        angle = np.arccos(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))
        return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)
    changes = []
    for model in models:
        change = model - base
        smallest = np.argsort(-np.abs(change), axis=None)[int(method["density"] * change.size) :]
        change = change.copy()
        change.flat[smallest] = 0.0
        changes.append(change)
    merged = base.copy()
    for at in np.ndindex(*base.shape):
        up = sum(w * c[at] for w, c in zip(weights, changes)) >= 0
        agreeing = [(w, c[at]) for w, c in zip(weights, changes) if c[at] != 0 and (c[at] > 0) == up]
        if agreeing:
            merged[at] += scale * sum(w * c for w, c in agreeing) / sum(w for w, _ in agreeing)
    return merged


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (4,)])
@pytest.mark.parametrize("count", [2, 3])
def test_a_merge_is_its_formula(method, shape, count):
    if method["type"] == "slerp" and (count != 2 or shape == (1, 1)):
        return  # two models, and numbers have no angle between them
    generator = torch.Generator().manual_seed(count)
    base, *models = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count + 1))
    weights = [0.5, 2.0, 1.0][:count]
    if method["type"] == "ties" and shape == (1, 1):
        method = method | {"density": 1.0}  # at least one value is kept
    merge = TypeAdapter(Merge).validate_python(method)
    expected = by_hand(method, [model.numpy() for model in models], weights, base.numpy())
    assert np.allclose(merge.merged(models, weights, base, 0).numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_merge_of_a_model_with_itself_is_the_model(method):
    same, base = torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.zeros(2, 2)
    plain = {name: value for name, value in method.items() if name != "scale"} | (
        {"density": 1.0} if "density" in method else {}
    )
    merged = TypeAdapter(Merge).validate_python(plain).merged([same, same], [0.25, 0.75], base, 0)
    assert torch.allclose(merged, same, rtol=0, atol=1e-6)


def test_slerp_keeps_the_norm_and_survives_parallel_and_empty_tensors():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    assert float(SlerpMerge().merged([a, b], [1.0, 1.0], None, 0).norm()) == pytest.approx(3.0, abs=1e-6)
    assert torch.equal(SlerpMerge().merged([a, 2 * a], [1.0, 1.0], None, 0), 1.5 * a)
    assert torch.equal(SlerpMerge().merged([a, torch.zeros(2)], [1.0, 1.0], None, 0), 0.5 * a)


def test_dare_keeps_a_change_on_average_and_depends_on_the_seed_alone():
    merge = TiesMerge(density=0.3, drop="random")
    change = torch.ones(200_000)
    kept = merge.kept(change, seed=4)
    # The mean of n values 1/p with probability p has the deviation sqrt((1 - p) / (p n)) = 0.0034; five of them.
    assert abs(float(kept.mean()) - 1.0) < 0.017
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.3])
    for share in (0.1, 0.5):  # equal changes of several models stay as they are on average
        same = TiesMerge(density=share, drop="random").merged(
            [change] * 4, [1.0, 2.0, 0.5, 1.0], torch.zeros(200_000), 7
        )
        assert abs(float(same.mean()) - 1.0) < 5 * (1 / share / 2 / 200_000) ** 0.5
    assert torch.equal(kept, merge.kept(change, seed=4)) and not torch.equal(kept, merge.kept(change, seed=5))
