"""Read columns by the names of our formats, detect a source's format, and decide what its labels mean.

A row records which columns are read, so that unread columns can be reported or refused. Whether labels are verdicts on
answers or expected answers is decided over a whole source: a verdict that is read as an expected answer makes a bad
answer one to imitate, so labels that can be read both ways are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from rlhf_core.config.data import Columns, RowFormat, Source
from rlhf_core.data.row_functions import PROMPTS, Row, UnknownForm, compared_sides, pasted, rated_pair, unknown
from rlhf_core.data.turns import (
    TRANSCRIPT_TURN,
    TRUTHS,
    Turns,
    asked,
    begins_conversation,
    spelling,
    string,
    turns_of,
    unread_keys,
    worth,
)
from rlhf_core.errors import DataError
from rlhf_core.types import Message

_BEFORE = (
    r"(\w+_)?(contexts?|passages?|documents?|articles?|paragraphs?)(_(text|body))?|docs?|ctx(_[ab])?|history|background(_info)?"
    r"|premise|story|dialogue|tables?|facts|knowledge|scenario|situation|(db_|sql_|table_)schema|create_table"
)
_AFTER = (
    r"input|(\w+_)?(choices?|options?|endings?)(_?[a-z\d])?|op[a-e]|hypothesis|images?|figures?|audios?|videos?"
    r"|starter_code|[a-e]"
)
_NEEDED = re.compile(rf"(?P<before>{_BEFORE})|{_AFTER}", re.IGNORECASE)
"""Columns without which a prompt has another meaning; the ones in `before` precede the question."""

_OPEN_TRANSCRIPT = re.compile(r"(^|\n\n)Assistant:\s*$")


_AS_THEY_ARE = Columns()


class Reading(Mapping[str, Any]):
    """A row under the names of our formats, which records the columns that are read.

    >>> row = Reading({"instruction": "2+2?", "answer": "4", "id": 7}, Columns(prompt="instruction"))
    >>> row["prompt"], row["answer"], row.unread()
    ('2+2?', '4', ['id'])
    """

    __slots__ = ("_names", "_row", "_seen")

    def __init__(self, row: Row, columns: Columns = _AS_THEY_ARE) -> None:
        """Raise UnknownForm for a mapped column that the row does not have."""
        mapped = _mapped(columns)
        missing = sorted(set(mapped.values()) - row.keys())
        if missing:
            raise unknown(f"no such column: {missing[0]!r}", row)
        taken = {*mapped, *mapped.values()}
        self._row = row
        self._names = mapped | {name: name for name in row if name not in taken}
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        theirs = self._names[name]
        self._seen.add(theirs)
        return self._row[theirs]

    def get(self, name: str, default: Any = None) -> Any:
        """Read the value of a column; `default` if the row does not have it."""
        return self[name] if name in self._names else default

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def changed(self, name: str, value: Any) -> Reading:
        """A copy of the row with another value in a column. Reads of the copy count as reads of this row."""
        other = Reading(self._row)
        theirs = self._names.get(name, name)
        other._row = {**self._row, theirs: value}
        other._names, other._seen = self._names | {name: theirs}, self._seen
        return other

    def maps(self, name: str) -> bool:
        """Whether `columns` maps the column `name`."""
        return self._names.get(name, name) != name

    def again(self) -> Reading:
        """A copy of the row with no column read."""
        other = Reading(self._row)
        other._names = self._names
        return other

    def unread(self) -> list[str]:
        """The columns, and the keys of turns, that are not empty and were not read."""
        found = (name for name, value in self._row.items() if name not in self._seen and not is_empty(value))
        keys = (f"{name}[].{key}" for name in self._seen if name in self._row for key in unread_keys(self._row[name]))
        return sorted({*found, *keys})


def refuse_left_out(unread: Sequence[str], row: Row) -> None:
    """Raise UnknownForm if a column without which the prompt has another meaning was not read."""
    found = {name: match for name in unread if (match := _needed(name))}
    if not found:
        return
    asked = prompt_name(row) or "prompt"
    order = sorted(found, key=lambda name: not found[name]["before"])
    before = [name for name in order if found[name]["before"]]
    parts = [*before, asked, *order[len(before) :]]
    made = [f'row["{asked}"] = "\\n\\n".join(str(row.pop(name)) for name in {parts})', "return row"]
    if not isinstance(row.get(asked), str):
        made = [f'said = "\\n\\n".join(str(row.pop(name)) for name in {order})']
        made += [f'row["{asked}"] = [{{"role": "system", "content": said}}, *row["{asked}"]]', "return row"]
    rule = f"a part of the prompt: {sorted(found)} would be left out in silence (set `format` to leave it out)"
    raise UnknownForm(f"{rule}; the row has {sorted(row)}", pasted(*made))


@lru_cache
def _needed(name: str) -> re.Match[str] | None:
    """Match the name of a column without which a prompt has another meaning. Cached: each row has the same columns.

    The last part of the name counts, as a word: `Option_A` for `Option A.`
    """
    return _NEEDED.fullmatch(re.sub(r"\W+", "_", name.rstrip(".").rpartition(".")[2]).strip("_"))


def prompt_name(row: Mapping[str, Any]) -> str:
    """The name of the column with the prompt of a pair, or the empty text if the row has no known one."""
    return next((name for name in PROMPTS if not is_empty(row.get(name))), "")


def prompt_turns(row: Mapping[str, Any], name: str = "prompt") -> Turns:
    """Read the prompt in the column `name` of a row. A transcript that ends with `Assistant:` is split into turns."""
    if name == "instruction":
        return alpaca_turns(row)
    value = row[name]
    return turns_of(asked(value) if isinstance(value, str) and _OPEN_TRANSCRIPT.search(value) else value, role="user")


def alpaca_turns(row: Mapping[str, Any]) -> Turns:
    """The prompt of an alpaca row: its `history` (pairs of a question and an answer), `instruction` and `input`."""
    own = "instruction" in row and not (isinstance(row, Reading) and row.maps("prompt"))
    name = "instruction" if own else "prompt"  # next to `instruction`, `prompt` renders the whole row
    parts = [string(row[one], one) for one in (name, "input") if one == name or not is_empty(row.get("input"))]
    earlier: list[Message] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise DataError("not a history: pairs of a question and its answer are needed")
        earlier += [Message("user", string(pair[0], "history")), Message("assistant", string(pair[1], "history"))]
    return (*earlier, Message("user", "\n".join(part for part in parts if part.strip())))


def is_empty(value: Any) -> bool:
    """Whether a cell is empty, as tables write missing values."""
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and len(value) == 0)


@lru_cache
def _mapped(columns: Columns) -> dict[str, str]:
    """Map our name to the source's name, for each column that is mapped."""
    return {ours: theirs for ours in Columns.model_fields if (theirs := getattr(columns, ours))}


