"""Read columns by the names of our formats, detect a source's format, and decide what its labels mean.

A row records the columns that are read, so that those left out can be reported or refused. Whether labels are verdicts on
answers or expected answers is decided over a whole source: a verdict that is read as an expected answer makes a bad answer
one to imitate, so labels that can be read both ways are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from rlhf_core.config.data import Columns, RowFormat, Source
from rlhf_core.data.comparisons import (
    TRANSCRIPT_TURN,
    Row,
    asked,
    is_ranking,
    is_rated,
    refuse_hidden_answers,
    refuse_sides,
    responses,
)
from rlhf_core.data.turns import (
    TRUTHS,
    WORTHS,
    Turns,
    begins_conversation,
    spelling,
    string,
    turns_of,
    unread_keys,
    worth,
)
from rlhf_core.errors import DataError
from rlhf_core.types import Message

PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "messages", "conversations")
"""Names of columns that are the prompt of a pair, the first of them that a row has; `instruction` goes with `input`."""

_BEFORE = (
    r"(\w+_)?(contexts?|passages?|documents?|articles?|paragraphs?)(_(text|body))?|docs?|ctx(_[ab])?|history|background(_info)?"
    r"|premise|story|dialogue|tables?|facts|knowledge|scenario|situation|(db_|sql_|table_)schema|create_table"
)
_AFTER = (
    r"input|(\w+_)?(choices?|options?|endings?)(_?[a-z\d])?|op[a-e]|hypothesis|images?|figures?|audios?|videos?"
    r"|starter_code|[a-e]"
)
_NEEDED = re.compile(rf"(?P<before>{_BEFORE})|{_AFTER}", re.IGNORECASE)
"""Columns without which a prompt is another one; some stand before the question."""

_OPEN_TRANSCRIPT = re.compile(r"(^|\n\n)Assistant:\s*$")


_AS_THEY_ARE = Columns()
_ABSENT = object()


class Reading(Mapping[str, Any]):
    """A row under the names of our formats, which records the columns that are read.

    A name with dots is a value inside of a column.

    >>> row = Reading({"instruction": "2+2?", "reward_model": {"ground_truth": "4"}, "id": 7}, Columns(prompt="instruction"))
    >>> row["prompt"], row["reward_model.ground_truth"], row.unread()
    ('2+2?', '4', ['id'])
    """

    __slots__ = ("_row", "_seen", "_theirs")

    def __init__(self, row: Mapping[str, Any], columns: Columns = _AS_THEY_ARE) -> None:
        """Raise DataError for a mapped column that the row does not have."""
        self._row = row
        self._theirs = _mapped(columns)
        self._seen: set[str] = set()
        missing = sorted(theirs for theirs in self._theirs.values() if _value(row, theirs) is _ABSENT)
        if missing:
            raise DataError(f"no such column: {missing[0]!r}; the row has {sorted(row)}")

    def __getitem__(self, name: str) -> Any:
        theirs = self._name(name)
        value = _ABSENT if theirs is None else _value(self._row, theirs)
        if theirs is None or value is _ABSENT:
            raise KeyError(name)
        self._seen.add(theirs)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a column, read; `default` if the row does not have it."""
        if name not in self._row and name not in self._theirs and "." not in name:  # as most names in most rows
            return default
        return self[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        theirs = self._name(name) if isinstance(name, str) else None
        return theirs is not None and _value(self._row, theirs) is not _ABSENT

    def __iter__(self) -> Iterator[str]:
        taken = set(self._theirs.values())
        yield from self._theirs
        yield from (name for name in self._row if name not in taken and name not in self._theirs)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, more: Mapping[str, Any]) -> Reading:
        """Return the row with the columns `more`; reads there count as reads here."""
        other = Reading({**self._row, **more})
        other._theirs = {ours: theirs for ours, theirs in self._theirs.items() if ours not in more}
        other._seen = self._seen
        return other

    def maps(self, name: str) -> bool:
        """Return whether `columns` maps the column `name`."""
        return name in self._theirs

    def again(self) -> Reading:
        """Return the row with no column read."""
        other = Reading(self._row)
        other._theirs = self._theirs
        return other

    def unread(self) -> list[str]:
        """Return the columns, and the keys of turns, that hold something and were not read."""
        return sorted({name for column, value in self._row.items() for name in self._unread(column, value)})

    def _name(self, name: str) -> str | None:
        """Return the row's name of the column `name`; None for its own name of a column that is mapped to another."""
        if not self._theirs:
            return name
        if name in self._theirs:
            return self._theirs[name]
        return None if name in self._theirs.values() else name

    def _unread(self, name: str, value: Any) -> Iterator[str]:
        if name in self._seen:
            yield from (f"{name}[].{key}" for key in unread_keys(value))
        elif isinstance(value, Mapping) and any(seen.startswith(f"{name}.") for seen in self._seen):
            for key, inner in value.items():
                yield from self._unread(f"{name}.{key}", inner)
        elif not is_empty(value):
            yield name


