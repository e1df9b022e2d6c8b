"""Convert rows that compare or rate several answers to one prompt into preference pairs.

A row has two answers with a verdict (`response1`, `response2`, `preference`), a ranking (`answers`, each with a `rank`, 1
is the best, as in Nectar), or ratings, overall or for each aspect (UltraFeedback), whose difference becomes the margin. The
numbers may be a list beside that of the answers: `ranks`, or `ratings`, `scores` or `rewards`, of which more is better. A
row does not state what a number in `preference` means, so the meaning is decided over the whole source. If two readings
remain, the rows are refused: a verdict read the wrong way round trains the opposite. Ties never become a preference.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_core.config.data import PreferenceCoding, RankingPairs
from rlhf_core.errors import DataError, side

Row: TypeAlias = Mapping[str, Any]

TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""Pattern of the beginning of a turn in a raw transcript."""

RESPONSES = (
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_0", "response_1"),
    ("response0", "response1"),
    ("response_a", "response_b"),
    ("response_A", "response_B"),
)
"""Known names of the columns with the two answers, the first answer first."""

_WINNERS = (
    *("winner", "preference", "overall_preference", "preferred", "better", "choice", "verdict", "vote", "chosen"),
    *("labels", "label"),
)
_NO_ANSWERS = re.compile(r"(\w+_)?(op|option|choice|ending|sentence|text|image|audio|video|model|id|score)s?_?")
_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "input", "context", "history", "post")
"""Names of columns with a verdict on two answers, and with their question, the most usual first."""
_TIES = {"tie", "ties", "tied", "tiebothbad", "both", "bothgood", "bothbad", "neither", "equal", "same", "draw", "none"}
_ORDINALS = ({"a", "first", "left", "modela", "responsea"}, {"b", "second", "right", "modelb", "responseb"})
_NOT_WORD = re.compile(r"[\W_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

_ANSWERS = {
    *("answer", "answers", "response", "responses", "completion", "completions", "output", "outputs"),
    *("reply", "replies", "generation", "generations", "candidate", "candidates", "chosen", "rejected"),
}
_VERDICTS = {"preference", "preferences", "preferred", "winner", "loser", "better", "safer", "rank", "ranks", "ranking"}


class NoPreference(Exception):
    """Raised for a valid row that prefers no answer; `reason` is for the report of dropped rows."""

    reason = ""


class Tie(NoPreference):
    """Raised for a valid row whose answers were judged equally good."""

    reason = "tie: no answer is better than the others"


class Unrated(NoPreference):
    """Raised for a valid row in which fewer than two answers were judged."""

    reason = "not judged: fewer than two answers have a rating"


def responses(row: Row) -> tuple[str, str] | None:
    """Return the names of the columns with the two answers, the first answer first, or None if the row lacks them.

    >>> responses({"prompt": "2+2?", "response_0": "5", "response_1": "4"})
    ('response_0', 'response_1')
    """
    for first, second in RESPONSES:
        if row.get(first) is not None and row.get(second) is not None:
            return first, second
    return None


def is_ranking(row: Row) -> bool:
    """Return whether `row` has a list of answers with ranks.

    >>> is_ranking({"prompt": "Hi", "responses": ["Hello.", "No."], "ranks": [1, 2]})
    True
    """
    answers = row.get("answers")
    if isinstance(answers, (list, tuple)) and any(isinstance(one, Mapping) and "rank" in one for one in answers):
        return row.get("prompt") is not None
    return _has_answers(row) and _beside(row) == RANKS


def refuse_hidden_answers(row: Row) -> None:
    """Raise DataError if a row that would be read as a bare prompt has columns with answers or verdicts.

    Columns with plain numbers (`num_responses`) do not count as answers, and empty columns are ignored.
    """
    hidden = sorted(name for name, value in row.items() if _holds(name, value))
    if hidden:
        remedy = (
            "name what they are with columns = {completion = ...}, {chosen = ..., rejected = ...}, {response1 = ..., "
            "response2 = ..., preference = ...} or {label = ...} (the expected answer), or set format = 'prompt' to leave them out"
        )
        raise DataError(f"answers beside a bare prompt: {hidden} would be left out in silence; {remedy}")


def refuse_sides(row: Row) -> None:
    """Raise DataError with the lines to add if a row has two answers, and a verdict on them, under other names."""
    names = [(name, *side(name)) for name, value in row.items() if isinstance(value, (str, list)) and value]
    pairs = [
        (one, other)
        for one, stem, first in names
        for other, same, second in names
        if stem == same
        and not _NO_ANSWERS.fullmatch(stem)
        and (first, second) in (("1", "2"), ("0", "1"))
        and type(row[one]) is type(row[other])
    ]
    verdicts = [name for name in _WINNERS if row.get(name) not in (None, "")]
    if not pairs or not verdicts:
        return
    first, second = max(pairs, key=lambda pair: (isinstance(row[pair[0]], list), len(str(row[pair[0]]))))
    answers = f'response1 = "{first}", response2 = "{second}"'
    prompts = [name for name in _QUESTIONS if row.get(name) and name not in (first, second)]
    rule = f"two answers of a comparison: {first!r} and {second!r} with the verdict {verdicts[0]!r}"
    if isinstance(row[first], list) or not prompts:
        turns = isinstance(row[first], list)
        prompt, end = ("a[:-1]", '[-1]["content"]') if turns else ('row["THE PROMPT"]', "")
        made = f'"prompt": {prompt}, "response_a": a{end}, "response_b": b{end}, "preference": row["{verdicts[0]}"]'
        function = f'def comparison(row):\n    a, b = row["{first}"], row["{second}"]\n    return {{{made}}}'
        raise DataError(f"{rule}; write the rows anew with this function:\n{function}\n")
    lines = f'columns = {{prompt = "{prompts[0]}", {answers}, preference = "{verdicts[0]}"}}'
    numbers = _number(row[verdicts[0]]) is not None
    also = " and preference_coding, which says what its numbers mean" if numbers else ""
    raise DataError(f"{rule}; set {lines}{also}")


def verdict_coding(source: str, coding: PreferenceCoding, rows: Iterable[Row]) -> PreferenceCoding:
    """Return how to read the numbers in `preference` of `source`; for `auto`, the values that occur in `rows` decide.

    1 and 2 are read as positions if a 2 occurs and no 0. 0 and 1 are read as positions only if the answer columns are
    numbered from 0 and a 0 occurs; otherwise a 1 could also mean "true, the first is better". Verdicts in words need no
    coding and leave it at `auto`. Raises DataError if the numbers can be read in two ways.
    """
    if coding != "auto":
        return coding
    said = [row["preference"] for row in rows if "preference" in row]
    numbers = {number for one in said if (number := _number(one)) is not None}
    if not numbers:
        return "auto"
    truths = any(isinstance(one, bool) for one in said)
    names = next((found for row in rows if (found := responses(row))), ("response1", "response2"))
    from_zero = names[0].endswith("0")
    if numbers <= {1, 2} and 2 in numbers and not from_zero:
        return "one_based"
    if numbers <= {0, 1} and 0 in numbers and from_zero and not truths:
        return "zero_based"
    shown = ", ".join(f"{number:g}" for number in sorted(numbers)[:8])
    rule = (
        f"the numbers in `preference` are {shown} and the answers {names[0]!r} and {names[1]!r}: they can be read in more "
        "than one way (0 and 1 as places or as 'the first is better', a lone 1 as either place, signs as strengths)"
    )
    remedy = (
        "set preference_coding = 'zero_based' (0: the first is better, 1: the second), 'one_based' (1, 2), 'first_is_one' "
        "(1: the first, 0: the second) or 'signed' (negative: the first, positive: the second, 0: a tie)"
    )
    raise DataError(f"data.sources[{source}].preference_coding", "auto", rule, remedy)


def compared(row: Row, coding: PreferenceCoding) -> dict[str, Any]:
    """Return `row` as a preference pair (`prompt`, `chosen`, `rejected`). Raises Tie if neither answer was preferred.

    >>> compared({"prompt": "2+2?", "response1": "5", "response2": "4", "preference": "response2"}, "auto")["chosen"]
    '4'
    """
    names = responses(row)
    if names is None:
        raise DataError(f"missing column: two responses; the row has {sorted(row)}")
    second_won = _second_won(row["preference"], names, coding)
    answers = [row[name] for name in names]
    margin = {"margin": row["margin"]} if "margin" in row else {}
    return {
        "prompt": asked(row["prompt"]),
        "chosen": answers[second_won],
        "rejected": answers[not second_won],
        **margin,
    }


def ranked(row: Row, pairs: RankingPairs) -> tuple[list[dict[str, Any]], int]:
    """Return the preference pairs of a ranking, those of the best answer first, and the number of ties.

    `max_min` pairs the best answer with the worst, `adjacent` each answer with the next one, `all` every two answers.
    Answers of equal rank are never paired. Raises Tie if all ranks are equal.
    """
    answers = row.get("answers")
    if _beside(row) == RANKS:
        found = _numbered(row, RANKS)
    elif not isinstance(answers, (list, tuple)) or len(answers) < 2:
        raise DataError(
            "not a ranking: answers must be a list of at least two, each with a rank or with the list ranks"
        )
    else:
        found = [(answer["answer"], rank) for answer in answers for rank in [_rank(answer)]]
    return _preferences(row, [(text, -rank) for text, rank in found], pairs)


def ordered_pairs(
    values: Sequence[float], pairs: RankingPairs, *, min_margin: float
) -> tuple[list[tuple[int, int]], int]:
    """Return the pairs (better, worse) of places in `values`, where more is better, and how many pairs were ties.

    Values that differ by less than `min_margin`, or not at all, tie. Raises Tie if no pair is left.

    >>> ordered_pairs([1.0, 3.0, 3.0], "all", min_margin=0.0)
    ([(1, 0), (2, 0)], 1)
    """
    order = sorted(range(len(values)), key=lambda place: -values[place])
    places: Iterable[tuple[int, int]] = [(order[0], order[-1])]
    if pairs == "adjacent":
        places = itertools.pairwise(order)
    elif pairs == "all":
        places = itertools.combinations(order, 2)
    wanted = list(places)
    made = [(a, b) for a, b in wanted if values[a] > values[b] and values[a] - values[b] >= min_margin]
    if not made:
        raise Tie
    return made, len(wanted) - len(made)


def verdict(said: Any, names: tuple[str, str]) -> bool | None:
    """Return whether a verdict in words prefers the second of the answers `names`, or None for a tie.

    >>> verdict("response_b", ("response_a", "response_b"))
    True
    """
    word = _NOT_WORD.sub("", str(said)).lower() if isinstance(said, str) else ""
    if word in _TIES:
        return None
    for place, letter in enumerate("ab"):
        named = str(said).strip().lower().endswith((f"_{letter}", f" {letter}"))  # answer_b, Answer B
        if named or word == _NOT_WORD.sub("", names[place]).lower() or word in _ORDINALS[place]:
            return place == 1
    raise DataError(f"not a preference: {said!r}; {names[0]!r}, {names[1]!r}, 'A', 'B' or 'tie' is needed, or a number")


def _second_won(said: Any, names: tuple[str, str], coding: PreferenceCoding) -> bool:
    """Return whether the second answer was preferred. Raises Tie for a tie and DataError for an unknown verdict."""
    number = _number(said)
    if number is not None:
        return _second_by_number(number, coding)
    second = verdict(said, names)
    if second is None:
        raise Tie
    return second


def _second_by_number(number: float, coding: PreferenceCoding) -> bool:
    if coding == "signed":
        if number == 0:
            raise Tie
        return number > 0
    places = {"zero_based": (0, 1), "one_based": (1, 2), "first_is_one": (1, 0)}
    if coding not in places or number not in places[coding]:
        raise DataError(f"not a preference: {number:g} where preference_coding is {coding!r}")
    return number == places[coding][1]


def _number(said: Any) -> float | None:
    """Return a verdict as a number, or None. Numbers written as text (in CSV) are parsed; booleans are 0 and 1."""
    if isinstance(said, str) and said.strip().lower() in ("true", "false"):
        return float(said.strip().lower() == "true")
    if not isinstance(said, (bool, int, float, str)):
        return None
    try:
        number = float(said)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _rank(answer: Any) -> float:
    if not isinstance(answer, Mapping) or "answer" not in answer or "rank" not in answer:
        raise DataError("not a ranking: each of answers needs an answer and a rank (1 is the best)")
    number = None if isinstance(answer["rank"], bool) else _number(answer["rank"])
    if number is None:
        raise DataError(f"not a rank: {answer['rank']!r}; a number is needed, 1 is the best")
    return number


def asked(prompt: Any) -> Any:
    """Return a prompt, split into turns if it is a transcript like Nectar's (`Human: ... Assistant:`)."""
    if not isinstance(prompt, str) or not TRANSCRIPT_TURN.match(prompt.strip()):
        return prompt
    pieces = TRANSCRIPT_TURN.split(prompt.strip())
    turns = [
        {"from": speaker.lower(), "value": text.strip()}
        for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    return turns[:-1] if turns[-1]["from"] == "assistant" and not turns[-1]["value"] else turns


def _holds(name: str, value: Any) -> bool:
    """Return whether the column `name` contains an answer or a verdict on answers."""
    words = {word.rstrip("0123456789") for word in _NOT_WORD.split(_CAMEL.sub("_", name).lower())}
    if words & _VERDICTS:
        return value not in (None, "", [])
    return bool(words & _ANSWERS) and isinstance(value, (str, list, tuple, Mapping)) and len(value) > 0


# ---------------------------------------------------------------- ratings

_PROMPTS = ("prompt", "instruction")
RANKS = "ranks"
"""List of a rank for each answer; 1 is the best."""
MORE_IS_BETTER = ("ratings", "scores", "rewards")
"""Lists of a number for each answer, of which more is better."""
_UNCLEAR = ("rankings", "ranking")
_ONE_ANSWER = ("labels", "completion", "output")
"""Columns of formats of one answer, in whose rows lists of further answers are not read."""
_BESIDE = (*MORE_IS_BETTER, RANKS, *_UNCLEAR)
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
    return _has_answers(row) and (_beside(row) in MORE_IS_BETTER or _hold(row, (*_OVERALL, *_ASPECTS)))


def rated(
    row: Row, *, pairs: RankingPairs, weights: Mapping[str, float], min_margin: float
) -> tuple[list[dict[str, Any]], int]:
    """Return the preference pairs of a row with ratings, those of the best answer first, and the number of ties.

    Answers without a rating are left out. Raises Tie if no two ratings differ enough, Unrated if fewer than two answers
    have a rating, and DataError if the rating of an answer is ambiguous.
    """
    name = _beside(row)
    if name and weights:
        raise DataError(f"{name}: rating_weights weigh aspects, but each answer has one rating")
    if name:
        found = _numbered(row, name)
    else:
        listed = ((_text(answer), _rated(answer, weights)) for answer in _listed(row))
        found = [(text, value) for text, value in listed if value is not None]
    return _preferences(row, found, pairs, min_margin=min_margin)


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


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _has_answers(row: Row) -> bool:
    """Return whether a row has a prompt and a list of several answers."""
    name = _first(row, _ANSWER_LISTS)
    if name is None or _first(row, _PROMPTS) is None:
        return False
    return isinstance(row[name], (list, tuple)) and len(row[name]) > 1


def _beside(row: Row) -> str:
    """Return the name of the list with a number for each answer, the first of `_BESIDE` that the row has; "" if it has none.

    Where answers hold numbers themselves, or the row has the columns of another format, it can only be `ratings`. Raises DataError for a list whose name leaves open what its numbers mean.
    """
    own = any(name in row for name in _ONE_ANSWER) or _hold(row, (*_OVERALL, *_ASPECTS, "rank"))
    names = ("ratings",) if own else _BESIDE
    name = next((one for one in names if isinstance(row.get(one), (list, tuple))), "")
    if name in _UNCLEAR:
        rule = "ranks of the answers (1 is the best), numbers of which more is better, or places from best to worst"
        remedy = f"set columns = {{ranks = '{name}'}} or {{scores = '{name}'}}, or write such places as ranks"
        raise DataError(f"unclear numbers: {name} may be {rule}; {remedy}")
    return name


def _hold(row: Row, keys: Sequence[str]) -> bool:
    """Return whether an answer is an object with one of these keys."""
    return any(isinstance(answer, Mapping) and any(key in answer for key in keys) for answer in _listed(row))


def _listed(row: Row) -> Sequence[Any]:
    """Return the list of answers."""
    name = _first(row, _ANSWER_LISTS)
    if name is None:
        raise DataError(f"missing column: prompt, or completions with ratings; the row has {sorted(row)}")
    if not isinstance(row[name], (list, tuple)):
        raise DataError(f"not rated answers: {type(row[name]).__name__}; a list is needed")
    answers: Sequence[Any] = row[name]
    return answers


def _numbered(row: Row, name: str) -> list[tuple[Any, float]]:
    """Return each answer that has a number in the list `name`, with the number."""
    answers, numbers = _listed(row), row[name]
    if len(numbers) != len(answers):
        raise DataError(f"{name} and answers: {len(numbers)} {name} for {len(answers)} answers")
    found = ((_text(answer), rating(number)) for answer, number in zip(answers, numbers, strict=True))
    return [(text, number) for text, number in found if number is not None]


def _preferences(
    row: Row, found: Sequence[tuple[Any, float]], pairs: RankingPairs, *, min_margin: float | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the pairs of answers with values, of which more is better, and the number of ties.

    Their differences are margins if there is a `min_margin`.
    """
    prompt = _first(row, _PROMPTS)
    if prompt is None:
        raise DataError(f"missing column: prompt, or completions with ratings; the row has {sorted(row)}")
    if len(found) < 2:
        raise Unrated
    values = [value for _, value in found]
    made, tied = ordered_pairs(values, pairs, min_margin=min_margin or 0.0)
    rows = []
    for better, worse in made:
        margin = {} if min_margin is None else {"margin": values[better] - values[worse]}
        rows.append({"prompt": asked(row[prompt]), "chosen": found[better][0], "rejected": found[worse][0]} | margin)
    return rows, tied


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
        raise DataError(f"ambiguous rating: an answer has {given}; set rating_weights to choose one")
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
