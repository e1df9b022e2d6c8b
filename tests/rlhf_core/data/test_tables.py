"""Parquet layouts, steps of answers, and the preview."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import plain_messages, write_table
from rlhf_core.data.tables import (
    DEMONSTRATIONS_SCHEMA,
    Demonstration,
    Feedback,
    Preference,
    SteppedAnswer,
    StepSplitter,
    Tables,
    content_id,
    preview,
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
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Message, Prompt

# ---------------------------------------------------------------- tables


ASK, SAY, NAY = (Message("user", "Hi"),), (Message("assistant", "Hello."),), (Message("assistant", "No."),)
PROMPT = Prompt("p1", ASK, '{"answer": 3}', "world")
PAIR = Preference("a", ASK, SAY, NAY, 0.5, "world")
CALLS = json.dumps({"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 12}}}]})
CALLING = (*ASK, Message("assistant", "", CALLS))
FILES: dict[type, tuple[Callable[..., None], Callable[..., list[Any]]]] = {
    Demonstration: (write_demonstrations, read_demonstrations),
    Preference: (write_preferences, read_preferences),
    SteppedAnswer: (write_steps, read_steps),
    Prompt: (write_prompts, read_prompts),
    Feedback: (
        lambda folder, rows: write_feedback(folder, "train", rows),
        lambda folder: read_feedback(folder, "train"),
    ),
}
"""Type of a row -> how tables of it are written and read."""


@pytest.mark.parametrize(
    ("rows", "optional"),
    [
        ([Demonstration("d1", ASK + SAY, "world"), Demonstration("d2", ASK + NAY, "other")], []),
        ([Demonstration("d", ASK + SAY, "s"), Demonstration("t", CALLING, "s")], []),
        ([PAIR, Preference("b", ASK, NAY, SAY, 0.0, "world")], []),
        ([PAIR, replace(PAIR, annotator="annotator-1")], ["annotator"]),
        ([Feedback("f", ASK, SAY, True, "s")], []),
        ([Feedback("f", ASK, SAY, True, "s", "annotator-2"), Feedback("g", ASK, NAY, False, "s")], ["annotator"]),
        ([SteppedAnswer("s", ASK, ("one", "two"), (1.0, 0.25), "world")], []),
        ([PROMPT], []),
        ([PROMPT, replace(PROMPT, conversational=True)], ["conversational"]),
    ],
)
def test_rows_come_back_and_columns_that_no_row_needs_are_not_written(tmp_path, rows, optional):
    """Tables without annotators or lists of turns keep the bytes that they had before there were such columns."""
    write, read = FILES[type(rows[0])]
    place = tmp_path if isinstance(rows[0], Prompt | Feedback) else tmp_path / "train.parquet"
    write(place, rows)
    assert read(place) == rows
    names = pq.read_schema(next(tmp_path.iterdir())).names
    assert [name for name in names if name in ("annotator", "conversational")] == optional


def test_a_table_of_many_parts_has_the_bytes_of_one_written_at_once(tmp_path):
    # 25,000 rows are three parts; pyarrow cuts pages by rows, and their texts are more than one page
    rows = [Demonstration(f"d{at}", (Message("user", f"{at} " * 40), *SAY), "world") for at in range(25_000)]
    write_demonstrations(tmp_path / "parts.parquet", rows)
    columns = {
        "id": [row.id for row in rows],
        "messages": [plain_messages(row.messages) for row in rows],
        "source": [row.source for row in rows],
    }
    write_table(tmp_path / "whole.parquet", DEMONSTRATIONS_SCHEMA, columns)
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_texts_that_one_piece_of_a_column_cannot_hold_are_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.data.shards._LARGEST", 300_000)  # bytes, for 2 GiB
    rows = [Demonstration(f"d{at}", (Message("user", f"{at:020}"), *SAY), "world") for at in range(15_000)]
    write_demonstrations(tmp_path / "pieces.parquet", rows)
    assert read_demonstrations(tmp_path / "pieces.parquet") == rows


def test_a_table_names_its_columns_and_no_other_table_is_taken_for_it(tmp_path):
    write_demonstrations(tmp_path / "eval.parquet", [])
    assert pq.read_schema(tmp_path / "eval.parquet").names == ["id", "messages", "source"]
    with pytest.raises(DataError, match="lacks the columns"):
        read_preferences(tmp_path / "eval.parquet")


def test_ids_depend_on_content_only():
    assert content_id("a", ASK) == content_id("a", (Message("user", "Hi"),)) != content_id("a", SAY)
    assert content_id(ASK + SAY) == "b4c4429930d0be07"  # as before messages could hold tool calls
    assert content_id(CALLING) != content_id(tuple(Message(one.role, one.content) for one in CALLING))


def test_a_tokenizer_is_trained_on_demonstrations_or_else_on_pairs_and_prompts():
    pair = PAIR
    demonstration = Demonstration("d", ASK + SAY, "world")
    both = Tables((demonstration,), (), (pair,), (), (PROMPT,), ())
    assert list(both.training_texts()) == ["Hi", "Hello."]
    assert list(Tables((), (), (pair,), (), (PROMPT,), ()).training_texts()) == ["Hi", "Hello.", "No.", "Hi"]


def test_the_tokenizer_sees_steps():
    row = SteppedAnswer("s", ASK, ("one", "two"), (1.0, 0.25), "world")
    assert row.answer("; ") == (Message("assistant", "one; two"),)
    tables = Tables((Demonstration("d", ASK + SAY, "world"),), (), (), (), (), (), steps=(row,))
    assert list(tables.training_texts()) == ["Hi", "Hello.", "Hi", "one\ntwo"]


# ---------------------------------------------------------------- steps


def ids(chat: ChatTemplate, text: str, *, end: bool = False) -> tuple[int, ...]:
    return (*chat.tokenizer(text, add_special_tokens=False)["input_ids"], *([chat.eos_id] if end else []))


@pytest.mark.parametrize(
    ("text", "end", "ends"),
    [
        ("1\n23\n4", False, (1, 4, 5)),
        ("1\n23\n4", True, (1, 4, 6)),  # the end token belongs to the last step
        ("12", False, (1,)),  # without the separator: one step
        ("12", True, (2,)),
        ("1\n2\n", False, (1, 3)),  # cut off after a separator, or ended there: no empty step
        ("1\n2\n", True, (1, 4)),
        ("1\n\n2", False, (2, 3)),  # a blank line belongs to the step before it
        ("\n1\n2", False, (2, 3)),  # or to the first
        ("", True, (0,)),
        ("\n", True, (1,)),
        ("", False, ()),
    ],
)
def test_a_step_ends_with_its_separator_and_the_last_with_the_answer(chat, text, end, ends):
    splitter = StepSplitter(chat, "\n")
    assert splitter.ends(ids(chat, text, end=end)) == ends


def test_a_separator_of_several_tokens_and_one_inside_a_token_are_found(chat):
    assert StepSplitter(chat, "9#9").ends(ids(chat, "1" + "9#9" + "23")) == (3, 5)
    (how_are,) = [token for token in ids(chat, "Hello Maria") if chat.tokenizer.decode([token]).strip() == "Maria"]
    assert StepSplitter(chat, "ri").ends([how_are, *ids(chat, "12")]) == (0, 2)


def test_steps_do_not_move_when_the_answer_is_not_what_the_tokenizer_would_write(chat):
    whole = ids(chat, "Hello")
    spelt = [token for letter in "Hello" for token in ids(chat, letter)]
    assert len(spelt) == 5 > len(whole)
    newline = ids(chat, "\n")
    assert StepSplitter(chat, "\n").ends([*spelt, *newline, *whole]) == (5, 5 + len(whole))


@pytest.mark.parametrize("separator", ["", "ки"])
def test_a_separator_that_the_tokens_do_not_spell_is_refused(chat, separator):
    with pytest.raises(ConfigError, match=r"separator = .* cannot spell it"):
        StepSplitter(chat, separator)


# ---------------------------------------------------------------- preview

ONE, TWO, THREE = (Message("user", "1"),), (Message("assistant", "2"),), (Message("assistant", "3"),)


def test_trained_tokens_are_marked_in_every_table(chat):
    pair = Preference("p", ONE, TWO, THREE, 0.0, "s")
    judged = Feedback("f", ONE, THREE, False, "s")
    tables = Tables((Demonstration("d", ONE + TWO, "s"),), (), (pair,), (), (), (Prompt("e", ONE, "", "s"),))
    tables = replace(tables, feedback=(judged,))
    assert preview(tables, chat, rows=3) == (
        "# What the model sees\n\nTrained tokens are inside 【 】.\n\n"
        "## Demonstrations\n\n    <|user|>1<|end|><|assistant|>【2<|end|>】\n\n\n"
        "## Preferences (chosen, then rejected)\n\n"
        "    <|user|>1<|end|><|assistant|>【2<|end|>】\n\n    <|user|>1<|end|><|assistant|>【3<|end|>】\n\n\n"
        "## Feedback (answers judged on their own)\n\n"
        "    <|user|>1<|end|><|assistant|>【3<|end|>】\n\n    desirable: false\n\n\n"
        "## Evaluation prompts\n\n    <|user|>1<|end|><|assistant|>\n\n"
    )


def test_only_so_many_rows_are_shown(chat):
    tables = Tables(tuple(Demonstration(f"{n}", ONE + TWO, "s") for n in range(5)), (), (), (), (), ())
    assert preview(tables, chat, rows=2).count("【2") == 2


def test_steps_are_shown_with_their_labels(chat):
    row = SteppedAnswer("s", ONE, ("2", "3"), (1.0, 0.25), "s")
    text = preview(Tables((), (), (), (), (), (), steps=(row,)), chat, rows=3)
    assert text.endswith(
        "## Steps (one a line, then the label of each)\n\n"
        "    <|user|>1<|end|><|assistant|>【2\n    3<|end|>】\n\n    labels: 1, 0.25\n\n"
    )
