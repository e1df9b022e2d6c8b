"""Simulated people, and people who fill in a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rlhf_core.annotation.annotators import EXPORT, IMPORT, NotJudgedYet, ask_file, ask_program
from rlhf_core.annotation.proposing import Comparison, Judgment
from rlhf_core.config.annotators import FileAnnotator, ProgramAnnotator
from rlhf_core.errors import DataError
from rlhf_core.types import Generation, Message

HERE = f"{__name__}:length"


def length(generations: list[Generation]) -> list[float]:
    return [float(len(one.completion.text)) for one in generations]


def comparison(name: str, first: str = "longer", second: str = "short") -> Comparison:
    return Comparison(name, (Message("user", name),), "", "test", first, second, "sft", "ppo")


# ---------------------------------------------------------------- programs


def test_a_program_without_noise_chooses_by_its_reward_on_both_sides() -> None:
    config = ProgramAnnotator(function=HERE, temperature=1e-3)
    rows = [comparison("c1"), comparison("c2", "short", "longer"), comparison("c3", "equal", "equal")]
    said = ask_program(config.model_copy(update={"tie_below": 0.5}), rows, code={}, seed=1)
    assert [one.choice for one in said] == ["first", "second", "tie"]


def test_the_noise_is_bradley_terrys() -> None:
    """sigmoid(1 / 2) of the judgments prefer the answer that is better by 1, at temperature 2."""
    rows = [comparison(f"c{n}") for n in range(2000)]
    said = ask_program(ProgramAnnotator(function=HERE, temperature=2.0), rows, code={}, seed=1)
    share = sum(one.choice == "first" for one in said) / len(said)
    expected = 1 / (1 + math.exp(-1 / 2))
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))  # 4 standard errors


def test_every_simulated_person_has_noise_of_its_own_that_the_seed_decides() -> None:
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


def test_comparisons_are_exported_and_waited_for(tmp_path: Path) -> None:
    config = FileAnnotator(folder=str(tmp_path / "exchange"))
    exchange = tmp_path / "exchange" / "round-1"
    with pytest.raises(NotJudgedYet, match=r"0 of 2 comparisons are judged; add lines to .*judgments\.jsonl"):
        ask_file(config, [comparison("c1"), comparison("c2")], name="round-1")
    [one, two] = map(json.loads, (exchange / EXPORT).read_text().splitlines())
    assert one == {"id": "c1", "prompt": [{"role": "user", "content": "c1"}], "first": "longer", "second": "short"}
    assert "policy" not in json.dumps([one, two]) and "expected" not in one


def test_what_people_wrote_is_returned_once_it_is_enough(tmp_path: Path) -> None:
    config = FileAnnotator(folder=str(tmp_path), needed=0.5)
    row = {"id": "c2", "choice": "second", "annotator": "ada", "reason": "clearer\u2028and shorter", "seconds": 3}
    write(tmp_path, row)
    expected = [Judgment("c2", "ada", "second", "clearer\u2028and shorter", 3.0)]
    assert ask_file(config, [comparison("c1"), comparison("c2")], name="") == expected
    with pytest.raises(NotJudgedYet, match="1 of 2 "):
        ask_file(FileAnnotator(folder=str(tmp_path)), [comparison("c1"), comparison("c2")], name="")


def test_a_last_line_that_is_being_written_is_not_there_yet_and_a_whole_one_without_an_end_is(tmp_path: Path) -> None:
    config = FileAnnotator(folder=str(tmp_path))
    (tmp_path / IMPORT).write_text('{"id": "c1", "choice": "first"}\n{"id": "c2", "cho')
    with pytest.raises(NotJudgedYet, match="1 of 2 "):
        ask_file(config, [comparison("c1"), comparison("c2")], name="")
    (tmp_path / IMPORT).write_text('{"id": "c1", "choice": "first"}\n{"id": "c2", "choice": "tie"}')
    assert len(ask_file(config, [comparison("c1"), comparison("c2")], name="")) == 2


def test_rounds_with_the_same_folder_have_files_of_their_own(tmp_path: Path) -> None:
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
def test_a_line_that_is_no_judgment_is_refused_with_its_place(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / IMPORT).write_bytes(f"\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=said) as refused:
        ask_file(FileAnnotator(folder=str(tmp_path)), [comparison("c1")], name="")
    assert IMPORT in str(refused.value)


def test_at_the_deadline_the_lines_that_are_there_are_enough(tmp_path: Path) -> None:
    rows = [comparison("c1"), comparison("c2")]
    config = FileAnnotator(folder=str(tmp_path), deadline_hours=1)
    write(tmp_path, {"id": "c1", "choice": "first"})
    with pytest.raises(NotJudgedYet):
        ask_file(config, rows, name="")
    os.utime(tmp_path / EXPORT, (0, 0))
    assert len(ask_file(config, rows, name="")) == 1
