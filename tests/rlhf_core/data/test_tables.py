"""Parquet layouts: what is written is what is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhf_core.data.tables import (
    Demonstration,
    Feedback,
    Preference,
    SteppedAnswer,
    Tables,
    content_id,
    read_demonstrations,
    read_feedback,
    read_preferences,
    read_prompts,
    read_steps,
    write_demonstrations,
    write_feedback,
    write_preferences,
    write_prompts,
    write_steps,
)
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt

ASK, SAY, NAY = (Message("user", "Hi"),), (Message("assistant", "Hello."),), (Message("assistant", "No."),)
PROMPT = Prompt("p1", ASK, '{"answer": 3}', "world")


def test_demonstrations_come_back(tmp_path: Path) -> None:
    rows = [Demonstration("d1", ASK + SAY, "world"), Demonstration("d2", ASK + NAY, "other")]
    write_demonstrations(tmp_path / "train.parquet", rows)
    assert read_demonstrations(tmp_path / "train.parquet") == rows


def test_preferences_come_back(tmp_path: Path) -> None:
    rows = [Preference("a", ASK, SAY, NAY, 0.5, "world"), Preference("b", ASK, NAY, SAY, 0.0, "world")]
    write_preferences(tmp_path / "train.parquet", rows)
    assert read_preferences(tmp_path / "train.parquet") == rows


def test_prompts_come_back(tmp_path: Path) -> None:
    for rows in ([PROMPT], [PROMPT, replace(PROMPT, conversational=True)]):
        write_prompts(tmp_path, rows)
        assert read_prompts(tmp_path) == rows
        names = pq.read_schema(tmp_path / "prompts.parquet").names  # tables of text keep their bytes
        assert ("conversational" in names) == (len(rows) > 1)


def test_a_table_names_its_columns_and_no_other_table_is_taken_for_it(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "eval.parquet", [])
    assert pq.read_schema(tmp_path / "eval.parquet").names == ["id", "messages", "source"]
    with pytest.raises(DataError, match="lacks the columns"):
        read_preferences(tmp_path / "eval.parquet")


def test_ids_depend_on_content_only() -> None:
    assert content_id("a", ASK) == content_id("a", (Message("user", "Hi"),)) != content_id("a", SAY)


def test_a_tokenizer_is_trained_on_demonstrations_or_else_on_pairs_and_prompts() -> None:
    pair = Preference("a", ASK, SAY, NAY, 0.0, "world")
    demonstration = Demonstration("d", ASK + SAY, "world")
    both = Tables((demonstration,), (), (pair,), (), (PROMPT,), ())
    assert list(both.training_texts()) == ["Hi", "Hello."]
    assert list(Tables((), (), (pair,), (), (PROMPT,), ()).training_texts()) == ["Hi", "Hello.", "No.", "Hi"]


def test_steps_are_read_as_written_and_the_tokenizer_sees_them(tmp_path: Path) -> None:
    row = SteppedAnswer("s", ASK, ("one", "two"), (1.0, 0.25), "world")
    write_steps(tmp_path / "train.parquet", [row])
    assert read_steps(tmp_path / "train.parquet") == [row]
    assert row.answer("; ") == (Message("assistant", "one; two"),)
    demonstration = Demonstration("d", ASK + SAY, "world")
    tables = Tables((demonstration,), (), (), (), (), (), steps=(row,))
    assert list(tables.training_texts()) == ["Hi", "Hello.", "Hi", "one\ntwo"]


def test_annotators_are_kept_and_tables_without_them_have_no_such_column(tmp_path: Path) -> None:
    pair = Preference(
        "p", (Message("user", "Hi"),), (Message("assistant", "A"),), (Message("assistant", "B"),), 0.5, "s"
    )
    write_preferences(tmp_path / "plain.parquet", [pair])
    assert "annotator" not in pq.read_schema(tmp_path / "plain.parquet").names
    assert read_preferences(tmp_path / "plain.parquet") == [pair]
    judged = [pair, replace(pair, annotator="annotator-1")]
    write_preferences(tmp_path / "judged.parquet", judged)
    assert read_preferences(tmp_path / "judged.parquet") == judged
    thumbs = [Feedback("f", pair.prompt, pair.chosen, True, "s", "annotator-2")]
    write_feedback(tmp_path, "train", thumbs)
    assert read_feedback(tmp_path, "train") == thumbs
