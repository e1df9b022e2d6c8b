"""Simulated people, people who fill in a file, and people who judge in MLflow's Review page."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.annotation import people
from rlhf_core.annotation.annotators import EXPORT, IMPORT, NotJudgedYet, ask_file, ask_program
from rlhf_core.annotation.people import ask_people, condition, is_met, shared_out, shown
from rlhf_core.annotation.proposing import Comparison, Judgment, write_comparisons
from rlhf_core.config.annotators import FileAnnotator, ProgramAnnotator, ReviewAnnotator
from rlhf_core.errors import DataError
from rlhf_core.tracking.review_queues import QueueState, ReviewAnswer, ReviewItem
from rlhf_core.types import Generation, Message

# ---------------------------------------------------------------- annotators

HERE = f"{__name__}:length"


def length(generations: list[Generation]) -> list[float]:
    return [float(len(one.completion.text)) for one in generations]


def comparison(name: str, first: str = "longer", second: str = "short", *, repeats: str = "") -> Comparison:
    return Comparison(name, (Message("user", name),), "", "test", first, second, "sft", "ppo", repeats)


# ---------------------------------------------------------------- programs


def test_a_program_without_noise_chooses_by_its_reward_on_both_sides():
    config = ProgramAnnotator(function=HERE, temperature=1e-3)
    rows = [comparison("c1"), comparison("c2", "short", "longer"), comparison("c3", "equal", "equal")]
    said = ask_program(config.model_copy(update={"tie_below": 0.5}), rows, code={}, seed=1)
    assert [one.choice for one in said] == ["first", "second", "tie"]


def test_the_noise_is_bradley_terrys():
    """sigmoid(1 / 2) of the judgments prefer the answer that is better by 1, at temperature 2."""
    rows = [comparison(f"c{n}") for n in range(2000)]
    said = ask_program(ProgramAnnotator(function=HERE, temperature=2.0), rows, code={}, seed=1)
    share = sum(one.choice == "first" for one in said) / len(said)
    expected = 1 / (1 + math.exp(-1 / 2))
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))  # 4 standard errors


def test_every_simulated_person_has_noise_of_its_own_that_the_seed_decides():
    rows = [comparison(f"c{n}") for n in range(50)]
    config = ProgramAnnotator(function=HERE, annotators=2, temperature=5.0)
    said = ask_program(config, rows, code={}, seed=1)
    choices = {name: [one.choice for one in said if one.annotator == name] for name in ("program-1", "program-2")}
    assert len(said) == 100 and choices["program-1"] != choices["program-2"]
    assert ask_program(config, rows, code={}, seed=1) == said
    backwards = ask_program(config, rows[::-1], code={}, seed=1)
    assert sorted(map(str, backwards)) == sorted(map(str, said))


# ---------------------------------------------------------------- files


def write(folder: Path, *rows: object) -> None:
    (folder / IMPORT).write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def test_comparisons_are_exported_and_waited_for(tmp_path):
    config = FileAnnotator(folder=str(tmp_path / "exchange"))
    exchange = tmp_path / "exchange" / "round-1"
    with pytest.raises(NotJudgedYet, match=r"0 of 2 comparisons are judged; add lines to .*judgments\.jsonl"):
        ask_file(config, [comparison("c1"), comparison("c2")], name="round-1")
    [one, two] = map(json.loads, (exchange / EXPORT).read_text().splitlines())
    assert one == {"id": "c1", "prompt": [{"role": "user", "content": "c1"}], "first": "longer", "second": "short"}
    assert "policy" not in json.dumps([one, two]) and "expected" not in one


def test_what_people_wrote_is_returned_once_it_is_enough(tmp_path):
    rows = [comparison("c1"), comparison("c2")]
    config = FileAnnotator(folder=str(tmp_path), needed=0.5)
    row = {"id": "c2", "choice": "second", "annotator": "ada", "reason": "clearer\u2028and shorter", "seconds": 3}
    write(tmp_path, row)
    expected = [Judgment("c2", "ada", "second", "clearer\u2028and shorter", 3.0)]
    assert ask_file(config, rows, name="") == expected
    whole = FileAnnotator(folder=str(tmp_path))
    with pytest.raises(NotJudgedYet, match="1 of 2 "):
        ask_file(whole, rows, name="")
    # A last line that is being written is not there yet, and a whole one without an end is.
    (tmp_path / IMPORT).write_text('{"id": "c1", "choice": "first"}\n{"id": "c2", "cho')
    with pytest.raises(NotJudgedYet, match="1 of 2 "):
        ask_file(whole, rows, name="")
    (tmp_path / IMPORT).write_text('{"id": "c1", "choice": "first"}\n{"id": "c2", "choice": "tie"}')
    assert len(ask_file(whole, rows, name="")) == 2


def test_rounds_with_the_same_folder_have_files_of_their_own(tmp_path):
    config = FileAnnotator(folder=str(tmp_path))
    for name, row in (("round-1", comparison("c1")), ("round-2", comparison("c2"))):
        with pytest.raises(NotJudgedYet):
            ask_file(config, [row], name=name)
        write(tmp_path / name, {"id": row.id, "choice": "first"})
    assert [one.comparison for one in ask_file(config, [comparison("c1")], name="round-1")] == ["c1"]
    assert [one.comparison for one in ask_file(config, [comparison("c2")], name="round-2")] == ["c2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ('["c1"]', "needs the texts id and choice"),
        ('{"id": "c1", "choice": 1}', "needs the texts id and choice"),
        ('{"id": "c1", "choice": "A"}', "must be one of first, second, tie, both_bad"),
        ('{"id": "c9", "choice": "first"}', "is none of the given comparisons"),
        ('{"id": "c1", "choice": "first", "annotator": 3}', "must be texts"),
        ('{"id": "c1", "choice": "first", "seconds": -1}', "must be a number of seconds"),
        ('{"id": "c1", "choice": "first", "seconds": 1' + "0" * 400 + "}", "must be a number of seconds"),
        ('{"id": "c1", "choice": "first", "reason": "\udce9"}', "is not JSON in UTF-8"),
        ('{"id": "c1", "choice": "first", "seconds": NaN}', "must be a number of seconds"),
        ('{"id": "c1", "choice": "first"}\n{"id": "c1", "choice": "second"}', "judged twice by the same annotator"),
    ],
)
def test_a_line_that_is_no_judgment_is_refused_with_its_place(tmp_path, line, said):
    (tmp_path / IMPORT).write_bytes(f"\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=said) as refused:
        ask_file(FileAnnotator(folder=str(tmp_path)), [comparison("c1")], name="")
    assert IMPORT in str(refused.value)


def test_at_the_deadline_the_lines_that_are_there_are_enough(tmp_path):
    rows = [comparison("c1"), comparison("c2")]
    config = FileAnnotator(folder=str(tmp_path), deadline_hours=1)
    write(tmp_path, {"id": "c1", "choice": "first"})
    with pytest.raises(NotJudgedYet):
        ask_file(config, rows, name="")
    os.utime(tmp_path / EXPORT, (0, 0))
    assert len(ask_file(config, rows, name="")) == 1


# ---------------------------------------------------------------- people


class Queues:
    """Queues of MLflow in memory: annotator -> item -> answer; None declines."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, str | None]] = {}
        self.created_s = 1e12
        self.items: dict[str, list[ReviewItem]] = {}

    def __call__(self, uri: str, *, experiment: str, name: str, user: str, question: Any, items: Any) -> QueueState:
        self.items[name] = list(items)
        given = {item: value for item, value in self.answers.get(user, {}).items() if item in {i.id for i in items}}
        answers = tuple(ReviewAnswer(item, value, "why", "default") for item, value in given.items() if value)
        return QueueState(f"{uri}/{user}" if uri else "", self.created_s, len(items), len(given), answers)


