"""Advantage estimators against slow float64 loops and hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithms.advantage.base import TokenRewards, group_centered, whiten, zero_variance_groups
from rlhf_core.algorithms.advantage.group import GRPOAdvantage, OPOAdvantage, RLOOAdvantage
from rlhf_core.algorithms.advantage.token import GAEAdvantage, ReMaxAdvantage, discounted_returns
from rlhf_core.errors import ConfigError, DataError
from tests.support.losses import compared, estimated


def gae(rewards_BL, values_BL, mask_BL, **options):  # type: ignore[no-untyped-def]
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


def test_gae_matches_two_steps_worked_by_hand() -> None:
    # delta_1 = 1 + 0 - 0.4 = 0.6; delta_0 = 0 + 0.9*0.4 - 0.5 = -0.14; A_0 = -0.14 + 0.9*0.5*0.6 = 0.13
    advantages_BL, returns_BL = gae(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.4]]), torch.ones(1, 2), gamma=0.9, gae_lambda=0.5
    )
    assert advantages_BL[0].tolist() == pytest.approx([0.13, 0.6], rel=1e-6)
    assert returns_BL[0].tolist() == pytest.approx([0.63, 1.0], rel=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_matches_the_definition_over_ragged_and_split_spans(gamma: float, lam: float) -> None:
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


def test_undiscounted_gae_returns_are_the_rewards_to_come() -> None:
    _, returns_BL = gae(
        torch.tensor([[0.0, -0.1, -0.2, 1.0]]),
        torch.randn(1, 4),
        torch.tensor([[0, 1, 1, 1]]),
        gamma=1.0,
        gae_lambda=1.0,
    )
    assert returns_BL[0].tolist() == pytest.approx([0.0, 0.7, 0.8, 1.0], abs=1e-6)


def test_gae_ignores_what_stands_outside_the_mask() -> None:
    mask_BL = torch.tensor([[0, 1, 1, 0]])
    clean = gae(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), torch.zeros(1, 4), mask_BL, gamma=1.0, gae_lambda=0.9)
    nan = float("nan")
    dirty = gae(
        torch.tensor([[nan, 1.0, 2.0, 9.0]]), torch.tensor([[5.0, 0.0, 0.0, nan]]), mask_BL, gamma=1.0, gae_lambda=0.9
    )
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


def test_discounted_returns_are_summed_from_the_end() -> None:
    # gamma 0.5: row 0 [0 + 0.5*2, 2] = [1, 2]; row 1 [3]
    rewards_BL, mask_BL = torch.tensor([[0.0, 2.0], [3.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
    assert discounted_returns(rewards_BL, mask_BL, gamma=0.5).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_reinforce_pp_is_the_whitened_discounted_return() -> None:
    # returns [1, 2] and [3] as above; mean 2, population variance 2/3
    rewards_BL, mask_BL = torch.tensor([[0.0, 2.0], [3.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
    scale = (2 / 3) ** -0.5
    advantages_BL = whiten(discounted_returns(rewards_BL, mask_BL, gamma=0.5), mask_BL)
    assert advantages_BL.flatten().tolist() == pytest.approx([-scale, 0.0, scale, 0.0], abs=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_discounted_returns_are_gae_without_values_and_match_the_definition(gamma: float) -> None:
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


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # 1 - (2+6)/2 = -3; 2 - (1+6)/2 = -1.5; 6 - (1+2)/2 = 4.5
    assert leave_one_out(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[-3.0, -1.5, 4.5]]


def test_normalised_groups_are_divided_by_the_sample_standard_deviation() -> None:
    # mean 1/2, sample variance ((1/2)^2 * 4) / 3 = 1/3
    std = (1 / 3) ** 0.5
    expected = [0.5 / (std + 0.01), -0.5 / (std + 0.01), -0.5 / (std + 0.01), 0.5 / (std + 0.01)]
    advantages_PG = compared(GRPOAdvantage(eps=0.01), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    assert advantages_PG[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_centered_groups_only_lose_their_mean() -> None:
    assert group_centered(torch.tensor([[1.0, 3.0], [10.0, 4.0]])).tolist() == [[-1.0, 1.0], [3.0, -3.0]]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1*10 + 0*30) / 40 = 0.25, where the plain mean is 0.5
    advantages_PG = opo(torch.tensor([[1.0, 0.0]]), torch.tensor([[10, 30]]))
    assert advantages_PG.tolist() == [[0.75, -0.25]]


def test_opo_with_equal_lengths_is_the_centered_group() -> None:
    rewards_PG = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.25, 0.0]])
    assert torch.allclose(opo(rewards_PG, torch.full((2, 3), 7)), group_centered(rewards_PG), rtol=1e-6, atol=1e-7)


def test_opo_refuses_a_group_without_tokens() -> None:
    with pytest.raises(DataError, match="lengths = 0"):
        opo(torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 0]]))


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


def test_group_estimators_match_slow_loops_and_do_not_mix_groups_or_order() -> None:
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
def test_a_group_without_variance_gets_zero_advantage_not_nan_or_noise(estimator) -> None:  # type: ignore[no-untyped-def]
    # the fp32 mean of three 0.7 is not 0.7: noise over noise must not become an advantage
    assert estimator(torch.full((1, 3), 0.7)).tolist() == [[0.0, 0.0, 0.0]]


def test_whitening_can_keep_the_mean_and_looks_only_at_the_mask() -> None:
    x_BL, mask_BL = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[1, 1, 0]])  # mean 2, population std 1
    assert whiten(x_BL, mask_BL, shift_mean=True)[0].tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-6)
    assert whiten(x_BL, mask_BL, shift_mean=False)[0].tolist() == pytest.approx([1.0, 3.0, 0.0], abs=1e-6)


def test_whitened_values_have_mean_zero_and_population_variance_one_and_ignore_the_rest() -> None:
    generator = torch.Generator().manual_seed(3)
    values_BL = 3 * torch.randn(4, 6, generator=generator) + 2
    mask_BL = torch.rand(4, 6, generator=generator) > 0.4
    white_BL = whiten(torch.where(mask_BL, values_BL, float("nan")), mask_BL)
    at = [values_BL[b, t].item() for b, t in mask_BL.nonzero().tolist()]
    mean = sum(at) / len(at)
    std = (sum((x - mean) ** 2 for x in at) / len(at)) ** 0.5
    assert white_BL[mask_BL].tolist() == pytest.approx([(x - mean) / std for x in at], rel=1e-5, abs=1e-6)
    assert bool((white_BL[~mask_BL] == 0).all())


def test_an_empty_mask_whitens_to_zeros() -> None:
    assert whiten(torch.ones(2, 2), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_groups_that_cannot_teach_are_counted() -> None:
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
def test_a_group_of_one_is_refused_with_the_remedy(estimator) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"group_size = 1: .* raise samples_per_prompt"):
        estimator(torch.tensor([[1.0], [2.0]]))


def test_the_spread_of_the_batch_does_not_blow_up_a_group_of_nearly_equal_rewards() -> None:
    rewards_PG = torch.tensor([[0.0, 4.0], [2.0, 2.1]])
    # all four: mean 2.025, squares 4.100625 + 3.900625 + 0.000625 + 0.005625 = 8.0075, over 3
    std = (8.0075 / 3) ** 0.5
    expected = torch.tensor([[-2.0, 2.0], [-0.05, 0.05]]) / (std + 1e-6)
    assert torch.allclose(compared(GRPOAdvantage(std="batch"), rewards_PG), expected, rtol=1e-5)


def test_remax_measures_returns_from_the_greedy_answers_reward() -> None:
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
