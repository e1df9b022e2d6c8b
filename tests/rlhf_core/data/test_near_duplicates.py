"""Rows that are almost the same are dropped with the row that they repeat."""

from __future__ import annotations

import json

import pytest

from rlhf_core.data.cleaning import NearDuplicates, shingles
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.types import Message

pytest.importorskip("datasketch")

LONG = "please tell me how a camel can live in the desert for many days without a drop of water to drink"


def example(text: str, line: int) -> Example:
    return Example((Message("user", text),), (), (), "", 0.0, "s", Origin("f.jsonl", line))


def distinct(*examples: Example, threshold: float = 0.7) -> tuple[list[int], list[str]]:
    report = DropReport()
    kept = NearDuplicates(threshold).distinct(examples, report)
    return [one.origin.line for one in kept], [drop.reason for drop in report.drops]


def test_a_row_that_differs_in_a_word_is_dropped_and_another_one_stays() -> None:
    kept, reasons = distinct(
        example(LONG, 1), example(f"{LONG} then", 2), example(f"What? {LONG.upper()}!", 3), example("why is it cold", 4)
    )
    assert kept == [1, 4]
    assert len(reasons) == 2 and all(one.startswith("near-duplicate: ") and "f.jsonl:1" in one for one in reasons)


def test_half_of_the_words_in_common_are_too_few() -> None:
    half = " ".join(LONG.split()[:10]) + " and a cow or a goat on a farm in the far north of the land"
    assert distinct(example(LONG, 1), example(half, 2))[0] == [1, 2]


def test_pairs_of_one_row_are_not_duplicates_of_each_other() -> None:
    assert distinct(example(LONG, 1), example(LONG, 1))[0] == [1, 1]


def test_a_short_text_is_one_shingle() -> None:
    assert shingles("user hi") == {b"user hi"}
    assert shingles("") == {b""}


def with_system(text: str, line: int) -> Example:
    turns = (Message("system", f"{LONG} {LONG[::-1]}"), Message("user", text))
    return Example(turns, (), (), "", 0.0, "s", Origin("f.jsonl", line))


def test_a_system_prompt_or_tools_that_rows_share_do_not_make_them_similar() -> None:
    assert distinct(with_system("why is it cold", 1), with_system("where do cows sleep", 2))[0] == [1, 2]
    assert distinct(with_system(LONG, 1), example(LONG, 2))[0] == [1]
    schema = json.dumps({"tools": [{"type": "function", "function": {"name": "add", "description": LONG}}]})
    asked = [
        Example((Message("user", text, schema),), (), (), "", 0.0, "s", Origin("f.jsonl", line))
        for line, text in enumerate(("why is it cold", "where do cows sleep"), start=1)
    ]
    assert distinct(*asked)[0] == [1, 2]


def test_rows_that_differ_in_what_they_call_are_not_similar() -> None:
    def calling(name: str, line: int) -> Example:
        calls = json.dumps({"tool_calls": [{"function": {"name": name, "arguments": {"by": name, "to": name[::-1]}}}]})
        turns = (Message("user", "do it"),), (Message("assistant", "", calls),)
        return Example(*turns, (), "", 0.0, "s", Origin("f.jsonl", line))

    assert distinct(calling("mail", 1), calling("weather", 2), calling("mail", 3))[0] == [1, 2]


def test_rows_of_system_turns_alone_are_compared_by_them() -> None:
    rows = [
        Example((Message("system", text),), (), (), "", 0.0, "s", Origin("f.jsonl", line))
        for line, text in enumerate((LONG, "why is it cold", LONG), start=1)
    ]
    assert distinct(*rows)[0] == [1, 2]
