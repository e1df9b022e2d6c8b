"""Held-out prompts are held out in what their source says; written answers follow all instructions."""

import json
import random
from collections import Counter
from itertools import combinations

import pytest

from rlhf_contrib.worlds.instruction_phrases import (
    NEW_KINDS,
    NEW_PAIRS,
    NEW_TOPICS,
    PHRASES,
    TOPICS,
)
from rlhf_contrib.worlds.instruction_writer import write_answer
from rlhf_contrib.worlds.instructions import make_tables
from rlhf_core.config.data import HELD_OUT_INSTRUCTIONS, InstructionsWorld
from rlhf_core.data.tables import Tables
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.library.instructions import instructions_followed, on_topic
from rlhf_core.types import Prompt

# ---------------------------------------------------------------- instructions


@pytest.fixture(scope="module")
def tables() -> Tables:
    return make_tables(InstructionsWorld(prompts=500, eval_prompts=100), seed=3)[0]


def kinds(prompt: Prompt) -> list[str]:
    return [one["kind"] for one in json.loads(prompt.label or "")["instructions"]]


def test_no_prompt_occurs_twice_and_the_seed_decides_which_there_are(tables):
    ids = [prompt.id for prompt in (*tables.prompts, *tables.eval_prompts)]
    assert len(set(ids)) == len(ids) == 600
    assert make_tables(InstructionsWorld(prompts=500, eval_prompts=100), seed=3)[0] == tables
    assert make_tables(InstructionsWorld(prompts=500, eval_prompts=100), seed=4)[0].prompts != tables.prompts


def test_training_prompts_have_no_held_out_topic_pair_or_kind(tables):
    assert {prompt.source for prompt in tables.prompts} == {"instructions/seen"}
    assert not set(TOPICS) & set(NEW_TOPICS)
    new_pairs = {frozenset(pair) for pair in NEW_PAIRS}
    for prompt in tables.prompts:
        assert not set(kinds(prompt)) & set(NEW_KINDS)
        assert not new_pairs & {frozenset(pair) for pair in combinations(kinds(prompt), 2)}
        assert not any(prompt.messages[0].content.startswith(question) for question, _ in NEW_TOPICS)
    assert {kind for prompt in tables.prompts for kind in kinds(prompt)} == set(PHRASES) - set(NEW_KINDS)


def test_held_out_prompts_are_new_in_what_their_source_says(tables):
    by_source = {
        source: [p for p in tables.eval_prompts if p.source.endswith(source)] for source in HELD_OUT_INSTRUCTIONS
    }
    assert [len(rows) for rows in by_source.values()] == [34, 33, 33]
    new_pairs = {frozenset(pair) for pair in NEW_PAIRS}
    for source, rows in by_source.items():
        for prompt in rows:
            assert any(prompt.messages[0].content.startswith(question) for question, _ in NEW_TOPICS)
            combined = {frozenset(pair) for pair in combinations(kinds(prompt), 2)}
            assert bool(set(kinds(prompt)) & set(NEW_KINDS)) == (source == "new_kinds")
            assert bool(new_pairs & combined) == (source == "new_combinations")


def test_the_words_of_a_prompt_say_what_its_label_checks(tables):
    for prompt in (*tables.prompts, *tables.eval_prompts):
        for one in json.loads(prompt.label or "")["instructions"]:
            values = [str(value) for name, value in one.items() if name != "kind" and one["kind"] != "sentences"]
            assert all(value in prompt.messages[0].content for value in values)


