"""Convert answers with ratings to preference pairs whose margin is the difference of the ratings.

A row has several answers to one prompt, each with an overall rating or with one for each aspect (UltraFeedback), or two
lists, of answers and of their ratings. Answers of equal ratings are ties, and never become a preference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.data import RankingPairs
from rlhf_core.data.comparisons import Row, Unrated, asked, ordered_pairs
from rlhf_core.errors import DataError

_PROMPTS = ("prompt", "instruction")
_ANSWER_LISTS = ("completions", "responses", "generations", "answers")
_TEXTS = ("response", "completion", "text", "content", "answer", "generation")
_OVERALL = ("overall_score", "overall_rating", "rating", "score")
_ASPECTS = ("annotations", "ratings", "aspects")
_MISSING = ("", "n/a", "na", "none", "null")
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)


def is_rated(row: Row) -> bool:
    """Return whether `row` has a list of answers with ratings.

    >>> is_rated({"instruction": "Hi", "completions": ["Hello.", "No."], "ratings": [5, 1]})
    True
    """
    name = _first(row, _ANSWER_LISTS)
    if name is None or _first(row, _PROMPTS) is None or not isinstance(row[name], (list, tuple)) or len(row[name]) < 2:
        return False
    if isinstance(row.get("ratings"), (list, tuple)):
        return True
    return any(
        isinstance(answer, Mapping) and any(key in answer for key in (*_OVERALL, *_ASPECTS)) for answer in row[name]
    )


def rated(
    row: Row, *, pairs: RankingPairs, weights: Mapping[str, float], min_margin: float
) -> tuple[list[dict[str, Any]], int]:
    """Return the preference pairs of a row with ratings, those of the best answer first, and the number of ties.

    Answers without a rating are left out. Raises Tie if no two ratings differ enough, Unrated if fewer than two answers
    have a rating, and DataError if the rating of an answer is ambiguous.
    """
    prompt, answers = _first(row, _PROMPTS), _first(row, _ANSWER_LISTS)
    if prompt is None or answers is None:
        raise DataError(f"missing column: prompt, or completions with ratings; the row has {sorted(row)}")
    found = [(text, value) for text, value in _answers(row, row[answers], weights) if value is not None]
    if len(found) < 2:
        raise Unrated
    values = [value for _, value in found]
    made, tied = ordered_pairs(values, pairs, min_margin=min_margin)
    rows = [
        {
            "prompt": asked(row[prompt]),
            "chosen": found[better][0],
            "rejected": found[worse][0],
            "margin": values[better] - values[worse],
        }
        for better, worse in made
    ]
    return rows, tied


def overall(aspects: Mapping[str, Any], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of the ratings of aspects, or None if one of them is missing.

    >>> overall({"helpfulness": {"Rating": "4"}, "honesty": 2}, {"helpfulness": 0.5, "honesty": 0.5})
    3.0
    """
    unknown = sorted(set(weights) - set(aspects))
    if unknown:
        raise DataError(f"no such aspect: {unknown[0]!r} of rating_weights; the answer has {sorted(aspects)}")
    values = {name: rating(_aspect(aspects[name])) for name in weights}
    if any(value is None for value in values.values()):
        return None
    return math.fsum(weights[name] * value for name, value in values.items() if value is not None)


def score_margin(row: Row) -> float | None:
    """Return how much higher a pair's chosen answer is rated, or None if the row has no two ratings.

    Raises DataError if the chosen answer is rated below the rejected one.
    """
    for chosen, rejected in _SCORES:
        better, worse = (rating(row[name]) if name in row else None for name in (chosen, rejected))
        if better is not None and worse is not None:
            if better < worse:
                raise DataError(f"chosen is rated below rejected: {chosen} is {better:g}, {rejected} is {worse:g}")
            return better - worse
    return None


def rating(value: Any) -> float | None:
    """Return a rating as a number, or None for a missing one (`N/A`, NaN). Raises DataError for anything else."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _MISSING):
        return None
    if isinstance(value, float) and math.isnan(value):  # pandas writes what is missing so
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"not a rating: {str(value)[:80]!r}; a number is needed")
    return number


# ---------------------------------------------------------------- private


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _answers(row: Row, answers: Any, weights: Mapping[str, float]) -> list[tuple[Any, float | None]]:
    """Return each answer with its rating."""
    if not isinstance(answers, (list, tuple)):
        raise DataError(f"not rated answers: {type(answers).__name__}; a list is needed")
    beside = row.get("ratings")
    if isinstance(beside, (list, tuple)):
        if len(beside) != len(answers):
            raise DataError(f"ratings and answers: {len(beside)} ratings for {len(answers)} answers")
        if weights:
            raise DataError("ratings: rating_weights weigh aspects, but each answer has one rating")
        return [(_text(answer), rating(value)) for answer, value in zip(answers, beside, strict=True)]
    return [(_text(answer), _rated(answer, weights)) for answer in answers]


def _text(answer: Any) -> Any:
    if not isinstance(answer, Mapping):
        return answer
    name = _first(answer, _TEXTS)
    if name is None:
        raise DataError(f"no text in an answer: it has {sorted(answer)}, one of {list(_TEXTS)} is needed")
    return answer[name]


def _rated(answer: Any, weights: Mapping[str, float]) -> float | None:
    """Return the rating of one answer: by `weights`, or else its only overall rating."""
    if not isinstance(answer, Mapping):
        raise DataError("not rated: an answer is plain text, and the row has no list `ratings`")
    aspects = next((answer[name] for name in _ASPECTS if isinstance(answer.get(name), Mapping)), None)
    if weights:
        return overall(answer if aspects is None else aspects, weights)
    given = {name: value for name in _OVERALL if (value := rating(answer.get(name))) is not None}
    if len(set(given.values())) > 1:
        raise DataError(f"ambiguous rating: an answer has {given}; set rating_weights to say which counts")
    if not given and aspects and not any(name in answer for name in _OVERALL):
        raise DataError(
            f"no overall rating: an answer has aspects only, {sorted(aspects)}; set rating_weights to weigh them"
        )
    return next(iter(given.values()), None)


def _aspect(value: Any) -> Any:
    """Return the rating of an aspect, which UltraFeedback writes as an object, or as a list of one or several."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise DataError(
                f"ambiguous rating: an aspect has {len(value)} ratings; leave the aspect out of rating_weights"
            )
        value = value[0]
    if isinstance(value, Mapping):
        name = next((name for name in ("Rating", "rating", "score", "value") if name in value), None)
        if name is None:
            raise DataError(f"not a rating: an aspect has {sorted(value)}")
        return value[name]
    return value
