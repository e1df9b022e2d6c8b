"""Several rewards to one."""

from __future__ import annotations

import pytest

from rlhf_core.config.rewards import FunctionReward, GatedProduct, RewardsConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards.composition import compose, gated_product, weighted_sum

COMPONENTS = {"form": [1.0, 0.0, 0.5], "quality": [2.0, 2.0, 4.0], "brevity": [-1.0, -1.0, 0.0]}


def test_a_weighted_sum() -> None:
    # 0.5 * form + 2 * quality + 1 * brevity
    assert weighted_sum(COMPONENTS, {"form": 0.5, "quality": 2.0, "brevity": 1.0}) == [3.5, 3.0, 8.25]


def test_a_gate_lets_the_other_terms_through_or_gives_the_closed_reward() -> None:
    weights = {"form": 9.0, "quality": 2.0, "brevity": 1.0}  # the gate's own weight is not used
    # sums 3, 3, 8; gates 1, 0, 0.5
    assert gated_product(COMPONENTS, weights, gates=["form"], closed=-4.0) == [3.0, -4.0, 2.0]


def test_a_gate_outside_the_unit_interval_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality = 2\.0: a gate must be in \[0, 1\]"):
        gated_product(COMPONENTS, {"brevity": 1.0}, gates=["quality"], closed=0.0)


def test_the_configuration_chooses_the_composition() -> None:
    terms = {name: FunctionReward(function="m:f", weight=weight) for name, weight in zip(COMPONENTS, (1.0, 1.0, 1.0))}
    assert compose(COMPONENTS, RewardsConfig(terms=terms)) == [2.0, 1.0, 4.5]
    gated = RewardsConfig(terms=terms, composition=GatedProduct(gates=("form",), closed=-1.0))
    assert compose(COMPONENTS, gated) == [1.0, -1.0, 1.5]  # sums 1, 1, 4; 0.5 * 4 + 0.5 * -1
