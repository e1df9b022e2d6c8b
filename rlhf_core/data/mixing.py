"""Assign rows to tables and choose how many rows of each source a mixture takes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from rlhf_core.config.data import Use
from rlhf_core.data.cleaning import exact
from rlhf_core.data.formats import Example, Turns

Table = Literal["demonstrations", "preferences", "prompts", "eval_prompts", "steps"]
TABLES: tuple[Table, ...] = ("demonstrations", "preferences", "prompts", "eval_prompts", "steps")

T = TypeVar("T")


def place(prompt: Turns, salt: str) -> float:
    """Return a number in [0, 1) that depends only on `salt` and the content, so equal prompts get equal numbers."""
    digest = hashlib.sha256(f"{salt}\0{exact(prompt).casefold()}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def table_of(example: Example, use: Use) -> Table | None:
    """Return the table that the example's prompt is assigned to, or None if the shares of `use` leave it out.

    A row without a prompt (running text) is assigned by its answer.
    """
    position = place(example.prompt or example.chosen, "table")
    border = 0.0
    for table in TABLES:
        border += getattr(use, table)
        if position < border:
            return table
    return None


def is_evaluation(example: Example, eval_fraction: float) -> bool:
    """Return whether the prompt of a demonstration, a pair or a judged answer is held out for evaluation."""
    return place(example.prompt or example.chosen, "eval") < eval_fraction


def misfit(example: Example, table: Table) -> str | None:
    """Return the reason why `example` cannot be used in `table`, or None if it can."""
    if table != "demonstrations" and any(m.tool_fields for m in (*example.prompt, *example.chosen, *example.rejected)):
        return "tool calls: only demonstrations can hold them"
    if table in ("demonstrations", "preferences") and example.reward is not None and not example.chosen:
        return "no better answer: its prompt has no two answers of different rewards"
    if table == "demonstrations" and not example.chosen:
        return "no good answer: demonstrations need one"
    if table == "preferences" and not (example.chosen and example.rejected) and not example.judged:
        return "no pair of answers: preferences need a good and a bad one, or one that is labelled good or bad"
    if table in ("prompts", "eval_prompts") and not example.prompt:
        return "no prompt"
    if table == "steps" and not (example.prompt and example.steps):
        return "no judged steps: a prompt, completions and their labels are needed"
    if table == "steps" and not all(step.strip() for step in example.steps):
        return "blank step"
    return None


def mix(rows: Mapping[str, Sequence[T]], weights: Mapping[str, float], *, seed: int) -> list[T]:
    """Return shuffled rows of all sources in the proportions of `weights`.

    The source with the fewest rows for its weight sets the size. Each source contributes a random subset of its rows,
    without repetition.

    >>> len(mix({"a": range(10), "b": range(100)}, {"a": 1.0, "b": 3.0}, seed=0))
    40
    """
    present = {name: list(found) for name, found in rows.items() if found}
    if not present:
        return []
    scale = min(len(found) / weights[name] for name, found in present.items())
    rng = random.Random(seed)
    mixed: list[T] = []
    for name, found in present.items():
        mixed += rng.sample(found, k=min(len(found), max(1, round(scale * weights[name]))))
    rng.shuffle(mixed)
    return mixed


def shuffled(rows: Sequence[T], *, seed: int) -> list[T]:
    """Return the rows in a random order determined by `seed`."""
    return random.Random(seed).sample(rows, k=len(rows))
