"""Advantage estimators against slow float64 loops, the truncated likelihood and all choices of k answers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.advantage.base import TokenRewards, group_centered, zero_variance_groups
from rlhf_core.algorithms.advantage.group import (
    FlashReinforceAdvantage,
    GRPOAdvantage,
    MaxRLAdvantage,
    OPOAdvantage,
    PassAtKAdvantage,
    RLOOAdvantage,
)
from rlhf_core.algorithms.advantage.token import GAEAdvantage, ReinforcePPAdvantage, ReMaxAdvantage, discounted_returns
from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError, DataError
from tests.support.losses import compared, estimated


def gae(rewards_BL, values_BL, mask_BL, **options):
    return estimated(GAEAdvantage(whiten=False, **options), rewards_BL, mask_BL, values=values_BL)


def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    return compared(RLOOAdvantage(), rewards_PG)


def opo(rewards_PG: torch.Tensor, lengths_PG: torch.Tensor) -> torch.Tensor:
    return compared(OPOAdvantage(), rewards_PG, lengths_PG)


def slow_gae(
    rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The definition: A_t = sum over l of (gamma lambda)^l delta_{t+l}, over the actions alone."""
    actions = [t for t, m in enumerate(mask) if m]
    r, v = [rewards[t] for t in actions], [values[t] for t in actions] + [0.0]
    deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(actions):
        advantages[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(r)))
        returns[t] = advantages[t] + v[i]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_matches_the_definition_over_ragged_and_split_spans(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    rewards_BL = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    values_BL = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask_BL = torch.tensor(
        [
            [0, 0, 1, 1, 1, 1, 1, 1, 1],
            [0, 1, 1, 1, 0, 0, 0, 0, 0],
            [0, 1, 1, 0, 0, 1, 1, 1, 0],  # two turns with an environment's tokens between them
            [0, 0, 0, 0, 1, 0, 0, 0, 0],
        ]
    )
    advantages_BL, returns_BL = gae(rewards_BL, values_BL, mask_BL, gamma=gamma, gae_lambda=lam)
    for row in range(4):
        advantages, returns = slow_gae(
            rewards_BL[row].tolist(), values_BL[row].tolist(), mask_BL[row].tolist(), gamma, lam
        )
        assert advantages_BL[row].tolist() == pytest.approx(advantages, abs=1e-12)
        assert returns_BL[row].tolist() == pytest.approx(returns, abs=1e-12)


def test_gae_ignores_what_stands_outside_the_mask():
    mask_BL = torch.tensor([[0, 1, 1, 0]])
    clean = gae(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), torch.zeros(1, 4), mask_BL, gamma=1.0, gae_lambda=0.9)
    nan = float("nan")
    dirty = gae(
        torch.tensor([[nan, 1.0, 2.0, 9.0]]), torch.tensor([[5.0, 0.0, 0.0, nan]]), mask_BL, gamma=1.0, gae_lambda=0.9
    )
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


def test_reinforce_pp_is_the_whitened_discounted_return():
    # returns [0 + 0.5 * 2, 2] and [3]; mean 2, population variance 2/3
    rewards_BL, mask_BL = torch.tensor([[0.0, 2.0], [3.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
    scale = (2 / 3) ** -0.5
    advantages_BL, _ = estimated(ReinforcePPAdvantage(gamma=0.5), rewards_BL, mask_BL)
    assert advantages_BL.flatten().tolist() == pytest.approx([-scale, 0.0, scale, 0.0], abs=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_discounted_returns_are_gae_without_values_and_match_the_definition(gamma):
    generator = torch.Generator().manual_seed(1)
    rewards_BL = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    mask_BL = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]])
    dirty_BL = torch.where(mask_BL != 0, rewards_BL, float("nan"))
    returns_BL = discounted_returns(dirty_BL, mask_BL, gamma=gamma)
    by_gae_BL, _ = gae(rewards_BL, torch.zeros_like(rewards_BL), mask_BL, gamma=gamma, gae_lambda=1.0)
    for row in range(3):
        slow, _ = slow_gae(rewards_BL[row].tolist(), [0.0] * 8, mask_BL[row].tolist(), gamma, 1.0)
        assert returns_BL[row].tolist() == pytest.approx(slow, abs=1e-12)
    assert torch.allclose(returns_BL, by_gae_BL, rtol=0, atol=1e-12)


def slow_group(rewards: list[float], lengths: list[int]) -> dict[str, list[float]]:
    """The four estimators of one group, in Python floats."""
    size, mean = len(rewards), sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (size - 1)) ** 0.5
    weighted = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return {
        "group_centered": [r - mean for r in rewards],
        "group_normalized": [(r - mean) / (std + 1e-6) for r in rewards],
        "leave_one_out": [r - (sum(rewards) - r) / (size - 1) for r in rewards],
        "opo": [r - weighted for r in rewards],
    }


