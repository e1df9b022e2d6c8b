"""MaxRL: its advantage by hand, and that its expected gradient is that of the truncated likelihood."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlhf_core.algorithms.advantage.maxrl import mean_normalized
from rlhf_core.errors import DataError


def test_a_reward_is_measured_in_means_of_its_group() -> None:
    # mean 1/4: a success is worth (1 - 1/4) / (1/4) = 3, a failure -1; mean 3/4: 1/3 and -1
    rewards_PG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = torch.tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(mean_normalized(rewards_PG), expected, rtol=1e-6)


@pytest.mark.parametrize(("p", "group"), [(0.3, 3), (0.05, 4), (0.8, 2)])
def test_the_expected_gradient_is_that_of_the_first_terms_of_the_log_likelihood(p: float, group: int) -> None:
    """One decision with P(success) = p = sigmoid(theta): grad log pi is 1 - p on a success and -p on a failure.

    The target is d/d theta of -sum over k = 1..G - 1 of (1 - p)^k / k = (1 - p) (1 - (1 - p)^(G - 1)).
    """
    expected = 0.0
    for outcome in itertools.product([1.0, 0.0], repeat=group):
        probability = math.prod(p if won else 1 - p for won in outcome)
        advantages = mean_normalized(torch.tensor([outcome], dtype=torch.float64))[0].tolist()
        scores = [1 - p if won else -p for won in outcome]
        expected += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / group
    assert expected == pytest.approx((1 - p) * (1 - (1 - p) ** (group - 1)), rel=1e-9)


def test_rewards_below_zero_are_refused() -> None:
    with pytest.raises(DataError, match=r"reward = -1\.0: maxrl divides by the mean reward"):
        mean_normalized(torch.tensor([[1.0, -1.0]]))
