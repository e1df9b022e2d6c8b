"""Worked sums: every line is the arithmetic it claims to be, and labels say where the first error is."""

from __future__ import annotations

import re

import pytest

from rlhf_core.config.data import ArithmeticWorld
from rlhf_core.data.tables import SteppedAnswer, Tables
from rlhf_core.data.worlds.arithmetic import make_tables

WORLD = ArithmeticWorld(
    worked=True, demonstrations=200, preferences=50, prompts=60, eval_prompts=40, steps=400, eval_steps=60, largest=5
)


@pytest.fixture(scope="module")
def tables() -> Tables:
    return make_tables(WORLD, seed=5)[0]


def question(row: SteppedAnswer) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", row.prompt[0].content)]


def test_a_step_is_right_if_it_and_all_before_it_are(tables: Tables) -> None:
    for row in (*tables.steps, *tables.eval_steps):
        numbers = question(row)
        assert len(row.steps) == len(row.labels) == len(numbers) - 1
        for index, (step, label) in enumerate(zip(row.steps, row.labels, strict=True)):
            left, right, result = (int(number) for number in re.findall(r"\d+", step))
            assert right == numbers[index + 1]
            # one slip at most: a result is the sum so far exactly where no step up to here was wrong
            assert label == float(result == sum(numbers[: index + 2]))
            assert index == 0 or left == int(re.findall(r"\d+", row.steps[index - 1])[-1])


def test_errors_are_as_frequent_as_asked_and_anywhere(tables: Tables) -> None:
    wrong = [row for row in tables.steps if row.labels[-1] == 0.0]
    assert 0.3 < len(wrong) / len(tables.steps) < 0.5  # 0.4, four standard deviations 0.098
    assert {row.labels.index(0.0) for row in wrong} == {0, 1, 2}
    assert {len(row.steps) for row in tables.steps} == {2, 3}


def test_questions_of_the_evaluation_are_in_no_training_table(tables: Tables) -> None:
    train = {row.prompt[0].content for row in (*tables.steps, *tables.preferences)}
    train |= {row.messages[0].content for row in (*tables.demonstrations, *tables.prompts)}
    held_out = {row.prompt[0].content for row in (*tables.eval_steps, *tables.eval_preferences)}
    held_out |= {row.messages[0].content for row in (*tables.eval_demonstrations, *tables.eval_prompts)}
    assert not train & held_out
    assert len({prompt.id for prompt in tables.prompts}) == 60
    assert len({prompt.id for prompt in tables.eval_prompts}) == 40


def test_answers_end_in_the_claimed_result_and_pairs_differ_in_it(tables: Tables) -> None:
    for prompt in tables.prompts:
        numbers = [int(number) for number in re.findall(r"\d+", prompt.messages[0].content)]
        assert int(prompt.label) == sum(numbers)
    for pair in tables.preferences:
        result = str(sum(int(number) for number in re.findall(r"\d+", pair.prompt[0].content)))
        assert pair.chosen[0].content.endswith(f"= {result}")
        assert not pair.rejected[0].content.endswith(f"= {result}")


def test_asking_for_steps_changes_no_other_table() -> None:
    small = {"demonstrations": 20, "preferences": 5, "prompts": 5, "eval_prompts": 5}
    plain, facts = make_tables(ArithmeticWorld.model_validate(small), seed=5)
    judged, same_facts = make_tables(ArithmeticWorld.model_validate(small | {"steps": 9}), seed=5)
    assert plain.steps == plain.eval_steps == ()
    assert (len(judged.steps), len(judged.eval_steps)) == (9, 64)
    names = [name for name in plain.named() if not name.endswith("steps")]
    assert [plain.named()[name] for name in names] == [judged.named()[name] for name in names]
    assert facts == same_facts


def test_the_plain_tables_are_those_of_always() -> None:
    tables, _ = make_tables(ArithmeticWorld(demonstrations=3, preferences=1, prompts=1, eval_prompts=1), seed=5)
    asked = [row.messages[0].content for row in tables.demonstrations]
    assert asked == ["Compute 4 + 7.", "Please solve 7 - 6.", "What is 7 - 4?"]
