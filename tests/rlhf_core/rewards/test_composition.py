"""Several rewards to one."""

from __future__ import annotations

import pytest

from rlhf_core.config.rewards import GatedProduct, Gdpo, WeightedSum
from rlhf_core.errors import RewardError
from rlhf_core.rewards.scoring import compose, gated_product, in_group, weighted_sum

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
    weights = dict.fromkeys(COMPONENTS, 1.0)
    groups = ["p", "p", "p"]
    assert compose(COMPONENTS, WeightedSum(), weights, groups) == [2.0, 1.0, 4.5]
    gated = GatedProduct(gates=("form",), closed=-1.0)
    assert compose(COMPONENTS, gated, weights, groups) == [1.0, -1.0, 1.5]  # sums 1, 1, 4; 0.5 * 4 + 0.5 * -1


def test_what_does_not_apply_adds_nothing_and_where_nothing_applies_there_is_no_reward() -> None:
    values = {"maths": [1.0, None, None], "code": [None, 0.5, None], "noted": [7.0, 7.0, 7.0]}
    assert weighted_sum(values, {"maths": 1.0, "code": 4.0}) == [1.0, 2.0, None]
    assert weighted_sum(values, {"maths": 0.0}) == [0.0, None, None], "it applies, and counts for nothing just now"


def test_a_gate_that_does_not_apply_is_open_and_a_shut_one_needs_no_sum() -> None:
    values = {"form": [None, 0.0, 1.0, 0.5], "quality": [2.0, None, None, None]}
    assert gated_product(values, {"quality": 1.0}, gates=["form"], closed=-1.0) == [2.0, -1.0, None, None]


def test_gdpo_puts_every_term_on_one_scale_within_the_answers_of_a_prompt() -> None:
    # of p: quality 0, 1000: -+ 0.707; form 1, 0: +- 0.707, so equal weights cancel exactly. Of q: quality 5, 5: no difference.
    values = {"quality": [0.0, 5.0, 1000.0, 5.0], "form": [1.0, 0.0, 0.0, 1.0]}
    rewards = compose(values, Gdpo(), {"quality": 1.0, "form": 1.0}, ["p", "q", "p", "q"])
    assert rewards == pytest.approx([0.0, -(0.5**0.5), 0.0, 0.5**0.5])
    heavier = compose(values, Gdpo(), {"quality": 3.0, "form": 1.0}, ["p", "q", "p", "q"])
    assert heavier[0] == pytest.approx(-2 * 0.5**0.5)


def test_in_a_group_only_the_answers_it_applies_to_count() -> None:
    found = in_group([2.0, None, 4.0, 6.0, 9.0], ["p", "p", "p", "p", "q"])
    assert found == pytest.approx([-1.0, None, 0.0, 1.0, 0.0])  # mean 4, sample deviation 2; q is alone


def test_equal_values_are_exactly_zero_and_not_rounding_noise_over_noise() -> None:
    assert in_group([0.1, 0.1, 0.1], ["p", "p", "p"]) == [0.0, 0.0, 0.0]
