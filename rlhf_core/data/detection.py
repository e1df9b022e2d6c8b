"""Tell the format of a row by its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rlhf_core.config.data import RowFormat
from rlhf_core.data.columns import prompt_name
from rlhf_core.data.comparisons import TRANSCRIPT_TURN, is_ranking, refuse_hidden_answers, responses
from rlhf_core.data.ratings import is_rated
from rlhf_core.data.turns import begins_conversation
from rlhf_core.errors import DataError

FORMATS = sorted(set(get_args(RowFormat)) - {"auto"})


MORE_THAN_ONE_ANSWER = ("chosen", "rejected", "preference", "answers", "completions", "ratings", "reward")
"""Columns of formats in which an answer is worth more than another; those of one answer have none of them."""


def detect(row: Mapping[str, Any]) -> str:
    """Return the format of `row` by its columns. Raises DataError for columns that are unknown or would be left out.

    >>> detect({"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    'preference'
    """
    has = {name for name, value in row.items() if value is not None}
    if export := exported(row):
        return export
    if {"chosen", "rejected"} <= has:
        return _pair_format(row)
    if {"prompt", "preference"} <= has and responses(row):
        return "comparison"
    if "prompt" in has and is_ranking(row):
        return "ranking"
    if is_rated(row):
        return "ratings"
    if {"prompt", "completion", "reward"} <= has and "label" not in has:
        return "scored"
    for name, needed in (
        ("stepwise", {"prompt", "completions", "labels"}),
        ("scored", {"input", "output", "reward"}),
        ("unpaired_preference", {"prompt", "completion", "thumbs"}),
        ("alpaca", {"instruction", "output"}),
        ("messages", {"messages"}),
        ("messages", {"conversations"}),
        ("question_answer", {"question", "answer"}),
        ("prompt", {"prompt"}),
        ("text", {"text"}),
    ):
        if needed <= has:
            if name == "prompt" and "completion" not in has:
                refuse_hidden_answers(row)
            if name != "prompt" or "completion" not in has:
                return name
            return "prompt_completion"
    raise DataError(
        f"unknown columns: {sorted(row)}; known formats are {FORMATS}; set `columns` to the names in the row"
    )


def exported(row: Mapping[str, Any]) -> str:
    """Return the format of a record of an annotation tool's export, or the empty text for any other row."""
    if {"data", "annotations"} <= set(row):
        return "label_studio"
    return "argilla" if {"fields", "responses"} <= set(row) else ""


# ---------------------------------------------------------------- private


def _pair_format(row: Mapping[str, Any]) -> str:
    """Return the format of a pair. Raises DataError if the prompt would have to be guessed from common words."""
    sides = row["chosen"], row["rejected"]
    if prompt_name(row) == "prompt" or not all(map(begins_conversation, sides)):
        if not prompt_name(row):
            raise DataError(
                f"no prompt: chosen and rejected are answers alone, and none of the columns {sorted(row)} is known as "
                "their prompt; set columns = {prompt = ...}, or format = 'implicit_preference' where both begin with it"
            )
        return "preference"
    return "hh" if isinstance(sides[0], str) and TRANSCRIPT_TURN.match(sides[0]) else "implicit_preference"
