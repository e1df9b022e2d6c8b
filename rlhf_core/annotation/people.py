"""Collect people's judgments through files or MLflow's Review page, and check whether there are enough."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlhf_core.annotation.annotators import NotJudgedYet, ask_file
from rlhf_core.annotation.proposing import Choice, Comparison, Judgment, read_comparisons
from rlhf_core.config.annotators import FileAnnotator, People, ReviewAnnotator
from rlhf_core.errors import DataError
from rlhf_core.tracking.review_queues import QueueState, ReviewAnswer, ReviewItem, ReviewQuestion, review_queue

QUESTION = "preferred"
_HEADING = re.compile(r"(?m)^((?:[ \t>]|[*+-][ \t]|\d+[.)][ \t])*)(#{1,6}(?=[ \t]|$)|[=_*-][=_*\- \t]*$)")
"""The start of a heading, or an underline that makes a heading of the line above, also within a list or a quotation."""
MEANINGS: Mapping[str, Choice] = {"A": "first", "B": "second", "tie": "tie", "both bad": "both_bad"}


def ask_people(
    config: People, comparisons: Sequence[Comparison], *, name: str, uri: str
) -> tuple[list[Judgment], dict[str, Any]]:
    """Collect people's judgments and their part of the report. Raises NotJudgedYet while too few are there.

    `name` distinguishes these comparisons from the comparisons of other rounds and runs. `uri` is the address of
    MLflow, which only `mlflow` needs.
    """
    if isinstance(config, FileAnnotator):
        return ask_file(config, comparisons, name=name), {}
    return ask_reviewers(config, comparisons, name=name, uri=uri)


def ask_reviewers(
    config: ReviewAnnotator, comparisons: Sequence[Comparison], *, name: str, uri: str
) -> tuple[list[Judgment], dict[str, Any]]:
    """Read the answers in the annotators' queues of MLflow, and create missing queues."""
    question = ReviewQuestion(QUESTION, config.instruction, tuple(MEANINGS))
    states: dict[str, QueueState] = {}
    for annotator, rows in shared_out(comparisons, config.annotators, config.overlap).items():
        states[annotator] = review_queue(
            uri,
            experiment=config.experiment,
            name=f"{annotator} {name}",
            user=annotator,
            question=question,
            items=[shown(one) for one in rows],
        )
    done, asked = sum(one.done for one in states.values()), sum(one.items for one in states.values())
    since = min(one.created_s for one in states.values())
    if done < math.ceil(config.needed * asked) and not config.is_late(since, now=time.time()):
        raise NotJudgedYet(_missing(config, states, done, asked))
    judgments = [_judgment(answer, annotator) for annotator, state in states.items() for answer in state.answers]
    sources = sorted({answer.source for state in states.values() for answer in state.answers})
    return judgments, {"review": {"asked": asked, "done": done, "answered": len(judgments), "sources": sources}}


def shared_out(
    comparisons: Sequence[Comparison], annotators: Sequence[str], overlap: int
) -> dict[str, list[Comparison]]:
    """Distribute comparisons, in order: `overlap` annotators get each; repetitions go to the annotator of the first.

    >>> shared_out([], ["ada", "bob"], 1)
    {'ada': [], 'bob': []}
    """
    shares: dict[str, list[Comparison]] = {name: [] for name in annotators}
    numbers: dict[str, int] = {}
    for one in comparisons:
        number = numbers.setdefault(one.repeats or one.id, len(numbers))
        for step in range(overlap):
            shares[annotators[(number + step) % len(annotators)]].append(one)
    return shares


def shown(one: Comparison) -> ReviewItem:
    """A person's view of a comparison, in Markdown: neither the policies nor the expected answer.

    Answers keep their Markdown but for headings and rules, with which an answer could pass for both.
    """
    [*before, last] = one.prompt
    request = "\n\n".join([*(f"**{message.role}**\n\n{message.content}" for message in before), last.content])
    return ReviewItem(
        one.id, request, f"### A\n\n{_without_headings(one.first)}\n\n---\n\n### B\n\n{_without_headings(one.second)}"
    )


def condition(config: People, comparisons: Path, *, name: str) -> dict[str, Any]:
    """The arguments of `is_met` as JSON values, without secrets."""
    return {"annotator": config.model_dump(mode="json"), "comparisons": str(comparisons.resolve()), "name": name}


def is_met(condition: Mapping[str, Any], *, uri: str) -> bool:
    """Whether people have judged enough for a stage that waits under `condition`, or its deadline has passed."""
    config: People = TypeAdapter(People).validate_python(condition["annotator"])
    try:
        ask_people(config, read_comparisons(Path(condition["comparisons"])), name=condition["name"], uri=uri)
    except NotJudgedYet:
        return False
    return True


def _missing(config: ReviewAnnotator, states: Mapping[str, QueueState], done: int, asked: int) -> str:
    waiting = {name: state for name, state in states.items() if state.done < state.items}
    pages = [f"{name} ({state.done} of {state.items}) at {state.url}" for name, state in waiting.items() if state.url]
    if not pages:
        place = f"experiment {config.experiment}, Review: the queues of {', '.join(waiting)}"
        pages = [f"start the page with `rlhf up`, then see MLflow, {place}"]
    return f"{done} of {asked} comparisons are judged (with keys: rlhf judge); {', '.join(pages)}"


def _judgment(answer: ReviewAnswer, annotator: str) -> Judgment:
    if answer.value not in MEANINGS:
        rule = f"must be one of {', '.join(MEANINGS)}"
        raise DataError(f"MLflow.{QUESTION}[{answer.item}]", answer.value, rule, "answer it again on the page")
    return Judgment(answer.item, annotator, MEANINGS[answer.value], answer.reason)


def _without_headings(text: str) -> str:
    r"""Escape headings and horizontal rules in Markdown, so that their characters are shown.

    >>> _without_headings("Yes.\n### B\nNo\n---")
    'Yes.\n\\### B\nNo\n\\---'
    """
    return _HEADING.sub(r"\1\\\2", text)
