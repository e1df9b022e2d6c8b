"""Read the rubric of a prompt, a list of weighted criteria in a field of its label, and weigh the verdicts on them.

Rubrics as rewards (arXiv 2507.17746): a judge's verdict on each criterion, or one on all of them. Rows of published sets are
read unchanged: `criterion` or `description`, with `weight` or `points`; other fields of a criterion are not shown.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.rewards import JudgedTerm, RewardsConfig
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.protocols import LABEL_COLUMNS
from rlhf_core.types import Prompt, label_fields

TEXTS, WEIGHTS = ("criterion", "description"), ("weight", "points")
SHOWN = 60  # characters of a prompt or a value in an error


@dataclass(frozen=True, slots=True)
class Criterion:
    """One point of a rubric. A negative weight marks a fault."""

    text: str
    weight: float = 1.0


def rubric_of(prompt: Prompt, column: str, *, key: str) -> tuple[Criterion, ...]:
    """Parse the criteria of a prompt; ConfigError, with the `key` of the option that names the column, if it has none.

    >>> prompt = Prompt("p", (), '{"rubric": [{"criterion": "It is short.", "weight": 2}]}', "all")
    >>> rubric_of(prompt, "rubric", key="rubric_column")
    (Criterion(text='It is short.', weight=2.0),)
    """
    fields = label_fields(prompt.label)
    if column not in fields and column not in LABEL_COLUMNS:
        has = f"its label has {', '.join(fields) or 'no fields'}"
        raise ConfigError(
            key, column, f"{named(prompt)} has no such column", f"{has}; add it, or choose prompts by sources"
        )
    found = fields.get(column, _parsed(prompt.label))
    try:
        criteria = tuple(map(_criterion, [found] if isinstance(found, (str, Mapping)) else found))
    except (TypeError, ValueError):
        criteria = ()
    if not any(one.weight > 0 for one in criteria):
        rule = f"{named(prompt)} has {str(found)[:SHOWN]!r}"
        remedy = "give a text, or a list of {criterion, weight} of which one has a weight above 0"
        raise ConfigError(key, column, rule, remedy)
    return criteria


def read_rubric(config: JudgedTerm, name: str, prompt: Prompt) -> tuple[Criterion, ...]:
    """The criteria that the term `name` has for a prompt; none if it reads no rubric."""
    column = config.rubric_column
    return rubric_of(prompt, column, key=f"rewards.{name}.rubric_column") if column else ()


def named(prompt: Prompt) -> str:
    """A prompt as errors name it: its id and its first words."""
    text = prompt.messages[-1].content if prompt.messages else ""
    return f"prompt {prompt.id} ({text[:SHOWN]!r})"


def shown(criteria: Sequence[Criterion]) -> str:
    """A rubric as a judge sees it: numbered, with the weights if they differ.

    >>> print(shown([Criterion("It is short."), Criterion("It is rude.", -2.0)]))
    1. It is short. (weight 1)
    2. It is rude. (weight -2)
    """
    if len(criteria) == 1:
        return criteria[0].text
    differ = len({one.weight for one in criteria}) > 1
    lines = [one.text + f" (weight {one.weight:g})" * differ for one in criteria]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


def weighted_share(criteria: Sequence[Criterion], met: Sequence[float]) -> float:
    """Weighted share sum(w * m) / sum(w > 0) of verdicts m in [0, 1]: 1 if every wanted criterion is met, and no fault.

    >>> weighted_share([Criterion("a", 3.0), Criterion("b", 1.0), Criterion("fault", -2.0)], [1.0, 0.0, 0.5])
    0.5
    """
    earned = math.fsum(one.weight * verdict for one, verdict in zip(criteria, met, strict=True))
    return earned / math.fsum(one.weight for one in criteria if one.weight > 0)


def check_rubrics(rewards: RewardsConfig | None, prompts: Sequence[Prompt], *, key: str) -> None:
    """Raise ConfigError for a prompt that lacks the rubric read by a term of its source."""
    for name, column, sources in columns_read(rewards):
        for prompt in prompts:
            if not sources or prompt.source in sources:
                rubric_of(prompt, column, key=f"{key}.terms.{name}.rubric_column")


def columns_read(rewards: RewardsConfig | None) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the name, the rubric's column and the sources of each term that reads one."""
    for name, term in rewards.terms.items() if rewards else ():
        if isinstance(term, JudgedTerm) and term.rubric_column:
            yield name, term.rubric_column, term.sources


def _parsed(label: str) -> Any:
    """Parse a label that is a JSON list; any other one stays text."""
    try:
        return json.loads(label) if label.lstrip().startswith("[") else label
    except (ValueError, RecursionError):
        return label


def _criterion(row: Any) -> Criterion:
    """Parse a row of a rubric; ValueError or TypeError if it is none."""
    if isinstance(row, str):
        text, weight = row, 1.0
    else:
        text = next((row[name] for name in TEXTS if name in row), "")
        weight = float(next((row[name] for name in WEIGHTS if row.get(name) is not None), 1.0))
    if not isinstance(text, str) or not text.strip() or not math.isfinite(weight):
        raise ValueError("no criterion")
    return Criterion(text.strip(), weight)