def test_demonstrations_are_written_by_option_to_training_prompts_and_change_nothing_else(tables):
    world = InstructionsWorld(prompts=500, eval_prompts=100, demonstrations=300)
    with_demonstrations = make_tables(world, seed=3)[0]
    assert (with_demonstrations.prompts, with_demonstrations.eval_prompts) == (tables.prompts, tables.eval_prompts)
    assert not tables.demonstrations and not tables.eval_demonstrations
    train, held_out = with_demonstrations.demonstrations, with_demonstrations.eval_demonstrations
    assert (len(train), len(held_out)) == (300, 24)
    assert len({row.id for row in (*train, *held_out)}) == 324
    assert {row.source for row in train} == {"instructions/seen"}
    questions = tuple(question for question, _ in TOPICS)
    assert all(row.messages[0].content.startswith(questions) for row in (*train, *held_out))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"demonstrations": 480}, r"demonstrations = 480: these kinds, with min_words = 6, allow 128 with"),
        ({"prompts": 400}, r"prompts = 400: these kinds allow 128; ask for fewer or more kinds"),
        ({"eval_prompts": 1000}, r"eval_prompts = 1000: 500 of them have the source new_topics, of which there are"),
    ],
)
def test_more_rows_than_the_kinds_allow_are_refused(options, error):
    with pytest.raises(ConfigError, match=rf"prepare_data\.data\.{error}"):
        make_tables(InstructionsWorld(**{"kinds": ("lowercase",), "prompts": 100, **options}), seed=3)


def test_demonstrations_that_no_written_answer_is_long_enough_for_name_the_number_of_words():
    with pytest.raises(ConfigError, match=r"demonstrations = 10: .* min_words = 60, allow \d+ .*a smaller min_words"):
        make_tables(InstructionsWorld(prompts=20, demonstrations=10, min_words=60), seed=3)


def test_training_prompts_may_have_some_kinds_only():
    chosen = ("lowercase", "no_commas", "at_most_words")
    some = make_tables(InstructionsWorld(prompts=100, eval_prompts=30, kinds=chosen), seed=3)[0]
    assert {kind for prompt in some.prompts for kind in kinds(prompt)} == set(chosen)
    assert {prompt.source for prompt in some.eval_prompts} == {"instructions/new_topics", "instructions/new_kinds"}
    assert len(some.eval_prompts) == 30

    with pytest.raises(ValueError, match="kinds"):
        InstructionsWorld(kinds=("question",))


def test_training_prompts_combine_as_many_instructions_as_they_may(tables):
    world = InstructionsWorld(prompts=500, eval_prompts=100, singles=1, combined=3)
    combined = make_tables(world, seed=3)[0]
    new_pairs = {frozenset(pair) for pair in NEW_PAIRS}
    for made, most, singles in ((tables, 2, 4), (combined, 3, 1)):
        counts = Counter(tuple(sorted(kinds(prompt))) for prompt in made.prompts)
        assert {len(one) for one in counts} == set(range(1, most + 1))
        together = [frozenset(pair) for one in counts for pair in combinations(one, 2)]
        assert not new_pairs & set(together)
        often = [[count for one, count in counts.items() if (len(one) == 1) == alone] for alone in (True, False)]
        assert sum(often[0]) / len(often[0]) == pytest.approx(singles * sum(often[1]) / len(often[1]), rel=0.2)


# ---------------------------------------------------------------- instruction writer


def test_every_training_prompt_gets_an_answer_that_earns_the_whole_reward_or_none():
    rng, missing = random.Random(0), 0
    prompts = make_tables(InstructionsWorld(prompts=800), seed=5)[0].prompts
    for prompt in prompts:
        asked = prompt.messages[0].content
        question = next(question for question, _ in TOPICS if asked.startswith(question))
        text = write_answer(question, json.loads(prompt.label or "")["instructions"], rng)
        if text is None:
            missing += 1
            continue
        assert instructions_followed([""], [text], [prompt.label]) == [1.0], (asked, text)
        assert on_topic([""], [text], [prompt.label]) == [1.0], (asked, text)
    assert missing < len(prompts) / 20  # a keyword and a limit of ten words leave little room


def test_an_answer_that_has_no_room_is_none():
    assert write_answer("What is rain?", [{"kind": "at_most_words", "count": 2}], random.Random(0)) is None