def refuse_left_out(unread: Sequence[str], row: Mapping[str, Any]) -> None:
    """Raise DataError if a column without which the prompt is another one was not read."""
    found = {name: match for name in unread if (match := _needed(name))}
    if not found:
        return
    order = sorted(found, key=lambda name: not found[name]["before"])
    asked = [name for name in order if found[name]["before"]], prompt_name(row) or "prompt"
    parts = [*asked[0], asked[1], *order[len(asked[0]) :]]
    raise DataError(
        f"a part of the prompt: {sorted(found)} would be left out in silence; write the prompt of each row, "
        f'row["prompt"] = "\\n\\n".join(str(row[name]) for name in {parts}), and remove its parts; rows of `instruction`, '
        "`input`, `history` and `output` are read as they are, without `columns` (or set columns = {input = ...} for format "
        "= 'alpaca'); set `format` to leave the column out"
    )


@lru_cache
def _needed(name: str) -> re.Match[str] | None:
    """The match of a column without which a prompt is another one; kept, since each row has the same columns.

    The last part of the name counts, as a word: `Option_A` for `Option A.`
    """
    return _NEEDED.fullmatch(re.sub(r"\W+", "_", name.rstrip(".").rpartition(".")[2]).strip("_"))


def prompt_name(row: Mapping[str, Any]) -> str:
    """Return the name of the column with the prompt of a pair, or the empty text if the row has none that is known."""
    return next((name for name in PROMPTS if not is_empty(row.get(name))), "")


def prompt_turns(row: Mapping[str, Any], name: str = "prompt") -> Turns:
    """Return the prompt in the column `name` of a row. A transcript that ends with `Assistant:` is turns."""
    if name == "instruction":
        return alpaca_turns(row)
    value = row[name]
    return turns_of(asked(value) if isinstance(value, str) and _OPEN_TRANSCRIPT.search(value) else value, role="user")


def alpaca_turns(row: Mapping[str, Any]) -> Turns:
    """Return the prompt of an alpaca row: its `history` (pairs of a question and an answer), `instruction` and `input`."""
    own = "instruction" in row and not (isinstance(row, Reading) and row.maps("prompt"))
    name = "instruction" if own else "prompt"  # beside `instruction`, `prompt` is a rendering of the whole row
    parts = [string(row[one], one) for one in (name, "input") if one == name or not is_empty(row.get("input"))]
    earlier: list[Message] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise DataError("not a history: pairs of a question and its answer are needed")
        earlier += [Message("user", string(pair[0], "history")), Message("assistant", string(pair[1], "history"))]
    return (*earlier, Message("user", "\n".join(part for part in parts if part.strip())))


def unread_fields(record: Mapping[str, Any], texts: Sequence[Any]) -> list[str]:
    """Return the fields of an annotation tool's record with another content than `texts`, its prompt and answers."""
    name = next((name for name in ("data", "fields") if isinstance(record.get(name), Mapping)), "")
    fields = record[name] if name else {}
    return [f"{name}.{field}" for field, value in fields.items() if not is_empty(value) and asked(value) not in texts]


def is_empty(value: Any) -> bool:
    """Return whether a cell is empty, as tables write missing values."""
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and len(value) == 0)


@lru_cache
def _mapped(columns: Columns) -> dict[str, str]:
    """Return our name -> the source's name of the columns that are mapped."""
    return {ours: theirs for ours in Columns.model_fields if (theirs := getattr(columns, ours))}


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or inside of one (`a.b`); `_ABSENT` if there is none."""
    if name in row:
        return row[name]
    column, dot, rest = name.partition(".") if "." in name else (name, "", "")
    return _value(row[column], rest) if dot and isinstance(row.get(column), Mapping) else _ABSENT


# ---------------------------------------------------------------- formats

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
    if is_ranking(row):
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
                refuse_sides(row)
                refuse_hidden_answers(row)
            if name != "prompt" or "completion" not in has:
                return name
            return "prompt_completion"
    refuse_sides(row)
    raise DataError(
        f"unknown columns: {sorted(row)}; known formats are {FORMATS}; set `columns` to the names in the row"
    )


def exported(row: Mapping[str, Any]) -> str:
    """Return the format of a record of an annotation tool's export, or the empty text for any other row."""
    if {"data", "annotations"} <= set(row):
        return "label_studio"
    return "argilla" if {"fields", "responses"} <= set(row) else ""


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


# ---------------------------------------------------------------- labels

LabelReading = Literal["verdict", "answer"]

JUDGED_FORMATS = ("messages", "text", "alpaca", "prompt_completion", "question_answer", "unpaired_preference")
"""Formats of one answer, on which a label may be a verdict."""