@pytest.fixture
def queues(monkeypatch) -> Queues:
    made = Queues()
    monkeypatch.setattr(people, "review_queue", made)
    return made


def test_it_waits_and_says_how_many_are_judged_and_where(queues):
    rows = [comparison(f"c{n}") for n in range(4)]
    config = ReviewAnnotator(annotators=("ada", "bob"))
    queues.answers = {"ada": {"c0": "A", "c2": "B"}}
    with pytest.raises(
        NotJudgedYet, match=r"2 of 4 comparisons are judged \(with keys: rlhf judge\); bob \(0 of 2\) at http://m/bob$"
    ):
        ask_people(config, rows, name="x", uri="http://m")
    with pytest.raises(NotJudgedYet, match=r"start the page with `rlhf up`, .*experiment annotation, Review.*bob"):
        ask_people(config, rows, name="x", uri="")
    assert set(queues.items) == {"ada x", "bob x"}


def test_answers_become_judgments_of_the_annotator_whose_queue_it_is(queues):
    config = ReviewAnnotator(annotators=("ada", "bob"), overlap=2)
    queues.answers = {"ada": {"c0": "A", "c1": "both bad"}, "bob": {"c0": "B", "c1": None}}
    said, extra = ask_people(config, [comparison("c0"), comparison("c1")], name="x", uri="http://m")
    assert said == [
        Judgment("c0", "ada", "first", "why"),
        Judgment("c1", "ada", "both_bad", "why"),
        Judgment("c0", "bob", "second", "why"),
    ]
    assert extra == {"review": {"asked": 4, "done": 4, "answered": 3, "sources": ["default"]}}


