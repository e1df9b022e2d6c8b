"""One judgement per answer that has a label, and the texts that a label expects; packages that an installation may lack."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from rlhf_core.errors import ConfigError, explain
from rlhf_core.text import fold

T = TypeVar("T")


def against_labels(
    completions: Sequence[str], labels: Sequence[str | None], judge: Callable[[str, str], T]
) -> list[T | None]:
    """Apply `judge(completion, label)` to each answer; None where the label is missing or empty.

    >>> against_labels(["4", "5"], ["4", None], lambda text, label: float(text == label))
    [1.0, None]
    """
    pairs = zip(completions, labels, strict=True)
    return [judge(text, label) if label is not None and label.strip() else None for text, label in pairs]


def expected_texts(label: str) -> tuple[str, ...]:
    """The texts that a label expects; empty for a table, or for a list of texts: any of them may be meant, or all.

    A list of one is its item. A list of numbers is itself an answer, such as an interval.

    >>> expected_texts('["42"]'), expected_texts('["42", "43"]'), expected_texts("[0, 1]")
    (('["42"]', '42'), (), ('[0, 1]',))
    """
    match _value(label):
        case str(text) | [str(text)]:
            return label, text
        case [bool()]:
            return (label,)
        case [int() | float() as number]:
            return label, str(number)
        case [] | None:
            return (label,)
        case [*items] if all(isinstance(item, (int, float)) for item in items):
            return (label,)
        case [*_] | {}:
            return ()
    return (label,)


def normalized(text: str, *, ignore_case: bool = True) -> str:
    """Normalize the spelling of a text: white space, a final period, `42.0` to 42, and characters (`fold`).

    >>> normalized(" \u2212Five. "), normalized("42.0")
    ('-five', '42')
    """
    text = " ".join(fold(text).split()).rstrip(".")
    text = text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text
    return text.casefold() if ignore_case else text


def _value(label: str) -> Any:
    """The value of JSON, or of a list or table as Python shows it; None for other text."""
    if label.strip()[:1] not in ("[", "{", '"'):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(label.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def needed(module: str, package: str) -> ModuleType:
    """Import the module of an optional package; ConfigError names the package if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain("function", module, f"needs {error.name}", f"install it: pip install {package}")
        ) from None
