"""Rewards of the text alone: equality, patterns, length and repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from rlhf_core.errors import ConfigError, RewardError, explain
from rlhf_core.rewards.library.labels import against_labels, expected_texts, normalized
from rlhf_core.rewards.shaping import soft_overlong

Unit = Literal["tokens", "words", "characters"]


def exact_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    ignore_case: bool = True,
    **columns: Any,
) -> list[float | None]:
    """Score 1.0 if the answer is the label in any spelling. None for no label, only periods, a table or a list."""

    def judge(text: str, label: str) -> float | None:
        expected = {normalized(one, ignore_case=ignore_case) for one in expected_texts(label)} - {""}
        return float(normalized(text, ignore_case=ignore_case) in expected) if expected else None

    return against_labels(completions, labels, judge)


def regex_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    pattern: str,
    whole: bool = False,
    **columns: Any,
) -> list[float | None]:
    r"""Score 1.0 if `pattern` is found in the answer (`whole`: matches all of it). A dot matches newlines too.

    `{label}` in the pattern stands for the escaped label; then None without a label.
    """
    try:
        re.compile(pattern.replace("{label}", ""), re.DOTALL)
    except re.error as error:
        raise ConfigError(explain("pattern", pattern, f"is no regular expression: {error}", "mend it")) from None

    def judge(text: str, label: str) -> float:
        expression = re.compile(pattern.replace("{label}", re.escape(label.strip())), re.DOTALL)
        return float((expression.fullmatch(text) if whole else expression.search(text)) is not None)

    if "{label}" in pattern:
        return against_labels(completions, labels, judge)
    return [judge(text, "") for text in completions]


def length_target(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    target: int,
    width: int,
    unit: Unit = "tokens",
    **columns: Any,
) -> list[float | None]:
    """Score 1 at the length `target`, falling linearly to 0 at `width` away from it on either side."""
    lengths = _lengths(completions, unit, columns)
    return [max(0.0, 1.0 - abs(length - target) / width) for length in lengths]


def overlong_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    limit: int,
    buffer: int,
    factor: float = 1.0,
    unit: Unit = "tokens",
    **columns: Any,
) -> list[float | None]:
    """DAPO's soft penalty (arXiv 2503.14476 eq. 13): 0 up to limit - buffer, then linearly to -factor at limit."""
    lengths = _lengths(completions, unit, columns)
    return [soft_overlong(length, max_tokens=limit, buffer_tokens=buffer, factor=factor) for length in lengths]


def repetition_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    ngram: int = 3,
    factor: float = 1.0,
    **columns: Any,
) -> list[float | None]:
    """Score -factor times the fraction of repeated word n-grams (arXiv 2502.03373); 0 without repetition.

    >>> repetition_penalty([""], ["a b a b a"], [None], ngram=2)
    [-0.5]
    """
    return [-factor * _repeated(text.casefold().split(), ngram) for text in completions]


def _repeated(words: Sequence[str], ngram: int) -> float:
    grams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _lengths(completions: Sequence[str], unit: Unit, columns: dict[str, Any]) -> list[int]:
    match unit:
        case "characters":
            return [len(text) for text in completions]
        case "words":
            return [len(text.split()) for text in completions]
        case "tokens":
            ids = columns.get("completion_ids", [()] * len(completions))
            if any(text and not tokens for text, tokens in zip(completions, ids, strict=True)):
                raise RewardError(
                    explain("unit", unit, "no completion_ids came with the answers", 'use unit = "words" over HTTP')
                )
            masks = columns.get("action_mask")  # an environment's tokens are not the policy's length
            return [len(tokens) for tokens in ids] if masks is None else [sum(mask) for mask in masks]
    raise ConfigError(explain("unit", unit, "is no unit of length", "use tokens, words or characters"))
