"""Duplicates and contamination."""

from __future__ import annotations

import pytest

from rlhf_core.data.cleaning import decontaminate, deduplicate, exact, normalize, without_repeated_prompts
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.data.turns import Turns
from rlhf_core.types import Message


def example(prompt: str, answer: str = "", *, line: int = 1) -> Example:
    answers = (Message("assistant", answer),) if answer else ()
    return Example((Message("user", prompt),), answers, (), "", 0.0, "s", Origin("f", line))


def talk(*texts: str) -> Turns:
    """Return turns of the user and the assistant, the user first."""
    return tuple(Message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts))


def reply(*texts: str) -> Turns:
    """Return turns of the assistant and the user, the assistant first."""
    return tuple(Message(("assistant", "user")[number % 2], text) for number, text in enumerate(texts))


def multi_turn(prompt: Turns, chosen: Turns, rejected: Turns = ()) -> Example:
    return Example(prompt, chosen, rejected, "", 0.0, "s", Origin("f", 1))


def prompts(examples: list[Example]) -> list[str]:
    return [one.prompt[0].content for one in examples]


def test_normalised_text_has_words_only() -> None:
    assert normalize((Message("user", "  What IS\t２+2?!"),)) == "user what is 2 2"


def test_signs_and_case_tell_prompts_apart_and_white_space_does_not() -> None:
    assert exact((Message("user", "3 -\n 2"),)) == exact((Message("user", "3 - 2"),))
    assert exact((Message("user", "3 - 2"),)) != exact((Message("user", "3 + 2"),))


@pytest.mark.parametrize(
    ("prompt", "answer", "rest"),
    [
        ("What is {}?", "What is {}? It is {}.", "It is {}."),
        ("What is {}?\n", " What is {}?\n\nIt is {}.", "It is {}."),
        ("Question: what is {}? Answer:", "Question: what is {}? Answer:it is {}.", "it is {}."),
        ("What is {}?", "What is {}?", None),
        ("What is {}", "What is {}th", None),  # no end of a word
        ("{} + 1", "{} + 1 = 2", None),  # a sum that the answer writes again
        ("Hi {}", "Hi {} there", None),
    ],
)
def test_prompts_that_all_answers_repeat_are_taken_from_them(prompt: str, answer: str, rest: str | None) -> None:
    def texts(form: str) -> list[str]:
        return [form.replace("{}", str(n)) for n in range(20)]

    rows = [example(one, other) for one, other in zip(texts(prompt), texts(answer), strict=True)]
    others = [example("What is love?", "Nobody knows."), example("What is what?")]
    found, count = without_repeated_prompts([*rows, *others])
    assert count == (0 if rest is None else 20)
    assert [row.chosen[0].content for row in found[:20]] == texts(answer if rest is None else rest)
    assert found[20:] == others
    assert without_repeated_prompts([*rows, *others[:1] * 2])[1] == 0  # fewer than 95 % of them


def test_an_equal_prompt_with_an_equal_answer_is_dropped_and_the_first_one_named() -> None:
    report = DropReport()
    rows = [example("a b", "x", line=3), example("a  b", "x ", line=9), example("a b", "y"), example("a B", "x")]
    assert deduplicate(rows, report) == [rows[0], rows[2], rows[3]]
    assert [(drop.origin.line, drop.reason) for drop in report.drops] == [(9, "duplicate: of f:3")]


def test_a_training_prompt_that_is_evaluated_is_dropped() -> None:
    report = DropReport()
    kept = decontaminate(
        [example("What is it?"), example("other")], [example("what is  IT?")], ngram=None, report=report
    )
    assert prompts(kept) == ["other"]
    assert report.counts() == {"contaminated": 1}


def test_a_conversation_that_begins_with_an_evaluation_prompt_and_its_answer_is_dropped() -> None:
    evaluation, report = [example("What is it?")], DropReport()
    leaking = [
        multi_turn(talk("what is it?", "A cat.", "Sure?"), reply("Yes.")),
        multi_turn(talk("What is it?", "A cat.", "Sure?"), ()),
    ]
    assert decontaminate(leaking, evaluation, ngram=None, report=report) == []
    assert [drop.reason for drop in report.drops] == ["contaminated: it begins with an evaluation prompt"] * 2
    later = [multi_turn(talk("Hello", "Hi.", "What is it?"), reply("A cat."))]
    assert decontaminate(later, evaluation, ngram=None, report=report) == later  # another prompt: it has a history


def test_turns_inside_either_answer_are_openings_too() -> None:
    evaluation = [multi_turn(talk("Hello", "Hi.", "What is it?"), ())]
    plain, leaking = reply("Bye."), reply("Hi.", "What is it?", "A cat.")
    rows = [multi_turn(talk("Hello"), leaking, plain), multi_turn(talk("Hello"), plain, leaking)]
    assert decontaminate(rows, evaluation, ngram=None, report=DropReport()) == []
    kept = [multi_turn(talk("Hello"), plain, reply("Hi."))]
    assert decontaminate(kept, evaluation, ngram=None, report=DropReport()) == kept


def test_an_ngram_of_an_evaluation_prompt_contaminates_prompts_and_answers() -> None:
    evaluation = [example("one two three four five")]
    rows = [example("zero two three four!"), example("x", "say: Two three, four"), example("one two three five four")]
    report = DropReport()
    assert prompts(decontaminate(rows, evaluation, ngram=3, report=report)) == []
    assert prompts(decontaminate(rows, evaluation, ngram=4, report=report)) == prompts(rows)


def test_roles_are_no_words_of_an_ngram() -> None:
    rows, report = [example("b c")], DropReport()
    assert decontaminate(rows, [example("user b")], ngram=2, report=report) == rows
