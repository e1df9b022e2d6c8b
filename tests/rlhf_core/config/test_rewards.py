"""The reward section of a profile."""

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.rewards import FunctionReward, GatedProduct, OverlongPenalty, RewardModelReward, RewardsConfig
from rlhf_core.schema.base import keyed

FORM = {"type": "function", "function": "rlhf_core.rewards.verifiable:think_format"}
JUDGE = {"type": "judge", "url": "http://localhost:1/v1", "model": "m", "template": "Rate {completion}"}
VERDICTS = {"type": "generative_reward_model", "model": "sft", "template": "{completion}"}
GROUP_JUDGE = JUDGE | {
    "template": "{answers}",
    "compares": "group",
    "verdict": {"type": "json", "field": "scores"},
}


def test_without_a_section_the_reward_is_the_trained_reward_model():
    assert RewardsConfig().terms == {"reward_model": RewardModelReward(model="reward_model", weight=1.0)}


def test_terms_are_chosen_by_type():
    config = RewardsConfig.model_validate({"terms": {"form": FORM, "quality": {"type": "reward_model", "weight": 0.5}}})
    assert isinstance(config.terms["form"], FunctionReward)
    assert config.terms["quality"].weight == 0.5


def test_how_a_function_runs_is_not_part_of_the_key_and_what_it_gives_is():
    runs = {"timeout_s": 5.0, "workers": 4, "batch_size": 8, "retries": 2, "memory_mb": 512}
    runs |= {"on_failure": "invalid", "cache": True}
    plain, running = (RewardsConfig.model_validate({"terms": {"form": FORM | extra}}) for extra in ({}, runs))
    assert keyed(running) == keyed(plain)
    assert {"function", "arguments", "protocol", "weight", "compares"} <= set(keyed(plain)["terms"]["form"])
    for extra in ({"arguments": {"pattern": "x"}}, {"compares": "group"}):
        assert keyed(RewardsConfig.model_validate({"terms": {"form": FORM | extra}})) != keyed(plain)


