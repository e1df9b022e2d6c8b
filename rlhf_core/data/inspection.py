"""Describe the rows of data files, and what `prepare_data` makes of them, without a tokenizer (`rlhf data`)."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlhf_core.config.data import KINDS, Columns, Source
from rlhf_core.data.cleaning import deduplicate, exact
from rlhf_core.data.columns import is_empty
from rlhf_core.data.files import best_against_worst, pair_unpaired, read_examples, usual_format
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport, Reason
from rlhf_core.data.mixing import misfit
from rlhf_core.data.rows import StoredRows
from rlhf_core.data.sources import Record, read
from rlhf_core.data.turns import Turns
from rlhf_core.errors import RlhfError

ROWS_FOR_COLUMNS = 100  # rows whose columns are listed; later rows of a table rarely have others
SHOWN_ROWS = 2  # of each source
LONGEST_TURN = 400  # characters of a turn that are shown


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The rows of one source: format, columns, what is dropped and why, and the tables that it can fill."""

    source: Source
    format: str = ""
    """Empty if no row has a format that is known."""
    rows_read: int = 0
    usable: int = 0
    columns_read: tuple[str, ...] = ()
    columns_not_read: Mapping[str, int] = field(default_factory=dict)
    """Column -> number of rows that hold something there; of columns that only dropped rows have, among the first rows."""
    dropped: Sequence[Reason] = ()
    tables: Mapping[str, int] = field(default_factory=dict)
    """Table -> rows that it would have if the whole source went there."""
    empty: Mapping[str, str] = field(default_factory=dict)
    """Table without rows -> the reason."""
    rows: tuple[str, ...] = ()
    """The first rows as text, with the trained parts inside 【 】."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """The columns of `source` if they were guessed."""
    problem: str = ""
    """The error for which the source cannot be read at all."""


def inspect(source: Source) -> SourceReport:
    """Return what is known of `source` without a tokenizer; guess `columns` if no row can be read without them."""
    found = _inspect(source)
    if found.usable or found.problem or source.columns != Columns():
        return found
    guesses = Counter(tuple(guess_columns(record.row).items()) for record in _first(source))
    del guesses[()]
    guessed = next((dict(guess) for guess, _ in guesses.most_common(1)), {})
    if not guessed:
        return found
    again = _inspect(source.model_copy(update={"columns": Columns(**guessed)}), guessed)
    return again if again.usable else found


def _inspect(source: Source, guessed: Mapping[str, str] | None = None) -> SourceReport:
    report = DropReport()
    try:
        first = list(_first(source))
        readable = read_examples(source, max_bad_fraction=1.0, report=report)
        origins = {example.origin for example in readable}
        used = list(islice((record for record in read(source) if record.origin in origins), ROWS_FOR_COLUMNS))
        examples = deduplicate(readable, report)
    except RlhfError as error:
        return SourceReport(source, rows_read=report.rows_read[source.name], problem=str(error))
    unread = report.not_read[source.name]
    columns_read = tuple(name for name in _columns(used) if name not in unread)
    others = {name: rows for name, rows in _columns(first).items() if name not in (*columns_read, *unread)}
    tables, empty = _tables(examples, min_margin=source.min_margin)
    return SourceReport(
        source,
        format=usual_format(first, source),
        rows_read=report.rows_read[source.name],
        usable=len({example.origin for example in examples}),
        columns_read=columns_read,
        columns_not_read=unread | others,
        dropped=report.reasons(),
        tables=tables,
        empty=empty,
        rows=tuple(shown(example) for example in examples[:SHOWN_ROWS]),
        guessed=guessed or {},
    )


def _columns(records: Sequence[Record]) -> Counter[str]:
    """Return the number of records that hold something in each column."""
    return Counter(name for record in records for name, value in record.row.items() if not is_empty(value))


def _first(source: Source) -> Iterator[Record]:
    return islice(read(source), ROWS_FOR_COLUMNS)


def _tables(examples: StoredRows[Example], *, min_margin: float) -> tuple[dict[str, int], dict[str, str]]:
    """Return the rows that each table would have if all examples went there, and why the others would have none."""
    joined = pair_unpaired(best_against_worst(examples, DropReport(), min_margin=min_margin))
    counts: dict[str, int] = {}
    empty: dict[str, str] = {}
    for table in KINDS:
        found = examples if table == "steps" else joined
        reasons = Counter(misfit(example, table) for example in found)
        fit = [example for example in found if misfit(example, table) is None]
        prompts = table in ("prompts", "eval_prompts")
        if (
            table == "preferences"
        ):  # answers that are judged alone, and have no other one to be paired with, are feedback
            alone = [example for example in fit if not (example.chosen and example.rejected)]
            fit = [example for example in fit if example.chosen and example.rejected]
            counts |= {"feedback": len(alone)} if alone else {}
            if alone:
                reasons = Counter({"no pair of answers: those to a prompt are all good or all bad": len(alone)})
        counts[table] = len({exact(example.prompt) for example in fit}) if prompts else len(fit)
        if not fit:
            empty[table] = str(max(reasons, key=lambda reason: reasons[reason], default="no row can be read"))
    return counts, empty


# ---------------------------------------------------------------- rows as text


def shown(example: Example) -> str:
    """Return a row as text: a line for each turn, its role first, and for each tool call, with the trained parts inside 【 】.

    >>> from rlhf_core.types import Message
    >>> print(shown(Example((Message("user", "2+2?"),), chosen=(Message("assistant", "4"),))))
    user: 2+2?
    assistant: 【4】
    """
    pair = bool(example.chosen and example.rejected)
    lines = list(_turns(example.prompt, trained=bool(example.chosen) and not example.rejected))
    for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
        if answer:
            lines += [f"{name}:"] if pair or name == "rejected" else []
            lines += _turns(answer, trained=True)
    return "\n".join([*lines, *([f"label: {_cut(example.label)}"] if example.label else [])])


def _turns(turns: Turns, *, trained: bool) -> Iterator[str]:
    for message in turns:
        fields = json.loads(message.tool_fields) if message.tool_fields else {}
        if "tools" in fields:
            yield f"tools: {', '.join(str(tool['function']['name']) for tool in fields['tools'])}"
        called = [one["function"] for one in fields.get("tool_calls", ())]
        calls = [f"{one['name']}({json.dumps(one['arguments'], ensure_ascii=False)})" for one in called]
        text = "\n".join(map(_cut, [message.content] * bool(message.content or not calls) + calls))
        role = f"{message.role} {fields['name']}" if "name" in fields else message.role
        yield f"{role}: {f'【{text}】' if trained and message.role == 'assistant' else text}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TURN else f"{text[:LONGEST_TURN]} ... ({len(text):,} characters)"


# ---------------------------------------------------------------- columns of other names

SPELLINGS = {
    "prompt": "prompt question query problem instruction instructions input ask request user human source task",
    "completion": "completion response output answer reply target solution assistant generation bot gold result",
    "chosen": "chosen better best good preferred winner accepted positive win responsechosen",
    "rejected": "rejected worse worst bad dispreferred loser negative lose nonpreferred responserejected",
    "messages": "messages dialog dialogue conversation conversations turns chat history",
    "text": "text body content document passage story",
    "completions": "completions responses answers outputs candidates generations replies options",
    "scores": "scores score ratings rewards reward",
}
"""Column of a format -> names that data sets give it, in lower case and without other signs, the most usual first."""

_LISTS = ("completions", "scores")
_SETS = (
    *(("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("prompt", *_LISTS)),
    *(("prompt", "completion"), ("messages",), ("text",)),
)
"""Columns that make a format, those that hold the most first; `_LISTS` hold lists."""


def guess_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return `columns` with which `row` has a known format, by the spelling of its names; empty if there are none.

    Of two texts with names that mean nothing, the first is the prompt.

    >>> guess_columns({"Question ": "2+2?", "reply": "4", "id": 7})
    {'prompt': 'Question ', 'completion': 'reply'}
    """
    names = dict(_names(row))
    for wanted in (*_SETS, ("prompt",)):
        found: dict[str, str] = {}
        for ours in wanted:
            theirs = _spelled(
                SPELLINGS[ours].split(), {name: said for name, said in names.items() if name not in found.values()}
            )
            if theirs and (ours not in _LISTS or isinstance(row.get(theirs), list)):
                found[ours] = theirs
        if len(found) == len(wanted):
            return {ours: theirs for ours, theirs in found.items() if ours != theirs}
    return dict(zip(("prompt", "completion"), names, strict=True)) if len(names) == 2 else {}


def _names(row: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield the columns of a row and the values inside of them (`a.b`), with their last names spelled plainly."""
    for name, value in row.items():
        if isinstance(value, Mapping) and not within:
            yield from _names(value, f"{name}.")
        elif isinstance(value, (str, list)) and value:
            yield within + name, re.sub(r"[\W_]", "", name).lower()


def _spelled(spellings: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the column with one of `spellings`, or else with a name that is nearly the first; empty if none has."""
    plain = {said: name for name, said in reversed(list(names.items()))}
    near = difflib.get_close_matches(spellings[0], plain, n=1, cutoff=0.75)
    return next((plain[one] for one in (*spellings, *near) if one in plain), "")
