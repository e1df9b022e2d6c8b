"""Conditional SFT's data: levels by quantile, worked by hand, and prompts that ask for the best one."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_core.data.shards import write_rollouts
from rlhf_core.data.tables import read_demonstrations, read_prompts, write_prompts
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt, PromptsRef, Rollout, RolloutsRef
from stages.condition import ConditionConfig
from stages.condition.run import asking, reward_levels
from tests.support.workshop import Workshop, rollout, workshop

ROLLOUTS = [
    rollout("p", "worst", -1.0),
    rollout("p", "good", 2.0),
    rollout("q", "best", 3.0),
    rollout("q", "poor", 0.0),
    rollout("q", "endless", 9.0, finish_reason="length"),
]
CONFIG = ConditionConfig(levels=2, eval_fraction=0.0)


def shop_and_rollouts(root: Path, rollouts: list[Rollout]) -> tuple[Workshop, RolloutsRef]:
    shop = workshop(root)
    write_rollouts(root / "rollouts", 0, rollouts)
    return shop, shop.store.external(RolloutsRef, root / "rollouts")


@pytest.mark.parametrize(
    ("rewards", "levels", "expected"),
    [
        # quantiles at 1/5 ... 4/5 of ten: the 2nd, 4th, 6th and 8th smallest
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 5, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ([9, 0, 5], 3, [3, 1, 2]),
        # quantiles of 0 0 0 0 1 1 1 1 1 1 in fifths: 0, 0, 1, 1. A wrong answer is above none, a right one above two
        ([1, 0, 1, 0, 1, 0, 1, 0, 1, 1], 5, [3, 1, 3, 1, 3, 1, 3, 1, 3, 3]),
        ([7, 7, 7], 4, [1, 1, 1]),
        # more levels than answers: the quantiles of 1 2 in quarters are 1, 1, 2
        ([1, 2], 4, [1, 3]),
        ([], 4, []),
    ],
)
def test_levels_by_hand(rewards, levels, expected):
    assert reward_levels(rewards, levels=levels) == expected


def test_every_answer_stands_behind_its_prompt_with_its_level(tmp_path):
    shop, ref = shop_and_rollouts(tmp_path, ROLLOUTS)
    made, decision = shop.run("condition", CONFIG, {"rollouts": ref})
    rows = read_demonstrations(shop.store.path(made) / "train.parquet")
    assert [(row.id, row.messages[-2].content, row.messages[-1].content) for row in rows] == [
        ("p/0", "question p\n<reward: 1>", "worst"),
        ("p/1", "question p\n<reward: 2>", "good"),
        ("q/0", "question q\n<reward: 2>", "best"),
        ("q/1", "question q\n<reward: 1>", "poor"),
    ]
    metrics = shop.metrics(decision)
    assert (metrics["level_1"], metrics["level_2"], metrics["truncated"], metrics["level"]) == (2, 2, 1, 2)
    assert read_demonstrations(shop.store.path(made) / "eval.parquet") == []


def test_rollouts_without_a_reward_have_no_level_and_are_counted(tmp_path):
    lost = replace(rollout("p", "lost", math.nan), invalid="crashed")
    shop, ref = shop_and_rollouts(tmp_path, [lost, *ROLLOUTS, lost])
    made, decision = shop.run("condition", CONFIG, {"rollouts": ref})
    rows = read_demonstrations(shop.store.path(made) / "train.parquet")
    levels = [row.messages[-2].content[-2] for row in rows]
    assert ([row.messages[-1].content for row in rows], levels) == (["worst", "good", "best", "poor"], list("1221"))
    assert (shop.metrics(decision)["invalid"], shop.metrics(decision)["truncated"]) == (2, 1)


def test_no_prompt_is_in_both_splits(tmp_path):
    shop, ref = shop_and_rollouts(tmp_path, ROLLOUTS)
    made, _ = shop.run("condition", ConditionConfig(levels=2, eval_fraction=0.5), {"rollouts": ref})
    splits = [read_demonstrations(shop.store.path(made) / f"{name}.parquet") for name in ("train", "eval")]
    assert sorted({row.id[0] for row in split} for split in splits) in ([{"p"}, {"q"}], [{"q"}, {"p"}])


def test_prompts_ask_for_the_best_level_that_was_reached_and_keep_id_and_label(tmp_path):
    # 0 0 1 1 1 1 in fifths: quantiles 0, 1, 1, 1; the best level is 2 and not 5
    binary = [rollout("p", str(i), float(i > 1)) for i in range(6)]
    shop, ref = shop_and_rollouts(tmp_path, binary)
    turns = (Message("system", "Be brief."), Message("user", "Why {level}?"))
    write_prompts(tmp_path / "prompts", [Prompt("e", turns, "42", "test")])
    inputs = {"rollouts": ref, "prompts": shop.store.external(PromptsRef, tmp_path / "prompts")}
    made, decision = shop.run("condition", ConditionConfig(template="[{level}] {prompt}"), inputs)
    assert isinstance(made, PromptsRef)
    asked = (turns[0], Message("user", "[2] Why {level}?"))
    assert read_prompts(shop.store.path(made)) == [Prompt("e", asked, "42", "test")]
    assert shop.metrics(decision) == {"prompts": 1.0, "level": 2.0}


def test_a_prompt_of_braces_stays_as_it_is():
    prompt = Prompt("p", (Message("user", "{x} {prompt}"),), "", "test")
    assert asking(prompt, 3, template="{prompt}/{level}").messages[0].content == "{x} {prompt}/3"


def test_rewards_of_one_level_are_refused(tmp_path):
    shop, ref = shop_and_rollouts(tmp_path, [rollout("p", "a", 1.0), rollout("p", "b", 1.0)])
    with pytest.raises(DataError, match=r"condition\.rollouts = \[1\]: 2 complete answers fall into 1 of the 5 levels"):
        shop.run("condition", ConditionConfig(), {"rollouts": ref})


@pytest.mark.parametrize("template", ["{prompt}", "<reward: {level}>", "{prompt} {level} {level}"])
def test_a_template_has_a_place_for_the_prompt_and_one_for_the_level(template):
    with pytest.raises(ValidationError, match=r"must have \{(prompt|level)\} in it once"):
        ConditionConfig(template=template)
