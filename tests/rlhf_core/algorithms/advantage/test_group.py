"""MaxRL by hand and against the truncated likelihood; pass@k training against the average over all choices of k answers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.advantage.group import MaxRLAdvantage, PassAtKAdvantage
from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError, DataError
from tests.support.losses import compared


def test_a_reward_is_measured_in_means_of_its_group() -> None:
    # mean 1/4: a success is worth (1 - 1/4) / (1/4) = 3, a failure -1; mean 3/4: 1/3 and -1
    rewards_PG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = torch.tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(compared(MaxRLAdvantage(), rewards_PG), expected, rtol=1e-6)


@pytest.mark.parametrize(("p", "group"), [(0.3, 3), (0.05, 4), (0.8, 2)])
def test_the_expected_gradient_is_that_of_the_first_terms_of_the_log_likelihood(p: float, group: int) -> None:
    """One decision with P(success) = p = sigmoid(theta): grad log pi is 1 - p on a success and -p on a failure.

    The target is d/d theta of -sum over k = 1..G - 1 of (1 - p)^k / k = (1 - p) (1 - (1 - p)^(G - 1)).
    """
    expected = 0.0
    for outcome in itertools.product([1.0, 0.0], repeat=group):
        probability = math.prod(p if won else 1 - p for won in outcome)
        advantages = compared(MaxRLAdvantage(), torch.tensor([outcome], dtype=torch.float64))[0].tolist()
        scores = [1 - p if won else -p for won in outcome]
        expected += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / group
    assert expected == pytest.approx((1 - p) * (1 - (1 - p) ** (group - 1)), rel=1e-9)


def test_rewards_below_zero_are_refused() -> None:
    with pytest.raises(DataError, match=r"reward = -1\.0: maxrl divides by the mean reward"):
        compared(MaxRLAdvantage(), torch.tensor([[1.0, -1.0]]))


def by_choices(rewards: list[float], k: int) -> list[float]:
    """Score every choice of k by whether one passed, standardize the scores, and average those that hold an answer."""
    choices = list(itertools.combinations(range(len(rewards)), k))
    scores = [max(rewards[i] for i in choice) for choice in choices]
    mean = sum(scores) / len(scores)
    spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    if spread == 0:
        return [0.0] * len(rewards)
    return [
        sum((score - mean) / spread for choice, score in zip(choices, scores, strict=True) if i in choice)
        / sum(i in choice for choice in choices)
        for i in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_average_over_all_choices(k: int) -> None:
    for passed in range(6):
        rewards = [1.0] * passed + [0.0] * (5 - passed)
        (ours,) = compared(PassAtKAdvantage(k=k), torch.tensor([rewards], dtype=torch.float64)).tolist()
        assert ours == pytest.approx(by_choices(rewards, k), abs=1e-12)


def test_one_success_in_four_by_hand() -> None:
    # k = 2: R = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2; passed: 1; failed: (1/2 - C(2,1)/C(3,1)) / (1/2) = -1/3
    advantages_PG = compared(PassAtKAdvantage(k=2), torch.tensor([[0.0, 7.0, 0.1, 0.0]]))
    assert advantages_PG[0].tolist() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], rel=1e-6)


def test_an_easy_prompt_is_worth_nothing_once_every_choice_passes() -> None:
    assert compared(PassAtKAdvantage(k=2), torch.tensor([[1.0, 1.0, 1.0, 0.0]])).tolist() == [[0.0] * 4]
    assert compared(PassAtKAdvantage(k=2), torch.zeros(1, 4)).tolist() == [[0.0] * 4]


def test_a_group_smaller_than_k_is_refused_when_the_profile_is_read() -> None:
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 3: pass@k .* at least 4"):
        PPOConfig(advantage=PassAtKAdvantage(k=4), samples_per_prompt=3, kl_in="loss")
    with pytest.raises(ConfigError, match=r"advantage\.k = 4: draws k answers of a group of 3"):
        compared(PassAtKAdvantage(k=4), torch.zeros(1, 3))
