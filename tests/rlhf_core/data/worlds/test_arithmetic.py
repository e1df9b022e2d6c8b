"""The verifiable world: right answers, careless demonstrations, exam questions that were not in the lessons."""

from __future__ import annotations

import random

import pytest

from rlhf_core.config.data import ArithmeticWorld
from rlhf_core.data.tables import Tables
from rlhf_core.data.worlds.arithmetic import Problem, exact_match, make_tables, slip
from rlhf_core.errors import RewardError
from rlhf_core.types import Completion, Generation, Message, Prompt


@pytest.fixture(scope="module")
def world() -> tuple[Tables, dict[str, float]]:
    return make_tables(ArithmeticWorld(), seed=5)


def reward(text: str, label: str) -> float:
    prompt = Prompt("p", (Message("user", "x"),), label, "arithmetic")
    (value,) = exact_match([Generation(prompt, (1,), Completion((2,), (0.0,), text, "stop", 0, 0))])
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 + 5 = 12", 1.0),
        ("It is 7 + 5 = 12.", 1.0),
        ("=12", 1.0),
        ("7 + 5 = 120", 0.0),
        ("7 + 5 = -12", 0.0),
        ("12", 0.0),
        ("7 + 5 = 12 = 13", 0.0),
        ("7 + 5 = 12 or so", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_asks_for_the_right_result_at_the_end(text: str, value: float) -> None:
    assert reward(text, "12") == value


def test_a_prompt_without_an_answer_is_refused() -> None:
    with pytest.raises(RewardError, match="has no answer to check"):
        reward("7 + 5 = 12", "")


def test_labels_are_right(world: tuple[Tables, dict[str, float]]) -> None:
    for prompt in (*world[0].prompts, *world[0].eval_prompts):
        digits = "".join(sign if sign in "0123456789+-" else " " for sign in prompt.messages[0].content).split()
        left, sign, right = digits
        assert int(prompt.label) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_chosen_answers_are_right_and_rejected_ones_are_not(world: tuple[Tables, dict[str, float]]) -> None:
    label = {prompt.messages: prompt.label for prompt in (*world[0].prompts, *world[0].eval_prompts)}
    for pair in (*world[0].preferences, *world[0].eval_preferences):
        assert reward(pair.chosen[0].content, label[pair.prompt]) == 1.0
        assert reward(pair.rejected[0].content, label[pair.prompt]) == 0.0


def test_two_of_five_demonstrations_are_wrong(world: tuple[Tables, dict[str, float]]) -> None:
    label = {prompt.messages: prompt.label for prompt in world[0].prompts}
    right = [reward(row.messages[1].content, label[row.messages[:1]]) for row in world[0].demonstrations]
    assert sum(right) / len(right) == pytest.approx(0.6, abs=0.031)  # four standard deviations of 4000
    assert world[1]["gold/demonstrations_right"] == pytest.approx(sum(right) / len(right))


def test_evaluation_questions_are_not_trained_on(world: tuple[Tables, dict[str, float]]) -> None:
    tables, _ = world
    train = {row.messages[0].content for row in tables.demonstrations}
    train |= {row.messages[0].content for row in tables.prompts}
    train |= {row.prompt[0].content for row in tables.preferences}
    held_out = {row.messages[0].content for row in tables.eval_prompts}
    held_out |= {row.messages[0].content for row in tables.eval_demonstrations}
    held_out |= {row.prompt[0].content for row in tables.eval_preferences}
    assert train.isdisjoint(held_out)
    # 100 sums and 55 differences in 4 wordings are 620 questions; a sixth of them, 103, is held out
    assert (len(train), len(held_out)) == (517, 103)
    assert len(tables.prompts) == 517  # asked for 1000: a prompt is never in the table twice


def test_a_slip_is_a_wrong_number_nearby() -> None:
    problem = Problem(7, "+", 5, "What is {}?")
    assert {slip(problem, random.Random(seed)) for seed in range(100)} == {2, 11, 13, 22}


def test_the_world_belongs_to_its_seed() -> None:
    small = ArithmeticWorld(demonstrations=5, preferences=5, prompts=5, eval_prompts=5)
    assert make_tables(small, seed=1) == make_tables(small, seed=1) != make_tables(small, seed=2)
