"""Read single values of a row: texts, labels, margins, verdicts, annotators. Each raises DataError for anything else."""

from __future__ import annotations

import datetime
import json
import math
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
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def string(value: Any, name: str) -> str:
    """Return a text that UTF-8 can hold; `name` stands in the error."""
    if not isinstance(value, str):
        raise DataError(f"not text: {name} is {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"not text: {name} has what UTF-8 cannot hold, half a surrogate pair or a bad byte") from error
    return value


def label(row: Row) -> str:
    """Return the expected answer: text as it is, dates and decimal numbers as written, anything else as JSON."""
    value = row["label"] if "label" in row else None
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
    """Return the margin of a row, or 0.0 if it has none."""
    if "margin" not in row or row["margin"] in (None, ""):
        return 0.0
    return finite(row["margin"], "margin")


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
    """Return a label as a boolean. Accepts booleans, 0 and 1, and their spellings in CSV."""
    said = spelling(value)
    if said not in TRUTHS:
        raise DataError(f"not true or false: label is {value!r}")
    return TRUTHS[said]


def probability(value: Any) -> float:
    """Return a label as a probability: 1.0 or 0.0 for good or bad, and a soft label unchanged."""
    if spelling(value) in TRUTHS:
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