def test_group_estimators_match_slow_loops_and_do_not_mix_groups_or_order():
    generator = torch.Generator().manual_seed(2)
    rewards_PG = torch.randn(4, 5, generator=generator)
    lengths_PG = torch.randint(1, 40, (4, 5), generator=generator)
    order = torch.tensor([3, 0, 4, 1, 2])
    for name, estimator in {
        "group_centered": lambda r, n: group_centered(r),
        "group_normalized": lambda r, n: compared(GRPOAdvantage(), r),
        "leave_one_out": lambda r, n: leave_one_out(r),
        "opo": opo,
    }.items():
        advantages_PG = estimator(rewards_PG, lengths_PG)
        for group in range(4):
            slow = slow_group(rewards_PG[group].tolist(), lengths_PG[group].tolist())[name]
            assert advantages_PG[group].tolist() == pytest.approx(slow, rel=1e-6, abs=1e-6)
        shuffled_PG = estimator(rewards_PG[:, order], lengths_PG[:, order])
        assert torch.allclose(shuffled_PG, advantages_PG[:, order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "estimator",
    [
        group_centered,
        leave_one_out,
        lambda rewards: compared(GRPOAdvantage(), rewards),
        lambda rewards: opo(rewards, torch.tensor([[3, 50, 7]])),
    ],
)
def test_a_group_without_variance_gets_zero_advantage_not_nan_or_noise(estimator):
    # the fp32 mean of three 0.7 is not 0.7: noise over noise must not become an advantage
    assert estimator(torch.full((1, 3), 0.7)).tolist() == [[0.0, 0.0, 0.0]]


def test_groups_that_cannot_teach_are_counted():
    assert zero_variance_groups(torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])) == 2


@pytest.mark.parametrize(
    "estimator",
    [
        leave_one_out,
        group_centered,
        lambda rewards: compared(GRPOAdvantage(), rewards),
        lambda rewards: opo(rewards, torch.ones(2, 1)),
    ],
)
def test_a_group_of_one_is_refused_with_the_remedy(estimator):
    with pytest.raises(ConfigError, match=r"group_size = 1: .* raise samples_per_prompt"):
        estimator(torch.tensor([[1.0], [2.0]]))


def test_a_baseline_of_the_step_needs_no_second_answer_and_compares_prompts():
    estimator = FlashReinforceAdvantage()
    # mean (1 + 2 + 6) / 3 = 3; of two answers to each prompt: (1 + 2 + 6 + 3) / 4 = 3
    assert compared(estimator, torch.tensor([[1.0], [2.0], [6.0]])).flatten().tolist() == [-2.0, -1.0, 3.0]
    assert compared(estimator, torch.tensor([[1.0, 2.0], [6.0, 3.0]])).tolist() == [[-2.0, -1.0], [3.0, 0.0]]
    assert compared(estimator, torch.full((3, 1), 0.7)).flatten().tolist() == [0.0, 0.0, 0.0]
    assert PPOConfig(advantage=estimator, samples_per_prompt=1).uses_values is False


def test_the_spread_of_the_batch_does_not_blow_up_a_group_of_nearly_equal_rewards():
    rewards_PG = torch.tensor([[0.0, 4.0], [2.0, 2.1]])
    # all four: mean 2.025, squares 4.100625 + 3.900625 + 0.000625 + 0.005625 = 8.0075, over 3
    std = (8.0075 / 3) ** 0.5
    expected = torch.tensor([[-2.0, 2.0], [-0.05, 0.05]]) / (std + 1e-6)
    assert torch.allclose(compared(GRPOAdvantage(std="batch"), rewards_PG), expected, rtol=1e-5)


def test_remax_measures_returns_from_the_greedy_answers_reward():
    # returns 1 - 0.25 and 1; the greedy answer earned 0.5
    tokens = TokenRewards(
        rewards=torch.tensor([[9.0, -0.25, 1.0]]),
        loss_mask=torch.tensor([[0, 1, 1]]),
        values=None,
        greedy=torch.tensor([0.5]),
    )
    advantages_BL, returns_BL = ReMaxAdvantage().estimate(tokens)
    assert advantages_BL.tolist() == [[0.0, 0.25, 0.5]] and returns_BL.tolist() == [[0.0, 0.75, 1.0]]
    with pytest.raises(ConfigError, match=r"advantage\.type = 'remax': needs the reward of a greedy answer"):
        ReMaxAdvantage().estimate(replace(tokens, greedy=None))


# ---------------------------------------------------------------- MaxRL and pass@k


def test_a_reward_is_measured_in_means_of_its_group():
    # mean 1/4: a success is worth (1 - 1/4) / (1/4) = 3, a failure -1; mean 3/4: 1/3 and -1
    rewards_PG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = torch.tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(compared(MaxRLAdvantage(), rewards_PG), expected, rtol=1e-6)


@pytest.mark.parametrize(("p", "group"), [(0.3, 3), (0.05, 4), (0.8, 2)])
def test_the_expected_gradient_is_that_of_the_first_terms_of_the_log_likelihood(p, group):
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


def test_groups_without_a_baseline_are_refused():
    with pytest.raises(DataError, match=r"reward = -1\.0: maxrl divides by the mean reward"):
        compared(MaxRLAdvantage(), torch.tensor([[1.0, -1.0]]))
    with pytest.raises(DataError, match="lengths = 0"):
        opo(torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 0]]))


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
def test_pass_at_k_is_the_average_over_all_choices(k):
    for passed in range(6):
        rewards = [1.0] * passed + [0.0] * (5 - passed)
        (ours,) = compared(PassAtKAdvantage(k=k), torch.tensor([rewards], dtype=torch.float64)).tolist()
        assert ours == pytest.approx(by_choices(rewards, k), abs=1e-12)


def test_a_group_smaller_than_k_is_refused_when_the_profile_is_read():
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 3: pass@k .* at least 4"):
        PPOConfig(advantage=PassAtKAdvantage(k=4), samples_per_prompt=3, kl={"in": "loss"})
    with pytest.raises(ConfigError, match=r"advantage\.k = 4: draws k answers of a group of 3"):
        compared(PassAtKAdvantage(k=4), torch.zeros(1, 3))
