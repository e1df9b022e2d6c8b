"""The verifiable world: right answers, careless demonstrations, questions that were not in the lessons, worked sums."""

import random
import re

import pytest

from rlhf_contrib.worlds.arithmetic import Problem, exact_match, make_tables, slip
from rlhf_core.config.data import ArithmeticWorld
from rlhf_core.data.tables import Tables
from rlhf_core.errors import RewardError
from rlhf_core.types import Completion, Generation, Message, Prompt

# ---------------------------------------------------------------- arithmetic


WORKED = ArithmeticWorld(
    worked=True, demonstrations=200, preferences=50, prompts=60, eval_prompts=40, steps=400, eval_steps=60, largest=5
)


@pytest.fixture(scope="module")
def worked() -> Tables:
    return make_tables(WORKED, seed=5)[0]


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
def test_the_reward_asks_for_the_right_result_at_the_end(text, value):
    assert reward(text, "12") == value


def test_a_prompt_without_an_answer_is_refused():
    with pytest.raises(RewardError, match="has no answer to check"):
        reward("7 + 5 = 12", "")


def test_chosen_answers_are_right_and_rejected_ones_are_not(world):
    label = {prompt.messages: prompt.label for prompt in (*world[0].prompts, *world[0].eval_prompts)}
    for pair in (*world[0].preferences, *world[0].eval_preferences):
        assert reward(pair.chosen[0].content, label[pair.prompt]) == 1.0
        assert reward(pair.rejected[0].content, label[pair.prompt]) == 0.0


def test_two_of_five_demonstrations_are_wrong(world):
    label = {prompt.messages: prompt.label for prompt in world[0].prompts}
    right = [reward(row.messages[1].content, label[row.messages[:1]]) for row in world[0].demonstrations]
    assert sum(right) / len(right) == pytest.approx(0.6, abs=0.031)  # four standard deviations of 4000
    assert world[1]["gold/demonstrations_right"] == pytest.approx(sum(right) / len(right))


def asked(tables: Tables, prefix: str = "") -> set[str]:
    """Return the questions of the tables for training, or of those with the prefix `eval_`."""
    rows = tables.named()
    found = {row.messages[0].content for name in ("demonstrations", "prompts") for row in rows[f"{prefix}{name}"]}
    return found | {row.prompt[0].content for name in ("preferences", "steps") for row in rows[f"{prefix}{name}"]}


def test_evaluation_questions_are_not_trained_on(world):
    train, held_out = asked(world[0]), asked(world[0], "eval_")
    assert train.isdisjoint(held_out)
    # 100 sums and 55 differences in 4 wordings are 620 questions; a sixth of them, 103, is held out
    assert (len(train), len(held_out)) == (517, 103)
    assert len(world[0].prompts) == 517  # asked for 1000: a prompt is never in the table twice


def test_a_slip_is_a_wrong_number_nearby():
    problem = Problem(7, "+", 5, "What is {}?")
    assert {slip(problem, random.Random(seed)) for seed in range(100)} == {2, 11, 13, 22}


def test_the_world_belongs_to_its_seed():
    small = ArithmeticWorld(demonstrations=5, preferences=5, prompts=5, eval_prompts=5)
    assert make_tables(small, seed=1) == make_tables(small, seed=1) != make_tables(small, seed=2)


# ---------------------------------------------------------------- arithmetic phrases


# ---------------------------------------------------------------- worked sums


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_step_is_right_if_it_and_all_before_it_are(worked):
    for row in (*worked.steps, *worked.eval_steps):
        numbers = numbers_in(row.prompt[0].content)
        assert len(row.steps) == len(row.labels) == len(numbers) - 1
        for index, (step, label) in enumerate(zip(row.steps, row.labels, strict=True)):
            left, right, result = numbers_in(step)
            assert right == numbers[index + 1]
            # one slip at most: a result is the sum so far exactly where no step up to here was wrong
            assert label == float(result == sum(numbers[: index + 2]))
            assert index == 0 or left == numbers_in(row.steps[index - 1])[-1]


def test_errors_are_as_frequent_as_asked_and_anywhere(worked):
    wrong = [row for row in worked.steps if row.labels[-1] == 0.0]
    assert 0.3 < len(wrong) / len(worked.steps) < 0.5  # 0.4, four standard deviations 0.098
    assert {row.labels.index(0.0) for row in wrong} == {0, 1, 2}
    assert {len(row.steps) for row in worked.steps} == {2, 3}


def test_answers_end_in_the_claimed_result_and_pairs_differ_in_it(worked):
    for prompt in worked.prompts:
        assert int(prompt.label) == sum(numbers_in(prompt.messages[0].content))
    for pair in worked.preferences:
        result = str(sum(numbers_in(pair.prompt[0].content)))
        assert pair.chosen[0].content.endswith(f"= {result}")
        assert not pair.rejected[0].content.endswith(f"= {result}")


def test_asking_for_steps_changes_no_other_table():
    small = {"demonstrations": 20, "preferences": 5, "prompts": 5, "eval_prompts": 5}
    plain, facts = make_tables(ArithmeticWorld.model_validate(small), seed=5)
    judged, same_facts = make_tables(ArithmeticWorld.model_validate(small | {"steps": 9}), seed=5)
    assert plain.steps == plain.eval_steps == ()
    assert (len(judged.steps), len(judged.eval_steps)) == (9, 64)
    names = [name for name in plain.named() if not name.endswith("steps")]
    assert [plain.named()[name] for name in names] == [judged.named()[name] for name in names]
    assert facts == same_facts
