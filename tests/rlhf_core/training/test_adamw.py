"""The optimizer and its learning rates."""

import math

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.training.adamw import (
    LONGEST,
    ClippedAdamW,
    Schedule,
    adamw,
    gradient_norm,
    learning_rate,
    parameter_groups,
    scheduled_rate,
)


def line(*weights: float) -> nn.Linear:
    module = nn.Linear(len(weights), 1, bias=False)
    module.weight.data = torch.tensor([weights])
    return module


def test_matrices_decay_and_vectors_do_not():
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].weight.requires_grad_(True)
    groups = parameter_groups(module, weight_decay=0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (3, 0.0)]


def test_frozen_parameters_are_left_out_and_so_is_an_empty_group():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(module, weight_decay=0.1)] == [1]


def test_the_first_step_moves_every_weight_by_the_learning_rate_against_its_gradient():
    # Adam's first step is lr * g / |g|; decay is lr * wd * w = 0.1 * 0.5 * w
    module = line(1.0, -2.0)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    adamw(module, OptimizerConfig(learning_rate=0.1, weight_decay=0.5), fused=False).step()
    assert module.weight.tolist()[0] == pytest.approx([1.0 - 0.05 - 0.1, -2.0 + 0.1 + 0.1], abs=1e-6)


def test_the_norm_is_reported_before_clipping_and_the_gradient_is_clipped():
    module = line(0.0, 0.0)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    config = OptimizerConfig(max_grad_norm=1.0)
    optimizer = ClippedAdamW(parameter_groups(module, weight_decay=0.0), config, fused=False)
    optimizer.step()
    assert optimizer.grad_norm == 5.0
    assert optimizer.overflow is False
    assert module.weight.grad.tolist()[0] == pytest.approx([0.6, -0.8], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(bad):
    module = line(1.0, 2.0)
    optimizer = ClippedAdamW(parameter_groups(module, weight_decay=0.1), OptimizerConfig(), fused=False)
    module.weight.grad = torch.tensor([[bad, 1.0]])
    optimizer.step()
    assert module.weight.tolist() == [[1.0, 2.0]]
    assert optimizer.state == {}
    assert (optimizer.overflow, optimizer.grad_norm) == (True, math.inf)


def test_the_norm_of_a_long_gradient_is_not_lost_in_rounding():
    # n additions to one float32 lose at most n * 2^-24 of the sum, half of that of its root: added up in rows of 4,096 and
    # then over the 2,442 rows at most 2e-4, on any CPU. In one go ten million equal squares lose 3.5e-3.
    count = 10_000_001
    weight = nn.Parameter(torch.zeros(count))
    weight.grad = torch.full((count,), 0.01)
    optimizer = ClippedAdamW([{"params": [weight]}], OptimizerConfig(max_grad_norm=1.0), fused=False)
    optimizer.step()
    norm = 0.01 * math.sqrt(count)
    assert optimizer.grad_norm == pytest.approx(norm, rel=2e-4)
    assert weight.grad[0].item() == pytest.approx(0.01 / norm, rel=2e-4)


def test_a_short_gradient_has_the_norm_that_torch_gives_it_to_the_bit():
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(shape, generator=generator) for shape in ((512, 512), (7,), (30, 11))]
    assert gradient_norm(gradients).item() == torch.nn.utils.get_total_norm(gradients).item()


def test_blocks_leave_out_nothing_and_no_gradient_has_norm_zero():
    # 3 in the first whole block, 4 in the rest after the last one, and a matrix that is not contiguous
    long = torch.zeros(LONGEST + 3)
    long[0], long[-1] = 3.0, 4.0
    assert gradient_norm([long]).item() == 5.0
    wide = torch.zeros(4096, 128).t()
    wide[5, 7] = 12.0
    assert gradient_norm([long, wide]).item() == 13.0
    assert gradient_norm([]).item() == 0.0
    long[9] = math.nan
    assert not math.isfinite(gradient_norm([long]).item())


def rates(total: int, schedule: Schedule, warmup: float = 0.0, minimum: float = 0.0) -> list[float]:
    return [
        learning_rate(
            step, total_steps=total, peak=2.0, schedule=schedule, warmup_fraction=warmup, min_fraction=minimum
        )
        for step in range(total)
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rates(4, "linear"), [2.0, 1.5, 1.0, 0.5]),  # something is left for the last step
        # (1 + cos(pi / 4)) / 2 * 2 = 1.7071; halfway 1; (1 + cos(3 pi / 4)) / 2 * 2 = 0.2929
        (rates(4, "cosine"), [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]),
        # the minimum is 0.2 of 2.0, 0.4; halfway 0.4 + 1.6 * 0.5
        (rates(2, "linear", minimum=0.2), [2.0, 1.2]),
        (rates(2, "cosine", minimum=0.2), [2.0, 1.2]),
        # a warm-up of 0.4 of 10 steps: 2 * (1, 2, 3, 4) / 4, then constant
        (rates(10, "constant", warmup=0.4), [0.5, 1.0, 1.5, 2.0] + [2.0] * 6),
        (rates(10, "linear", warmup=0.01)[:2], [2.0, 2.0]),  # a fraction of a step takes one step
        # 0.07 * 100 = 7.000000000000001 must give 7 steps: the seventh is the peak
        (rates(100, "constant", warmup=0.07)[5:8], [2 * 6 / 7, 2.0, 2.0]),
        (rates(1, "cosine", warmup=0.05), [2.0]),
    ],
)
def test_rates_rise_to_the_peak_and_fall_towards_the_minimum(found, expected):
    assert found == pytest.approx(expected)


def test_a_step_that_is_not_one_of_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"step = 4: must be in \[0, total_steps = 4\)"):
        learning_rate(4, total_steps=4, peak=1.0, schedule="linear", warmup_fraction=0.0, min_fraction=0.0)


def test_an_optimizer_configuration_gives_its_own_numbers():
    config = OptimizerConfig(learning_rate=2.0, schedule="linear", warmup_fraction=0.25, min_lr_fraction=0.5)
    # one step of warm-up; then from 2 towards 1 over three steps
    assert [scheduled_rate(config, step, 4) for step in range(4)] == pytest.approx([2.0, 2.0, 5 / 3, 4 / 3])
