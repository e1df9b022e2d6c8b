"""Clip-Cov: the covariance of a token, and which tokens lose their gradient."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.policy.clip import ClipCovLoss, token_covariance

# log pi has mean -2 and A has mean 0 over the four masked tokens
LOGPROBS_BL = torch.tensor([[-1.0, -3.0, 50.0], [-1.0, -3.0, 50.0]])
ADVANTAGES_BL = torch.tensor([[2.0, 2.0, 7.0], [-2.0, -2.0, 7.0]])
MASK_BL = torch.tensor([[1, 1, 0], [1, 1, 0]])


def test_the_covariance_is_centred_over_the_step_and_ignores_the_rest() -> None:
    covariance_BL = token_covariance(ADVANTAGES_BL, LOGPROBS_BL, MASK_BL)
    assert covariance_BL.tolist() == [[2.0, -2.0, 0.0], [-2.0, 2.0, 0.0]]
    # its mean is the covariance of log pi and A, which is what lowers the entropy (arXiv 2505.22617)
    pairs = torch.stack([LOGPROBS_BL[MASK_BL != 0], ADVANTAGES_BL[MASK_BL != 0]])
    assert covariance_BL.sum().item() / 4 == pytest.approx(torch.cov(pairs, correction=0)[0, 1].item(), abs=1e-6)


def drawn(fraction: float, seed: int = 0, cov_low: float = 1.0) -> list[tuple[int, int]]:
    method = ClipCovLoss(fraction=fraction, cov_low=cov_low)
    kept_BL = method.step_advantages(ADVANTAGES_BL, LOGPROBS_BL, MASK_BL, seed=seed)
    return [(row, column) for row, column in (kept_BL != ADVANTAGES_BL).nonzero().tolist()]


def test_tokens_are_drawn_inside_the_bounds_only_at_least_one_and_the_same_for_a_seed() -> None:
    assert drawn(1.0) == [(0, 0), (1, 1)]
    assert len(drawn(0.0001)) == 1
    assert drawn(0.25, seed=3) == drawn(0.25, seed=3)
    assert {tuple(drawn(0.25, seed=seed)) for seed in range(20)} == {((0, 0),), ((1, 1),)}
    assert drawn(1.0, cov_low=2.5) == []


def test_a_drawn_token_has_an_advantage_of_zero_and_the_others_keep_theirs() -> None:
    kept_BL = ClipCovLoss(fraction=1.0).step_advantages(ADVANTAGES_BL, LOGPROBS_BL, MASK_BL, seed=0)
    assert kept_BL.tolist() == [[0.0, 2.0, 7.0], [-2.0, 0.0, 7.0]]


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"cov_low = 5\.0: must be < cov_high = 5\.0"):
        ClipCovLoss(cov_low=5.0)