# ---------------------------------------------------------------- formats

MORE_THAN_ONE_ANSWER = ("chosen", "rejected", "preference", "answers", "completions", "ratings", "reward")
"""Columns of formats that rank answers. Formats with one answer have none of these columns."""
_KNOWN = (
    ("stepwise", {"prompt", "completions", "labels"}),
    ("alpaca", {"instruction", "output"}),
    ("messages", {"messages"}),
    ("messages", {"conversations"}),
    ("question_answer", {"question", "answer"}),
    ("prompt_completion", {"prompt", "completion"}),
    ("prompt", {"prompt"}),
    ("text", {"text"}),
)


def detect(row: Row) -> str:
    """Detect the format of `row` by its columns. Raises DataError for columns that are unknown or would be left out.

    >>> detect({"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    'preference'
    """
    has = {name for name, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return _pair_format(row)
    refuse_judgment(row, has)
    found = next((name for name, needed in _KNOWN if needed <= has), "")
    if found == "prompt":
        refuse_hidden_answers(row)
    if not found:
        if compared_sides(row):
            raise unknown("two answers of a comparison: they are not read", row)
        raise unknown(f"unknown columns: none of the forms {sorted(set(get_args(RowFormat)) - {'auto'})}", row)
    return found


def refuse_judgment(row: Row, has: set[str]) -> None:
    """Raise UnknownForm for an answer with a thumb or a reward, which would be imitated even if it was judged bad."""
    judged = "thumbs" in has or ("reward" in has and "label" not in has)
    if judged and has & {"completion", "output", "answer", "messages", "conversations", "text"}:
        raise unknown("an answer with a thumb or a reward: it is not read, and the answer may be a bad one", row)


def refuse_hidden_answers(row: Row) -> None:
    """Raise UnknownForm if a row that would be read as a bare prompt has columns with answers or verdicts.

    Columns with plain numbers (`num_responses`) do not count as answers, and empty columns are ignored.
    """
    hidden = sorted(name for name, value in row.items() if _holds(name, value))
    if hidden:
        rule = f"answers beside a bare prompt: {hidden} would be left out in silence"
        raise unknown(f"{rule} (set format = 'prompt' to leave them out, or columns = {{label = ...}})", row)


def _holds(name: str, value: Any) -> bool:
    """Whether the column `name` contains an answer, an expected one, or a verdict on answers."""
    words = {word.rstrip("0123456789") for word in _NOT_WORD.split(_CAMEL.sub("_", name).lower())}
    if words & _VERDICTS or name == "reward_model":
        return value not in (None, "", [], {})
    return bool(words & _ANSWERS) and isinstance(value, (str, list, tuple, Mapping)) and len(value) > 0


_NOT_WORD = re.compile(r"[\W_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ANSWERS = {
    *("answer", "answers", "response", "responses", "completion", "completions", "output", "outputs"),
    *("reply", "replies", "generation", "generations", "candidate", "candidates", "chosen", "rejected"),
}
_VERDICTS = {"preference", "preferences", "preferred", "winner", "loser", "better", "safer", "rank", "ranks", "ranking"}


def _pair_format(row: Row) -> str:
    """Detect the format of a pair. Raises UnknownForm if the prompt would have to be guessed from common words."""
    if rated_pair(row):
        raise unknown("ratings of a pair: they are not read under these names", row)
    sides = row["chosen"], row["rejected"]
    if prompt_name(row) == "prompt" or not all(map(begins_conversation, sides)):
        if not prompt_name(row):
            rule = "no prompt: chosen and rejected are answers alone, and no column is known as their prompt"
            raise unknown(f"{rule} (set format = 'implicit_preference' where both begin with it)", row)
        return "preference"
    return "hh" if isinstance(sides[0], str) and TRANSCRIPT_TURN.match(sides[0]) else "implicit_preference"


# ---------------------------------------------------------------- labels

LabelReading = Literal["verdict", "answer"]

JUDGED_FORMATS = ("messages", "text", "alpaca", "prompt_completion", "question_answer", "unpaired_preference")
"""Formats of one answer, on which a label may be a verdict."""

_YES_NO = ("yes", "no", "true", "false")
_FAULTS = re.compile(
    r"toxic(ity)?|harms?|hallucinat(ions?|ed)|spam|errors?|flagged|insult(s|ing)?|jailbreak(s|ing)?|nsfw|offensive|hate(ful)?"
    r"|violat\w*|misleading|refus\w*|declined|dangerous|low|(bias|flaw)(s|ed)?|mistakes?|bug(s|gy)?|abus(e|ive)|profan(e|ity)|rude"
    r"|(mal|mis)(icious|info\w*)|disinfo\w*|useless|nonsens(e|ical)|fake|poor|worst|failures?|broken|risky?|leaks?|lies?"
    r"|(un|in|ir|im|dis|mis)(help|safe|correct|relevan|accura|faithful|truth|ground|honest|appropriate|accept|desir|satisf"
    r"|align|ethical|fair|support|verif|true|proper|complete|coheren|valid|consisten|lik|prefer|approv|agree)\w*"
)
"""Further words in the name of a column that holds whether an answer is bad."""
_NEGATIONS = ("not", "non", "no", "free", "without", "less", "lacks", "never")
"""Words that turn such a name around: `not_toxic`, `error_free`, `less_helpful`."""
_NUMBERS = ("0", "0.0", "1", "1.0", "-1", "-1.0")
_WRITTEN_AS_FLOAT = re.compile(r"-?\d+\.0")
_NO_NUMBER = ("nan", "<na>", "null", "none")
_TELLING_ROWS = 8
"""Number of rows from which exactly two distinct labels look like verdicts, even if they are not single words."""


def verdict_of(row: Row) -> Any:
    """The label of a row, or None if it has none; LLaMA-Factory calls it `kto_tag`."""
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
    """True for an empty cell, or for a word that means a missing number in a column of numbers."""
    return is_empty(value) or (isinstance(value, str) and value.lower() in _NO_NUMBER)


def label_reading(source: Source, format_name: str, rows: Iterable[Row]) -> LabelReading:
    """Decide how to read the labels of `source`, whose rows are in the format `format_name`.

    Raises DataError if they can be read in two ways, and for verdicts on whether an answer is bad.
    """
    reading = _label_reading(source, format_name, rows)
    name = _CAMEL.sub("_", source.columns.label).lower()
    words = [word.removesuffix("ness") for word in _NOT_WORD.split(name)]
    said = {spelling(label) for row in rows if (label := verdict_of(row)) is not None} & {*_YES_NO, *_NUMBERS}
    good, turned = any(map(worth, words)), not {*words}.isdisjoint(_NEGATIONS)
    bad = any(_FAULTS.fullmatch(word) or worth(word) is False for word in words)
    if reading == "verdict" and said and good != bad and bad != turned:
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
    """Whether labels may be verdicts: only verdict numbers, half of them verdict words, or just two distinct labels."""
    words = sum(count for label, count in said.items() if worth(label) is not None and label not in _NUMBERS)
    two = len(said) == 2 and (said.total() >= _TELLING_ROWS or all(map(str.isalpha, said)))
    return said.keys() <= set(_NUMBERS) or two or 2 * words >= said.total()
