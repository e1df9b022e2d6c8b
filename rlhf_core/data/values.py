"""Read single values of a row: texts, labels, margins, verdicts, annotators. Each raises DataError for anything else."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeAlias

from rlhf_core.data.comparisons import Unrated
from rlhf_core.errors import DataError

Row: TypeAlias = Mapping[str, Any]

_THUMBS = {
    **dict.fromkeys(("up", "thumbs_up", "thumbsup", "👍", "like", "positive", "true", "1", "1.0", "+1"), True),
    **dict.fromkeys(("down", "thumbs_down", "thumbsdown", "👎", "dislike", "negative", "false", "-1", "-1.0"), False),
}
TRUTHS = {
    **dict.fromkeys(("true", "desirable", "chosen", "accepted", "preferred", "liked", "like", "thumbs_up", "👍"), True),
    **dict.fromkeys(
        ("false", "undesirable", "rejected", "dispreferred", "disliked", "dislike", "thumbs_down", "👎"), False
    ),
}
"""Words that are nothing else than a verdict on an answer."""
WORTHS = TRUTHS | {
    **dict.fromkeys(
        ("1", "1.0", "yes", "good", "correct", "right", "positive", "safe", "helpful", "pass", "passed"), True
    ),
    **dict.fromkeys(
        ("0", "0.0", "no", "bad", "incorrect", "wrong", "negative", "unsafe", "unhelpful", "harmful"), False
    ),
    **dict.fromkeys(("fail", "failed"), False),
}
"""Words that are a verdict where the column is known to hold verdicts; else they may be the expected answer."""
_MINUS_ONE = ("-1", "-1.0")
GROUND_TRUTH = "reward_model.ground_truth"
_LONGEST_INTEGER = 4300
"""Most digits of an integer that Python parses by default."""


def string(value: Any, name: str) -> str:
    """Return a text that UTF-8 can hold; `name` stands in the error."""
    if not isinstance(value, str):
        raise DataError(f"not text: {name} is {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"not text: {name} has what UTF-8 cannot hold, half a surrogate pair or a bad byte") from error
    return value


class RepeatedKey(DataError):
    """Raised for a JSON object with one key twice, of which only the last value would be kept."""


def from_json(text: str) -> Any:
    """Return the value of JSON text. Raises RepeatedKey, or another DataError for what is not JSON."""
    try:
        return json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except (json.JSONDecodeError, RecursionError) as error:
        place = f"{error.msg} at column {error.colno}" if isinstance(error, ValueError) else "brackets too deep"
        raise DataError(f"not JSON: {place}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"a key twice: an object of JSON has {twice!r} more than once; keep one of them")
    return found


def _integer(digits: str) -> int | Decimal:
    """Return an integer, as a Decimal that keeps all digits if it is too long for `int`."""
    return int(digits) if len(digits) <= _LONGEST_INTEGER else Decimal(digits)


def label(row: Row) -> str:
    """Return the expected answer: text as it is, dates and decimal numbers as written, anything else as JSON.

    It is the column `label`, or else `reward_model.ground_truth` (verl).
    """
    value = next((row[name] for name in ("label", GROUND_TRUTH) if row.get(name) is not None), None)
    if value is None:
        return ""
    if isinstance(value, Decimal):
        value = str(value)
    elif isinstance(value, (datetime.date, datetime.time)):
        value = value.isoformat()
    elif not isinstance(value, str):
        value = _json(value, "label")
    return string(value, "label")


def _json(value: Any, name: str) -> str:
    def written(inner: Any) -> str:
        if isinstance(inner, (datetime.date, datetime.time)):
            return inner.isoformat()
        raise TypeError(f"{type(inner).__name__} has no JSON")

    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=written)
    except (TypeError, ValueError) as error:
        raise DataError(f"not JSON: {name}: {error}") from error


def margin(row: Row) -> float:
    """Return the margin of a row, or 0.0 if it has none. Raises DataError for a negative one."""
    if "margin" not in row or row["margin"] in (None, ""):
        return 0.0
    number = finite(row["margin"], "margin")
    if number < 0:
        raise DataError(
            f"negative margin: margin is {number:g}, so that the rejected answer is the better one; swap them"
        )
    return number


def annotator(row: Row) -> str:
    """Return who judged the row, a text or a number, as text; empty if the row does not say."""
    value = next((row[name] for name in ("annotator", "annotator_id") if row.get(name) is not None), "")
    if isinstance(value, float) and value.is_integer():  # a column of integers with gaps
        value = int(value)
    return string(str(value), "annotator").strip() if isinstance(value, (str, int)) else ""


def finite(value: Any, name: str) -> float:
    """Return a finite number; `name` stands in the error."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"not a number: {name} is {value!r}") from error
    if not math.isfinite(number):
        raise DataError(f"not a number: {name} is {number}")
    return number


def thumbs_up(value: Any) -> bool:
    """Return whether an answer got a thumbs up. Raises Unrated if it got none, and DataError for an unknown spelling."""
    said = "_".join(spelling(value).replace("-up", " up").replace("-down", " down").split())
    if value is None or said in ("", "none", "null"):
        raise Unrated
    if said not in _THUMBS:
        raise DataError(
            f"not a thumb: {value!r}; up or down, 1 or -1, or true or false is needed (for 1 and 0: columns = {{label = ...}})"
        )
    return _THUMBS[said]


def truth(value: Any) -> bool:
    """Return a verdict as a boolean. Accepts booleans, 0 or -1 and 1, their spellings in CSV, and words: `desirable`."""
    said = spelling(value)
    if said not in WORTHS and said not in _MINUS_ONE:
        raise DataError(f"not true or false: label is {value!r}")
    return said in WORTHS and WORTHS[said]


def probability(value: Any) -> float:
    """Return a label as a probability: 1.0 or 0.0 for good or bad, and a soft label unchanged."""
    if spelling(value) in WORTHS:
        return float(truth(value))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"not true or false: label is {value!r}") from error
    if not 0 <= number <= 1:  # NaN fails too
        raise DataError(f"not a probability: label is {number}")
    return number


def spelling(value: Any) -> str:
    """Return a value as lower-case text without spaces around it."""
    return str(value).strip().lower()
