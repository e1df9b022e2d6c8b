from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.training.adamw import ClippedAdamW, adamw, parameter_groups


def line(*weights: float) -> nn.Linear:
    module = nn.Linear(len(weights), 1, bias=False)
    module.weight.data = torch.tensor([weights])
    return module


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].weight.requires_grad_(True)
    groups = parameter_groups(module, weight_decay=0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (3, 0.0)]


def test_frozen_parameters_are_left_out_and_so_is_an_empty_group() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(module, weight_decay=0.1)] == [1]


def test_the_first_step_moves_every_weight_by_the_learning_rate_against_its_gradient() -> None:
    # Adam's first step is lr * g / |g|; decay is lr * wd * w = 0.1 * 0.5 * w
    module = line(1.0, -2.0)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    adamw(module, OptimizerConfig(learning_rate=0.1, weight_decay=0.5), fused=False).step()
    assert module.weight.tolist()[0] == pytest.approx([1.0 - 0.05 - 0.1, -2.0 + 0.1 + 0.1], abs=1e-6)


def test_the_norm_is_reported_before_clipping_and_the_gradient_is_clipped() -> None:
    module = line(0.0, 0.0)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    config = OptimizerConfig(max_grad_norm=1.0)
    optimizer = ClippedAdamW(parameter_groups(module, weight_decay=0.0), config, fused=False)
    optimizer.step()
    assert optimizer.grad_norm == 5.0
    assert optimizer.overflow is False
    assert module.weight.grad.tolist()[0] == pytest.approx([0.6, -0.8], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(bad: float) -> None:
    module = line(1.0, 2.0)
    optimizer = ClippedAdamW(parameter_groups(module, weight_decay=0.1), OptimizerConfig(), fused=False)
    module.weight.grad = torch.tensor([[bad, 1.0]])
    optimizer.step()
    assert module.weight.tolist() == [[1.0, 2.0]]
    assert optimizer.state == {}
    assert (optimizer.overflow, optimizer.grad_norm) == (True, math.inf)
