"""Read judgments from exports of annotation tools, whose layouts are modules of `rlhf_core.annotation`.

A record holds the texts that people saw and the responses of each annotator. It becomes a `Judged`: the answers and one
verdict per annotator. An export does not state which field is the prompt or what a number rates. What can be read in
several ways is refused, with the option that decides it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from typing import Any

from rlhf_core.config.data import RankingPairs, Source
from rlhf_core.data.comparisons import Row, Unrated, asked, ordered_pairs, rating, responses, verdict
from rlhf_core.errors import DataError

EXPORTS = {
    "label_studio": "rlhf_core.annotation.label_studio",
    "argilla": "rlhf_core.annotation.argilla",
}
"""Format of records -> the module with a function `responses` that reads them."""

_KINDS = ("pairwise", "choices", "ranking", "rating")
_PROMPTS = ("prompt", "instruction", "question", "conversation")
_NOT_WORD = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One annotator's values for the answers of a record; higher is better, None if not judged."""

    annotator: str
    values: tuple[float | None, ...]
    seconds: float = 0.0

    @property
    def choice(self) -> str:
        """The verdict on two answers: `first`, `second` or `tie`; the empty text if one of them was not judged.

        >>> Verdict("jo", (0.0, 1.0)).choice
        'second'
        """
        first, second = self.values
        if first is None or second is None:
            return ""
        return "tie" if first == second else "first" if first > second else "second"