def test_where_a_server_runs_is_not_part_of_the_key_and_its_version_is():
    def term(**extra: Any) -> dict[str, Any]:
        given = {"type": "remote", "urls": ["http://a:1"]} | extra
        return keyed(RewardsConfig.model_validate({"terms": {"far": given}}))

    assert term(urls=["http://b:2", "https://c"], token_env="TOKEN") == term()
    assert term(version="2") != term()
    first, second = (
        keyed(RewardsConfig.model_validate({"terms": {"judge": JUDGE | extra}}))
        for extra in ({}, {"url": "http://elsewhere/v1", "concurrency": 2})
    )
    assert first == second
    assert keyed(RewardsConfig.model_validate({"terms": {"judge": JUDGE | {"model": "other"}}})) != first


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"terms": {"all": {"type": "ensemble", "models": ["one"]}}}, "at least 2"),
        ({"terms": {"steps": {"type": "process_reward_model", "reduce": "max"}}}, "'product'"),
        ({"terms": {"form": FORM | {"function": "no_colon"}}}, "must read package.module:function"),
        ({"terms": {"form": FORM | {"weight": 0.0}}}, "no term has a weight"),
        ({"terms": {"overlong": FORM}}, "the overlong penalty uses this name"),
        ({"composition": {"type": "gated_product", "gates": ["form"]}}, "must be names of terms"),
        (
            {"terms": {"form": FORM}, "composition": {"type": "gated_product", "gates": ["form"]}},
            "no term has a weight",
        ),
        ({"terms": {"form": FORM | {"weight_end": 2.0}}}, "give both or none"),
        ({"terms": {"form": FORM | {"weight_steps": 2}}}, "give both or none"),
        ({"terms": {"form": FORM | {"protocol": "verl"}}}, "'trl_text'"),
        ({"terms": {"form": FORM | {"compares": "group", "cache": True}}}, "depends on the other answers"),
        ({"terms": {"form": FORM | {"compares": "batch", "workers": 2}}}, "there is only one call"),
        ({"terms": {"form": FORM | {"compares": "group", "batch_size": 8}}}, "decides it; remove it"),
        (
            {"terms": {"far": {"type": "remote", "urls": ["http://a"], "compares": "group", "cache": True}}},
            "cache = true",
        ),
        ({"terms": {"far": {"type": "remote", "urls": []}}}, "at least 1"),
        ({"terms": {"far": {"type": "remote", "urls": ["host:80"]}}}, "must begin with http"),
        ({"terms": {"far": {"type": "remote", "urls": ["http://host:port/x"]}}}, "an invalid port"),
        ({"terms": {"far": {"type": "remote", "urls": ["http://"]}}}, "has no host"),
        ({"terms": {"judge": JUDGE | {"url": "http://host:99999/v1"}}}, "an invalid port"),
        ({"terms": {"judge": JUDGE | {"template": "How good?"}}}, r"must hold \{completion\}"),
        ({"terms": {"judge": JUDGE | {"low": 3.0, "high": 3.0}}}, "must be below high"),
        ({"terms": {"judge": VERDICTS | {"template": "Good?"}}}, r"must hold \{completion\}"),
        ({"terms": {"judge": VERDICTS | {"verdicts": {"Yes": 1.0}}}}, "at least 2"),
        (
            {"terms": {"judge": VERDICTS | {"verdicts": {"Yes": 1.0, "No": 1.0}}}},
            "must be texts with different, finite values",
        ),
        ({"terms": {"judge": JUDGE | {"rubric_column": "r"}}}, "rubric_column = 'r': the template does not show it"),
        (
            {"terms": {"judge": JUDGE | {"template": "{completion} {criterion}"}}},
            "no column holds one; set rubric_column",
        ),
        ({"terms": {"judge": JUDGE | {"orders": 1}}}, "orders = 1: one answer has no order"),
        ({"terms": {"judge": JUDGE | {"compares": "group"}}}, r"must hold \{answers\}"),
        ({"terms": {"judge": GROUP_JUDGE | {"verdict": {"type": "pattern"}}}}, "verdict: reads one score"),
        ({"terms": {"judge": GROUP_JUDGE | {"cache": True}}}, "depends on the other answers"),
        (
            {"terms": {"judge": GROUP_JUDGE | {"template": "{answers} {criterion}", "rubric_column": "r"}}},
            r"\{criterion\} is for one answer",
        ),
        (
            {"terms": {"judge": JUDGE | {"verdict": {"type": "pattern", "pattern": "score"}}}},
            "must have one group, not",
        ),
        (
            {"terms": {"judge": JUDGE | {"verdict": {"type": "pattern", "pattern": "("}}}},
            "must be a regular expression",
        ),
        ({"terms": {"form": FORM | {"normalize": "group"}}, "composition": {"type": "gdpo"}}, "gdpo normalizes"),
        (
            {
                "terms": {"form": FORM | {"normalize": "running"}, "quality": {"type": "reward_model"}},
                "composition": {"type": "gated_product", "gates": ["form"]},
            },
            "a gate must stay in",
        ),
        ({"overlong": {"max_tokens": 8, "buffer_tokens": 9}}, "must be <= max_tokens = 8"),
        ({"truncated": {"type": "scale", "amount": 1.0}}, r"amount = 1\.0: a scale must be in \[0, 1\)"),
        ({"truncated": {"amount": -1.0}}, r"amount = -1\.0: a penalty is subtracted and must be > 0"),
        ({"truncated": {}, "terms": {"truncated": FORM}}, "rewards.truncated uses this name"),
        ({"normalized": "running"}, "Extra inputs"),
    ],
)
def test_a_section_that_cannot_work_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        RewardsConfig.model_validate(section)


def test_a_gate_beside_a_weighted_term_is_accepted():
    config = RewardsConfig.model_validate(
        {
            "terms": {"form": FORM, "quality": {"type": "reward_model"}},
            "composition": {"type": "gated_product", "gates": ["form"], "closed": -2.0},
            "overlong": {"max_tokens": 64, "buffer_tokens": 16},
        }
    )
    assert config.composition == GatedProduct(gates=("form",), closed=-2.0)
    assert config.overlong == OverlongPenalty(max_tokens=64, buffer_tokens=16, factor=1.0)


def test_a_term_whose_weight_comes_later_is_a_term_with_a_weight():
    late = FORM | {"weight": 0.0, "weight_end": 1.0, "weight_steps": 10}
    assert RewardsConfig.model_validate({"terms": {"form": late}}).terms["form"].weight_steps == 10
