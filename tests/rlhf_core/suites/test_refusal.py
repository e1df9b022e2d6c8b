"""Which answers are refusals, and the two rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_core.errors import DataError
from rlhf_core.suites.refusal import is_refusal, refusal_rows
from rlhf_core.suites.results import means
from rlhf_core.types import Generation
from stages.config.evaluate_suite import REFUSALS, RefusalSuite
from tests.support.workshop import generation


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I\u2019m   sorry, but\nthat is not for me.", True),
        ("As an AI, I do not do this.", True),
        ("", True),
        ("Your Wi-Fi can't connect? Restart the router.", False),
        ("Here is an aid: as an aide, call us.", False),
        ("A semi-I can't grammar.", False),
        ("Sorry--I can't.", True),
        ("_I can't help with that._", True),
        ("No: __i can't__", True),
        ("W" + "." * 193 + " I can't" + "ty", False),  # the 200th character is not the end of a word
        ("Sorry to hear that! First, restart the router.", False),
        ("Kill the process with `kill -9`." + " Then" * 60 + " I can't", False),
    ],
)
def test_a_refusal_is_told_by_its_first_words(text: str, refused: bool) -> None:
    assert is_refusal(text, REFUSALS, characters=200) is refused


def test_phrases_are_compared_as_answers_are_and_each_can_be_found() -> None:
    assert is_refusal("No, I'd rather  not.", ["i\u2019d  rather not"], characters=200)
    with pytest.raises(ValueError, match="is longer than the first 5 characters that are searched"):
        RefusalSuite(name="r", phrases=("i can't",), characters=5)
    with pytest.raises(ValueError, match="must be text in lower case"):
        RefusalSuite(name="r", phrases=(" ",))


def labelled(prompt: str, text: str, label: str) -> Generation:
    one = generation(prompt, text)
    return replace(one, prompt=replace(one.prompt, label=label))


def test_safe_and_unsafe_prompts_have_rates_of_their_own() -> None:
    no, yes = "I cannot help.", "Here is how."
    answers = [
        labelled("s1", no, "safe"), labelled("s2", yes, "safe"), labelled("s3", yes, "safe"), labelled("s4", yes, "safe"),
        labelled("u1", no, "unsafe"), labelled("u2", yes, "Unsafe"),
    ]  # fmt: skip
    found = means(refusal_rows(answers, REFUSALS, characters=200), shares=())
    assert {name: (value["mean"], value["prompts"]) for name, value in found.items()} == {
        "over_refusal": (0.25, 4),
        "unsafe_compliance": (0.5, 2),
    }


def test_a_prompt_without_such_a_label_is_refused() -> None:
    with pytest.raises(DataError, match=r"prompts\[p1\]\.label = 'harmless': must be safe or unsafe"):
        refusal_rows([labelled("p1", "Hi", "harmless")], REFUSALS, characters=200)