@dataclass(frozen=True, slots=True)
class Judged:
    """A record of an export: the prompt (text or turns), the answers in their order, and one verdict per annotator."""

    id: str
    prompt: Any
    answers: tuple[Any, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """The response of one annotator to one question; `shown` are the names of the compared answers, if the export has them."""

    annotator: str
    question: str
    kind: str
    value: Any
    shown: tuple[str, ...] = ()
    seconds: float = 0.0


def read_record(row: Row, format_name: str, source: Source) -> Judged:
    """Return a record of an export (`label_studio` or `argilla`).

    Raises DataError if the record is ambiguous or malformed, and Unrated if it has no judgment. `source` decides by `columns` (prompt, response1, response2, preference), `rating_questions` and `bare_rankings`.
    """
    fields, said = import_module(EXPORTS[format_name]).responses(row)
    prompt = _prompt(fields, source)
    said = _of_question(said, source)
    if not said:
        raise Unrated
    names = _answer_names(fields, said, source)
    texts = tuple(fields[name] for name in names)
    by_annotator: dict[str, list[Response]] = {}
    for number, one in enumerate(said):
        by_annotator.setdefault(one.annotator or f"?{number}", []).append(one)
    verdicts = tuple(_verdict(responses_, names, source) for responses_ in by_annotator.values())
    record = next((row[name] for name in ("external_id", "id") if row.get(name) is not None), "")
    return Judged(str(record), asked(fields[prompt]), texts, verdicts)


def preference_rows(judged: Judged, *, pairs: RankingPairs, min_margin: float) -> tuple[list[dict[str, Any]], int]:
    """Return the preference pairs of a record by the mean of its verdicts, and the number of ties.

    The margin is the difference of the means: for a choice between two answers the share of annotators that chose one
    less the share that chose the other. Raises Tie if annotators are evenly split or all see a tie, and Unrated if fewer than two answers were judged.
    """
    columns = zip(*(verdict.values for verdict in judged.verdicts), strict=True)
    means = [
        fmean(given) if (given := [value for value in column if value is not None]) else None for column in columns
    ]
    places = [place for place, mean in enumerate(means) if mean is not None]
    values = [mean for mean in means if mean is not None]
    if len(values) < 2:
        raise Unrated
    made, tied = ordered_pairs(values, pairs, min_margin=min_margin)
    names = {verdict.annotator for verdict in judged.verdicts}
    rows = [
        {
            "prompt": judged.prompt,
            "chosen": judged.answers[places[better]],
            "rejected": judged.answers[places[worse]],
            "margin": values[better] - values[worse],
            **({"annotator": next(iter(names))} if len(names) == 1 else {}),
        }
        for better, worse in made
    ]
    return rows, tied


# ---------------------------------------------------------------- questions and the answers that they compare


def _prompt(fields: Mapping[str, Any], source: Source) -> str:
    names = [source.columns.prompt] if source.columns.prompt else [name for name in _PROMPTS if name in fields]
    if len(names) != 1 or names[0] not in fields:
        raise DataError(
            f"no prompt: the record has the fields {sorted(fields)}; set columns = {{prompt = ...}} to the prompt's"
        )
    return names[0]


def _of_question(said: list[Response], source: Source) -> list[Response]:
    """Return the responses to the questions that compare the answers. Raises DataError if these are ambiguous."""
    asked_for = set(source.rating_questions) or ({source.columns.preference} - {""})
    questions = asked_for or {one.question for one in said if one.kind in _KINDS}
    found = [one for one in said if one.question in questions]
    if asked_for:
        if said and not found:
            raise DataError(
                f"no such question: the responses are to {sorted({one.question for one in said})}, none to "
                f"{sorted(asked_for)}; set columns = {{preference = ...}} or rating_questions to questions of the export"
            )
        _refuse_unread([one for one in found if one.value is None])
        return found
    if len(questions) > 1:
        raise DataError(
            f"several questions: {sorted(questions)} may all judge the answers; set columns = {{preference = ...}} to one, "
            "or rating_questions for questions that rate one answer each"
        )
    if not found:
        _refuse_unread([one for one in said if one.value is not None])
    return found


def _refuse_unread(said: Sequence[Response]) -> None:
    """Raise DataError for responses of kinds that are not known, which would otherwise count as not judged."""
    strange = sorted({f"{one.question} ({one.kind})" for one in said if one.kind not in _KINDS})
    if strange:
        raise DataError(f"not a comparison: {strange} cannot be read; use questions of the kinds {list(_KINDS)}")


def _answer_names(fields: Mapping[str, Any], said: Sequence[Response], source: Source) -> tuple[str, ...]:
    """Return the fields with the answers. Raises DataError if they are ambiguous."""
    columns = source.columns
    shown = next((one.shown for one in said if one.kind == "pairwise" and set(one.shown) <= set(fields)), ())
    ranked = next((_ranking(one.value, source) for one in said if one.kind == "ranking"), {})
    known = responses(fields)
    if source.rating_questions:
        names = tuple(source.rating_questions.values())
    elif columns.response1 and columns.response2:
        names = (columns.response1, columns.response2)
    elif len(shown) == 2:
        names = shown
    elif ranked:
        names = tuple(_field(name, fields) for name in sorted(ranked))
    elif known:
        names = known
    else:
        raise DataError(
            f"no answers: the record has the fields {sorted(fields)}; set columns = {{response1 = ..., response2 = ...}}"
        )
    missing = [name for name in names if name not in fields]
    if missing or len(set(names)) < 2:
        raise DataError(
            f"no such field: {missing or list(names)}; the record has {sorted(fields)}, two answers are needed"
        )
    return names


def _field(name: str, fields: Mapping[str, Any]) -> str:
    """Return the field that a question's option names: `reply-1` is the field `reply_1`."""
    if name in fields:
        return name
    found = [field for field in fields if _plain(field) == _plain(name)]
    if len(found) != 1:
        raise DataError(
            f"no such field: the question names {name!r}, the record has {sorted(fields)}; name options and fields alike"
        )
    return found[0]


def _plain(name: str) -> str:
    return _NOT_WORD.sub("", name).lower()


def rows_of(columns: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a struct of lists; a column that is missing has no values. DataError for unequal lengths."""
    given = {name: columns[name] for name in names if columns.get(name) is not None}
    lengths = {len(column) if isinstance(column, (list, tuple)) else -1 for column in given.values()}
    if not given:
        return []
    if len(lengths) != 1 or -1 in lengths:
        raise DataError(f"not responses: {sorted(given)} must be lists of one length")
    return [{name: column[place] for name, column in given.items()} for place in range(lengths.pop())]


# ---------------------------------------------------------------- verdicts


def _verdict(said: Sequence[Response], names: tuple[str, ...], source: Source) -> Verdict:
    """Return one annotator's verdict on the answers `names`."""
    annotator, seconds = said[0].annotator, said[0].seconds
    twice = next((question for question, count in Counter(one.question for one in said).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"two responses: annotator {annotator!r} answered {twice!r} twice; keep one of them")
    if source.rating_questions:
        given = {source.rating_questions[one.question]: rating(one.value) for one in said}
        return Verdict(annotator, tuple(given.get(name) for name in names), seconds)
    (one,) = said
    if one.kind == "pairwise":
        return Verdict(annotator, _pairwise(one, names, source), seconds)
    if one.kind == "ranking":
        ranks = _ranking(one.value, source)
        by_name = {next((n for n in names if _plain(n) == _plain(name)), name): -rank for name, rank in ranks.items()}
        if not set(by_name) & set(names):
            rule = f"the ranking names {sorted(ranks)}, the answers are {list(names)}"
            raise DataError(f"no such answer: {rule}; name options and fields alike, or set columns to fields it ranks")
        return Verdict(annotator, tuple(by_name.get(name) for name in names), seconds)
    if one.kind == "choices":
        return Verdict(annotator, _chosen(one, names), seconds)
    raise DataError(
        f"not a comparison: question {one.question!r} has {one.kind} {str(one.value)[:40]!r} of no named "
        "answer; set rating_questions = {question = field, ...}, or columns = {preference = ...} to another question"
    )


def _pairwise(one: Response, names: tuple[str, ...], source: Source) -> tuple[float, float]:
    """Return the values of two answers by which of them was selected, left or right."""
    if one.value not in ("left", "right"):
        raise DataError(f"not a selection: {one.value!r}; left or right is needed")
    if set(one.shown) == set(names):
        left = one.shown[0]
    elif source.columns.response1 and source.columns.response2:
        left = names[0]
    else:
        raise DataError(
            f"no side: the tags {list(one.shown)} are not fields, so the left text is unknown; set "
            "columns = {response1 = <left>, response2 = <right>}"
        )
    first = (left == names[0]) == (one.value == "left")
    return (1.0, 0.0) if first else (0.0, 1.0)


def _chosen(one: Response, names: tuple[str, ...]) -> tuple[float, float]:
    value = one.value[0] if isinstance(one.value, (list, tuple)) and len(one.value) == 1 else one.value
    if not isinstance(value, str) or len(names) != 2:
        raise DataError(
            f"not a choice: {str(value)[:80]!r}; one option that names one of two answers, or a tie, is needed"
        )
    found = verdict(value, (names[0], names[1]))
    return (0.5, 0.5) if found is None else (0.0, 1.0) if found else (1.0, 0.0)  # a tie is half a vote for each


def _ranking(value: Any, source: Source) -> dict[str, float]:
    """Return the rank of each option, 1 is the best."""
    if isinstance(value, Mapping) and {"rank", "value"} <= set(value):  # a sequence of structs is a struct of lists
        value = rows_of(value, ("rank", "value"))
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"not a ranking: {str(value)[:80]!r}; a list of values with ranks is needed")
    if all(isinstance(name, str) for name in value):
        if not source.bare_rankings:
            raise DataError(
                "ranking without ranks: Argilla 2 exports the names alone, so ties cannot be seen; set bare_rankings = true to "
                "read them as best first, or export the server's records, which have ranks"
            )
        return {name: float(place) for place, name in enumerate(value, start=1)}
    if not all(isinstance(one, Mapping) and "value" in one and rating(one.get("rank")) is not None for one in value):
        raise DataError(f"not a ranking: {str(value)[:80]!r}; each option needs a value and a rank")
    return {str(one["value"]): float(one["rank"]) for one in value}
