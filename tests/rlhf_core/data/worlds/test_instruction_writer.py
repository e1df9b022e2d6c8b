"""Written answers follow all instructions and are about the topic."""

from __future__ import annotations

import json
import random

import pytest

from rlhf_core.config.data import InstructionsWorld
from rlhf_core.data.worlds.instruction_phrases import CLOSERS, COUNTS, KEYWORDS, TOPICS
from rlhf_core.data.worlds.instruction_writer import ANSWERS, BEFORE_CLOSER, WITH_KEYWORD, write_answer
from rlhf_core.data.worlds.instructions import make_tables
from rlhf_core.rewards.library.instructions import instructions_followed, on_topic, words


def test_every_training_prompt_gets_an_answer_that_earns_the_whole_reward_or_none() -> None:
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


def test_an_answer_has_the_words_that_make_it_one() -> None:
    rng = random.Random(0)
    for question, _ in TOPICS:
        text = write_answer(question, [{"kind": "lowercase"}], rng, min_words=10)
        assert text is None or len(words(text)) >= 10
    assert write_answer("What is rain?", [{"kind": "lowercase"}], rng, min_words=40) is None


def test_every_question_has_a_short_and_a_longer_answer_about_it() -> None:
    assert set(ANSWERS) == {question for question, _ in TOPICS}
    for question, about in TOPICS:
        label = json.dumps({"instructions": [{"kind": "no_commas"}], "topic": about.split(), "min_words": 6})
        assert on_topic(["", ""], list(ANSWERS[question]), [label, label]) == [1.0, 1.0], question
        short, longer = (len(words(text)) for text in ANSWERS[question])
        assert short < min(COUNTS) <= longer, question


@pytest.mark.parametrize(("listed", "ends"), [(KEYWORDS, WITH_KEYWORD), (CLOSERS, BEFORE_CLOSER)])
def test_every_word_that_is_asked_for_has_its_phrases(
    listed: tuple[str, ...], ends: dict[str, tuple[str, ...]]
) -> None:
    assert set(listed) == set(ends) and all(word in words(text) for word in listed for text in ends[word])


def test_an_answer_that_has_no_room_is_none() -> None:
    assert write_answer("What is rain?", [{"kind": "at_most_words", "count": 2}], random.Random(0)) is None
