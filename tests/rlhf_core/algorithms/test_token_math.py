"""Sums over masked tokens and bounded log-ratios."""

from __future__ import annotations

import math

import torch

from rlhf_core.algorithms.token_math import at_least_fp32, bounded, masked, masked_count, masked_sum, schulman_k3


def test_a_nan_at_a_masked_position_reaches_neither_the_sum_nor_the_gradient() -> None:
    x_BL = torch.tensor([[1.0, float("nan"), 2.0]], requires_grad=True)
    total = masked_sum(x_BL, torch.tensor([[1, 0, 1]]))
    total.backward()
    assert total.item() == 3.0
    assert x_BL.grad is not None and x_BL.grad.tolist() == [[1.0, 0.0, 1.0]]


def test_half_precision_is_summed_in_fp32() -> None:
    x_BL = torch.full((1, 1000), 1.0, dtype=torch.bfloat16)  # bf16 has 8 bits: it would stop counting at 256
    assert masked_sum(x_BL, torch.ones(1, 1000)).item() == 1000.0
    assert masked(x_BL.double(), torch.ones(1, 1000)).dtype == torch.float64


def test_a_huge_log_ratio_stays_finite_through_exp() -> None:
    assert bounded(torch.tensor([1e4, -1e4, 3.0])).tolist() == [20.0, -20.0, 3.0]


def test_k3_matches_its_definition_and_keeps_small_differences() -> None:
    d = 0.5
    assert math.isclose(schulman_k3(torch.tensor(d)).item(), math.exp(-d) - 1 + d, rel_tol=1e-6)
    # exp(-d) - 1 + d = d^2/2 for small d: the plain fp32 form would give 0 or 6e-8 noise here.
    assert math.isclose(schulman_k3(torch.tensor(1e-2)).item(), 4.983374916805357e-05, rel_tol=1e-3)


def test_the_count_of_an_empty_mask_is_one_so_that_nothing_divides_by_zero() -> None:
    assert masked_count(torch.tensor([[1, 0, 1]])).item() == 2
    assert masked_count(torch.zeros(2, 3)).item() == 1


def test_precision_is_raised_and_never_lowered() -> None:
    dtypes = [at_least_fp32(torch.ones(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float32, torch.float64)]
    assert dtypes == [torch.float32, torch.float32, torch.float64]
