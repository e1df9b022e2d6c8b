"""Describe rows of data files, and the tables that `prepare_data` would make of them (`rlhf data`)."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rlhf_core.config.data import KINDS, Source
from rlhf_core.data.cleaning import deduplicate, exact
from rlhf_core.data.columns import is_empty
from rlhf_core.data.files import pair_unpaired, read_examples, usual_format
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
    """The rows of one source: format, columns, dropped rows with reasons, and the tables that it can fill."""

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
    function: str = ""
    """The function to paste if rows are in no known form."""
    problem: str = ""
    """The error for which the source cannot be read at all."""


def inspect(source: Source) -> SourceReport:
    """Describe `source` as far as is possible without a tokenizer."""
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
    tables, empty = _tables(examples)
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
        function=report.functions.get(source.name, ""),
    )


def _columns(records: Sequence[Record]) -> Counter[str]:
    """Count the records with a value in each column."""
    return Counter(name for record in records for name, value in record.row.items() if not is_empty(value))


def _first(source: Source) -> Iterator[Record]:
    return islice(read(source), ROWS_FOR_COLUMNS)


def _tables(examples: StoredRows[Example]) -> tuple[dict[str, int], dict[str, str]]:
    """Count the rows that each table would have if all examples went there; for empty tables, give the reason."""
    joined = pair_unpaired(examples)
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
    """Format a row as text: one line per turn (role first) and per tool call, with the trained parts inside 【 】.

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
