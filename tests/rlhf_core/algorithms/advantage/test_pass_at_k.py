"""Pass@k training against the average over all choices of k answers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.advantage.pass_at_k import PassAtKAdvantage, pass_at_k
from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError


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
def test_it_is_the_average_over_all_choices(k: int) -> None:
    for passed in range(6):
        rewards = [1.0] * passed + [0.0] * (5 - passed)
        (ours,) = pass_at_k(torch.tensor([rewards], dtype=torch.float64), k=k, threshold=0.5).tolist()
        assert ours == pytest.approx(by_choices(rewards, k), abs=1e-12)


def test_one_success_in_four_by_hand() -> None:
    # k = 2: R = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2; passed: 1; failed: (1/2 - C(2,1)/C(3,1)) / (1/2) = -1/3
    advantages_PG = pass_at_k(torch.tensor([[0.0, 7.0, 0.1, 0.0]]), k=2, threshold=0.5)
    assert advantages_PG[0].tolist() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], rel=1e-6)


def test_an_easy_prompt_is_worth_nothing_once_every_choice_passes() -> None:
    assert pass_at_k(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), k=2, threshold=0.5).tolist() == [[0.0] * 4]
    assert pass_at_k(torch.zeros(1, 4), k=2, threshold=0.5).tolist() == [[0.0] * 4]


def test_a_group_smaller_than_k_is_refused_when_the_profile_is_read() -> None:
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 3: pass@k .* at least 4"):
        PPOConfig(advantage=PassAtKAdvantage(k=4), samples_per_prompt=3, kl_in="loss")
    with pytest.raises(ConfigError, match=r"advantage\.k = 4: draws k answers of a group of 3"):
        pass_at_k(torch.zeros(1, 3), k=4, threshold=0.5)