_YES_NO = ("yes", "no", "true", "false")
_FAULTS = re.compile(
    r"toxic(ity)?|harms?|hallucinat(ions?|ed)|spam|errors?|flagged|insults?|jailbreak(s|ing)?|nsfw|offensive|hate"
    r"|violations?|misleading|refusals?|inappropriate|dangerous|low"
)
"""Further words in the name of a column that holds whether an answer is bad."""
_CLEARS = ("not", "non", "no", "free", "without")
"""Words with which such a name says that an answer is good: `not_toxic`, `error_free`."""
_NUMBERS = ("0", "0.0", "1", "1.0", "-1", "-1.0")
_WRITTEN_AS_FLOAT = re.compile(r"-?\d+\.0")
_NO_NUMBER = ("nan", "<na>", "null", "none")
_TELLING_ROWS = 8
"""Number of rows from which labels look like verdicts that are two in all, or mostly words such as `good`."""


def verdict_of(row: Row) -> Any:
    """Return the label of a row, or None if it has none; LLaMA-Factory calls it `kto_tag`."""
    return next((row[name] for name in ("label", "kto_tag") if not is_empty(row.get(name))), None)


def has_integers_with_gaps(rows: Iterable[Row], name: str) -> bool:
    """True for a column of text such as `9.0`, as pandas writes integers to CSV where a row has none."""
    gaps = said = False
    for value in (row.get(name) for row in rows):
        if is_gap(value):
            gaps = True
        elif isinstance(value, str) and _WRITTEN_AS_FLOAT.fullmatch(value):
            said = True
        else:
            return False
    return gaps and said


def is_gap(value: Any) -> bool:
    """True for an empty cell, or a word for a missing number: only among numbers is it that."""
    return is_empty(value) or (isinstance(value, str) and value.lower() in _NO_NUMBER)


def label_reading(source: Source, format_name: str, rows: Iterable[Row]) -> LabelReading:
    """Return how to read the labels of `source`, whose rows are in the format `format_name`.

    Raises DataError if they can be read in two ways, and for verdicts that say whether an answer is bad.
    """
    reading = _label_reading(source, format_name, rows)
    words = re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", source.columns.label).lower())
    said = {spelling(label) for row in rows if (label := verdict_of(row)) is not None} & {*_YES_NO, *_NUMBERS}
    faults = any(_FAULTS.fullmatch(word) or worth(word) is False for word in words)
    if reading == "verdict" and said and faults and not any(word in _CLEARS or worth(word) for word in words):
        rule = (
            f"the name says what is bad, and {', '.join(sorted(said))} whether it is: they would be read as the reverse"
        )
        remedy = "write 'desirable' or 'undesirable' into each row"
        raise DataError(f"data.sources[{source.name}].columns.label", source.columns.label, rule, remedy)
    return reading


def _label_reading(source: Source, format_name: str, rows: Iterable[Row]) -> LabelReading:
    if format_name not in JUDGED_FORMATS or source.format == "prompt_completion":
        return "answer"
    if source.format == "unpaired_preference":
        return "verdict"
    if source.label_coding != "auto":
        return source.label_coding
    if any("thumbs" in row for row in rows):
        return "verdict"
    said = Counter(spelling(label) for row in rows if (label := verdict_of(row)) is not None)
    words = sum(count for label, count in said.items() if label in TRUTHS)
    others = sum(count for label, count in said.items() if label not in TRUTHS and label not in _NUMBERS)
    tables = {name for name in type(source.use).model_fields if getattr(source.use, name)}
    asks = tables <= {"prompts", "eval_prompts"}
    if words:
        if not (asks and said.keys() <= {"true", "false"} and any(isinstance(verdict_of(row), str) for row in rows)):
            return "verdict" if words >= others else "answer"
    elif not said or asks or not _may_be_verdicts(said):
        return "answer"
    elif tables == {"preferences"} and said.keys() <= {"0", "1", "0.0", "1.0"}:
        return "verdict"
    raise DataError(
        f"data.sources[{source.name}].label_coding",
        "auto",
        f"the labels are {', '.join(sorted(said))}: verdicts on the answers, or the answers that are expected",
        "set it to 'verdict' (bad answers are not imitated) or to 'answer'",
    )


def refuse_verdict(row: Row, source: Source) -> None:
    """Raise DataError for a row with a verdict in a source whose labels, by their majority, are expected answers."""
    label = verdict_of(row)
    if source.label_coding == "auto" and source.format != "prompt_completion" and spelling(label) in TRUTHS:
        rule = "a verdict, where most labels are expected answers"
        raise DataError(f"mixed labels: {label!r} is {rule}; set label_coding = 'answer' or 'verdict'")


def _may_be_verdicts(said: Counter[str]) -> bool:
    words = sum(count for label, count in said.items() if label in WORTHS and label not in _NUMBERS)
    many = said.total() >= _TELLING_ROWS
    return said.keys() <= set(_NUMBERS) or (many and (len(said) == 2 or 2 * words >= said.total()))
