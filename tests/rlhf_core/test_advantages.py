"""Advantage estimators against slow float64 loops and hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.advantages import (
    dr_grpo,
    gae,
    group_mean_baseline,
    grpo,
    reinforce_pp,
    rloo,
    whiten,
    zero_variance_groups,
)
from rlhf_core.errors import ConfigError


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


def test_reinforce_pp_is_the_whitened_discounted_return() -> None:
    # returns with gamma 0.5: row 0 [0 + 0.5*2, 2] = [1, 2]; row 1 [3]; mean 2, population variance 2/3
    rewards_BL, mask_BL = torch.tensor([[0.0, 2.0], [3.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
    scale = (2 / 3) ** -0.5
    advantages_BL = reinforce_pp(rewards_BL, mask_BL, gamma=0.5)
    assert advantages_BL.flatten().tolist() == pytest.approx([-scale, 0.0, scale, 0.0], abs=1e-5)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 1 - (2+6)/2 = -3; 2 - (1+6)/2 = -1.5; 6 - (1+2)/2 = 4.5
    assert rloo(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[-3.0, -1.5, 4.5]]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 1/2, sample variance ((1/2)^2 * 4) / 3 = 1/3
    std = (1 / 3) ** 0.5
    expected = [0.5 / (std + 0.01), -0.5 / (std + 0.01), -0.5 / (std + 0.01), 0.5 / (std + 0.01)]
    assert grpo(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), eps=0.01)[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_group_without_variance_gets_zero_advantage_not_nan() -> None:
    # the fp32 mean of three 0.7 is not 0.7: noise over noise must not become an advantage
    assert grpo(torch.full((1, 3), 0.7), eps=1e-6).tolist() == [[0.0, 0.0, 0.0]]


def test_dr_grpo_and_the_group_baseline_only_subtract_the_mean() -> None:
    rewards_PG = torch.tensor([[1.0, 3.0], [10.0, 4.0]])
    assert dr_grpo(rewards_PG).tolist() == [[-1.0, 1.0], [3.0, -3.0]]
    assert group_mean_baseline(rewards_PG).tolist() == [[-1.0, 1.0], [3.0, -3.0]]


def test_whitening_can_keep_the_mean_and_looks_only_at_the_mask() -> None:
    x_BL, mask_BL = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[1, 1, 0]])  # mean 2, population std 1
    assert whiten(x_BL, mask_BL, shift_mean=True)[0].tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-6)
    assert whiten(x_BL, mask_BL, shift_mean=False)[0].tolist() == pytest.approx([1.0, 3.0, 0.0], abs=1e-6)


def test_groups_that_cannot_teach_are_counted() -> None:
    assert zero_variance_groups(torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])) == 2


@pytest.mark.parametrize("estimator", [rloo, dr_grpo, group_mean_baseline, lambda rewards: grpo(rewards, eps=1e-6)])
def test_a_group_of_one_is_refused_with_the_remedy(estimator) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"group_size = 1: .* raise the samples per prompt"):
        estimator(torch.tensor([[1.0], [2.0]]))
