"""Several worlds as one data set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from rlhf_contrib.worlds import arithmetic, mixed, support
from rlhf_core.config.data import ArithmeticWorld, MixedWorlds, SupportWorld
from rlhf_core.types import Completion, Generation

SMALL = {"demonstrations": 20, "preferences": 8, "prompts": 12, "eval_prompts": 6}
WORLDS = MixedWorlds(worlds=(SupportWorld(**SMALL), ArithmeticWorld(**SMALL, steps=5)))


def test_the_rows_are_those_of_the_worlds_in_another_order():
    tables, facts = mixed.make_tables(WORLDS, seed=3)
    alone = [support.make_tables(WORLDS.worlds[0], seed=3), arithmetic.make_tables(WORLDS.worlds[1], seed=3)]  # type: ignore[arg-type]
    for name, rows in tables.named().items():
        expected = [row.id for one, _ in alone for row in one.named()[name]]
        assert sorted(row.id for row in rows) == sorted(expected), name
    sources = [row.source for row in tables.prompts]
    assert sources != sorted(sources) and set(sources) == {"support", "arithmetic"}
    assert facts.keys() == alone[0][1].keys() | alone[1][1].keys()
    assert mixed.make_tables(WORLDS, seed=3)[0] == tables != mixed.make_tables(WORLDS, seed=4)[0]


def test_an_answer_gets_the_gold_reward_of_its_world():
    prompts = mixed.make_tables(WORLDS, seed=3)[0].eval_prompts
    texts = [f"It is = {one.label}." if one.source == "arithmetic" else "We are sorry." for one in prompts]
    rows = [Generation(one, (1,), Completion((2,), (-1.0,), text, "stop", 0, 0)) for one, text in zip(prompts, texts)]
    expected = [
        (arithmetic.exact_match if one.prompt.source == "arithmetic" else support.gold_reward)([one])[0] for one in rows
    ]
    assert mixed.gold_reward(rows) == expected and 1.0 in expected
    with pytest.raises(KeyError):
        mixed.gold_reward([replace(rows[0], prompt=replace(prompts[0], source="files"))])


def test_a_world_occurs_once():
    with pytest.raises(ValidationError, match=r"worlds\[1\]\.type = 'support': there is such a world already"):
        MixedWorlds(worlds=(SupportWorld(), SupportWorld()))
