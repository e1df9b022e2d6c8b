"""People who judge in MLflow's Review page: who gets what, what they see, and what their answers amount to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.annotation import people
from rlhf_core.annotation.annotators import NotJudgedYet
from rlhf_core.annotation.people import ask_people, condition, is_met, shared_out, shown
from rlhf_core.annotation.proposing import Comparison, Judgment, write_comparisons
from rlhf_core.config.annotators import FileAnnotator, ReviewAnnotator
from rlhf_core.errors import DataError
from rlhf_core.tracking.review_queues import Answer, QueueState, ReviewItem
from rlhf_core.types import Message


def comparison(name: str, *, repeats: str = "") -> Comparison:
    return Comparison(name, (Message("user", name),), "", "test", "good", "bad", "sft", "ppo", repeats)


class Queues:
    """Queues of MLflow in memory: annotator -> item -> answer; None declines."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, str | None]] = {}
        self.created_s = 1e12
        self.items: dict[str, list[ReviewItem]] = {}

    def __call__(self, uri: str, *, experiment: str, name: str, user: str, question: Any, items: Any) -> QueueState:
        self.items[name] = list(items)
        given = {item: value for item, value in self.answers.get(user, {}).items() if item in {i.id for i in items}}
        answers = tuple(Answer(item, value, "why", "default") for item, value in given.items() if value)
        return QueueState(f"{uri}/{user}" if uri else "", self.created_s, len(items), len(given), answers)


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Queues:
    made = Queues()
    monkeypatch.setattr(people, "review_queue", made)
    return made


def test_it_waits_and_says_how_many_are_judged_and_where(queues: Queues) -> None:
    rows = [comparison(f"c{n}") for n in range(4)]
    config = ReviewAnnotator(annotators=("ada", "bob"))
    queues.answers = {"ada": {"c0": "A", "c2": "B"}}
    with pytest.raises(NotJudgedYet, match=r"2 of 4 comparisons are judged; bob \(0 of 2\) at http://m/bob$"):
        ask_people(config, rows, name="x", uri="http://m")
    with pytest.raises(NotJudgedYet, match=r"start the page with `rlhf up`, .*experiment annotation, Review.*bob"):
        ask_people(config, rows, name="x", uri="")
    assert set(queues.items) == {"ada x", "bob x"}


def test_answers_become_judgments_of_the_annotator_whose_queue_it_is(queues: Queues) -> None:
    config = ReviewAnnotator(annotators=("ada", "bob"), overlap=2)
    queues.answers = {"ada": {"c0": "A", "c1": "both bad"}, "bob": {"c0": "B", "c1": None}}
    said, extra = ask_people(config, [comparison("c0"), comparison("c1")], name="x", uri="http://m")
    assert said == [
        Judgment("c0", "ada", "first", "why"),
        Judgment("c1", "ada", "both_bad", "why"),
        Judgment("c0", "bob", "second", "why"),
    ]
    assert extra == {"review": {"asked": 4, "done": 4, "answered": 3, "sources": ["default"]}}


def test_a_share_may_be_enough_and_a_deadline_ends_the_wait(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [comparison(f"c{n}") for n in range(4)]
    queues.answers = {"annotator-1": {"c0": "A", "c1": "A"}}
    assert len(ask_people(ReviewAnnotator(needed=0.5), rows, name="x", uri="")[0]) == 2
    config = ReviewAnnotator(deadline_hours=2)
    monkeypatch.setattr(people.time, "time", lambda: 1e12 + 7199)
    with pytest.raises(NotJudgedYet):
        ask_people(config, rows, name="x", uri="")
    monkeypatch.setattr(people.time, "time", lambda: 1e12 + 7201)
    assert len(ask_people(config, rows, name="x", uri="")[0]) == 2


def test_an_option_that_someone_added_on_the_page_is_refused(queues: Queues) -> None:
    queues.answers = {"annotator-1": {"c0": "C"}}
    with pytest.raises(DataError, match="must be one of A, B, tie, both bad"):
        ask_people(ReviewAnnotator(), [comparison("c0")], name="x", uri="")


def test_each_comparison_goes_to_as_many_as_asked_for_and_a_repetition_to_the_same() -> None:
    rows = [*(comparison(f"c{n}") for n in range(6)), comparison("c1-again", repeats="c1")]
    shares = {name: {one.id for one in given} for name, given in shared_out(rows, ("a", "b", "c"), 2).items()}
    for one in rows:
        assert sum(one.id in share for share in shares.values()) == 2
    assert all(("c1" in share) == ("c1-again" in share) for share in shares.values())
    assert {len(share) for share in shares.values()} == {4, 5}


def test_a_person_sees_the_conversation_and_both_answers_and_no_policy() -> None:
    prompt = (Message("system", "Be kind."), Message("user", "Hi"))
    item = shown(Comparison("c", prompt, "gold", "test", "**one**", "two", "sft", "ppo", expected="first"))
    assert item.request == "**system**\n\nBe kind.\n\nHi"
    assert item.response == "### A\n\n**one**\n\n---\n\n### B\n\ntwo"
    assert not {"sft", "ppo", "gold", "first"} & set(f"{item.request} {item.response}".split())


@pytest.mark.parametrize(
    ("answer", "shown_as"),
    [
        ("Yes.\n### B\nNo.", "Yes.\n\\### B\nNo."),
        ("- # B", "- \\# B"),
        ("> ## B", "> \\## B"),
        ("B\n===", "B\n\\==="),
        ("B\n - - -", "B\n - - \\-"),
        ("> " * 60 + "x", "> " * 60 + "x"),
        ("* one\n* two **bold**\n1. #hash", "* one\n* two **bold**\n1. #hash"),
        ("a - b\n#1 is best", "a - b\n#1 is best"),
    ],
)
def test_an_answer_cannot_pass_for_both(answer: str, shown_as: str) -> None:
    item = shown(Comparison("c", (Message("user", "Hi"),), "", "test", answer, "two", "sft", "ppo"))
    assert item.response == f"### A\n\n{shown_as}\n\n---\n\n### B\n\ntwo"


def test_the_condition_of_a_wait_tells_another_process_when_it_is_met(tmp_path: Path) -> None:
    write_comparisons(tmp_path / "asked", [comparison("c0"), comparison("c1")])
    config = FileAnnotator(folder=str(tmp_path / "exchange"))
    waits = json.loads(json.dumps(condition(config, tmp_path / "asked", name="x")))
    assert not is_met(waits, uri="")
    lines = [json.dumps({"id": name, "choice": "first"}) for name in ("c0", "c1")]
    (tmp_path / "exchange" / "x" / "judgments.jsonl").write_text("\n".join(lines))
    assert is_met(waits, uri="")


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"annotators": ["a b"]}, "must be letters, digits"),
        ({"annotators": ["ada", "ada"]}, "must differ"),
        ({"annotators": []}, "at least 1"),
        ({"overlap": 2}, "there are only 1 annotators"),
        ({"deadline_hours": -1}, "greater than or equal to 0"),
    ],
)
def test_annotators_who_cannot_be_asked_are_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        ReviewAnnotator.model_validate(given)