def test_a_share_may_be_enough_and_a_deadline_ends_the_wait(queues, monkeypatch):
    rows = [comparison(f"c{n}") for n in range(4)]
    queues.answers = {"annotator-1": {"c0": "A", "c1": "A"}}
    assert len(ask_people(ReviewAnnotator(needed=0.5), rows, name="x", uri="")[0]) == 2
    config = ReviewAnnotator(deadline_hours=2)
    monkeypatch.setattr(people.time, "time", lambda: 1e12 + 7199)
    with pytest.raises(NotJudgedYet):
        ask_people(config, rows, name="x", uri="")
    monkeypatch.setattr(people.time, "time", lambda: 1e12 + 7201)
    assert len(ask_people(config, rows, name="x", uri="")[0]) == 2


def test_an_option_that_someone_added_on_the_page_is_refused(queues):
    queues.answers = {"annotator-1": {"c0": "C"}}
    with pytest.raises(DataError, match="must be one of A, B, tie, both bad"):
        ask_people(ReviewAnnotator(), [comparison("c0")], name="x", uri="")


def test_each_comparison_goes_to_as_many_as_asked_for_and_a_repetition_to_the_same():
    rows = [*(comparison(f"c{n}") for n in range(6)), comparison("c1-again", repeats="c1")]
    shares = {name: {one.id for one in given} for name, given in shared_out(rows, ("a", "b", "c"), 2).items()}
    for one in rows:
        assert sum(one.id in share for share in shares.values()) == 2
    assert all(("c1" in share) == ("c1-again" in share) for share in shares.values())
    assert {len(share) for share in shares.values()} == {4, 5}


def test_a_person_sees_the_conversation_and_both_answers_and_no_policy():
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
def test_an_answer_cannot_pass_for_both(answer, shown_as):
    item = shown(Comparison("c", (Message("user", "Hi"),), "", "test", answer, "two", "sft", "ppo"))
    assert item.response == f"### A\n\n{shown_as}\n\n---\n\n### B\n\ntwo"


def test_the_condition_of_a_wait_tells_another_process_when_it_is_met(tmp_path):
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
def test_annotators_who_cannot_be_asked_are_refused(given, rule):
    with pytest.raises(ValidationError, match=rule):
        ReviewAnnotator.model_validate(given)
