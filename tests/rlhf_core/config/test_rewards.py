"""The reward section of a profile."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import keyed
from rlhf_core.config.rewards import FunctionReward, GatedProduct, OverlongPenalty, RewardModelReward, RewardsConfig

FORM = {"type": "function", "function": "rlhf_core.rewards.verifiable:think_format"}


def test_without_a_section_the_reward_is_the_trained_reward_model() -> None:
    assert RewardsConfig().terms == {"reward_model": RewardModelReward(model="reward_model", weight=1.0)}


def test_terms_are_chosen_by_type() -> None:
    config = RewardsConfig.model_validate({"terms": {"form": FORM, "quality": {"type": "reward_model", "weight": 0.5}}})
    assert isinstance(config.terms["form"], FunctionReward)
    assert config.terms["quality"].weight == 0.5


def test_a_deadline_is_not_part_of_the_key_and_a_weight_is() -> None:
    config = RewardsConfig.model_validate({"terms": {"form": FORM | {"timeout_s": 5.0}}})
    assert keyed(config)["terms"]["form"] == FORM | {"weight": 1.0}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"terms": {}}, "at least 1"),
        ({"terms": {"all": {"type": "ensemble", "models": ["one"]}}}, "at least 2"),
        ({"terms": {"steps": {"type": "process_reward_model", "reduce": "max"}}}, "'product'"),
        ({"terms": {"form": FORM | {"function": "no_colon"}}}, "must read package.module:function"),
        ({"terms": {"form": FORM | {"weight": 0.0}}}, "no term has a weight"),
        ({"terms": {"overlong": FORM}}, "taken by the overlong penalty"),
        ({"composition": {"type": "gated_product", "gates": ["form"]}}, "must name terms"),
        (
            {"terms": {"form": FORM}, "composition": {"type": "gated_product", "gates": ["form"]}},
            "no term has a weight",
        ),
        ({"overlong": {"max_tokens": 8, "buffer_tokens": 9}}, "must be <= max_tokens = 8"),
        ({"normalize": "running"}, "Extra inputs"),
    ],
)
def test_a_section_that_cannot_work_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardsConfig.model_validate(section)


def test_a_gate_beside_a_weighted_term_is_accepted() -> None:
    config = RewardsConfig.model_validate(
        {
            "terms": {"form": FORM, "quality": {"type": "reward_model"}},
            "composition": {"type": "gated_product", "gates": ["form"], "closed": -2.0},
            "overlong": {"max_tokens": 64, "buffer_tokens": 16},
        }
    )
    assert config.composition == GatedProduct(gates=("form",), closed=-2.0)
    assert config.overlong == OverlongPenalty(max_tokens=64, buffer_tokens=16, factor=1.0)
