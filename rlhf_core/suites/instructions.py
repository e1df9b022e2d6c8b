"""Measure how well answers follow verifiable instructions, as IFEval does (arXiv 2311.07911, section 3).

Strict accuracy checks the answer as it is; loose accuracy also accepts it without its first or last line, or without
asterisks. Prompt-level accuracy asks for all instructions of a prompt, instruction-level accuracy counts each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhf_core.errors import DataError, explain
from rlhf_core.rewards.library.instructions import follows
from rlhf_core.suites.answers import by_prompt, row_of
from rlhf_core.suites.results import Row
from rlhf_core.types import Generation

HEADLINE = "prompt_level_strict_acc"
MEASURES = (HEADLINE, "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
PROBE = '{"a": "b"}'
"""A text on which every check reads its options."""


def instruction_rows(generations: Sequence[Generation]) -> list[Row]:
    """Return a row per prompt with prompt- and instruction-level accuracy, strict and loose, under IFEval's names.

    Raises DataError for a label that describes no instructions.
    """
    rows = []
    for places in by_prompt(generations):
        first = generations[places[0]]
        instructions = instructions_of(first.prompt.label, key=f"evaluate.suites.prompts[{first.prompt.id}].label")
        values = {}
        for name in ("strict", "loose"):
            held = [_held(generations[place].completion.text, instructions, loose=name == "loose") for place in places]
            values[f"prompt_level_{name}_acc"] = fmean(float(all(one)) for one in held)
            values[f"inst_level_{name}_acc"] = fmean(fmean(one) for one in held)
        weights = {name: float(len(instructions)) for name in values if name.startswith("inst_")}
        rows.append(row_of(first, values, weights))
    return rows


def instructions_of(label: str, *, key: str = "label") -> list[Any]:
    """Return the instructions of a label. Raises DataError for one that describes none, or none that we know."""
    remedy = "see rlhf_core.rewards.library.instructions for the form of a label"
    try:
        read = json.loads(label)
        instructions = read["instructions"] if isinstance(read, dict) else read
    except (ValueError, KeyError, RecursionError) as error:
        raise DataError(explain(key, label[:80], f"describes no instructions ({error})", remedy)) from None
    if not isinstance(instructions, list) or not instructions:
        raise DataError(explain(key, label[:80], "describes no instructions", remedy))
    try:
        _held(PROBE, instructions, loose=False)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            explain(key, label[:80], f"has an instruction that cannot be checked ({error})", remedy)
        ) from None
    return instructions


def _held(text: str, instructions: Sequence[Any], *, loose: bool) -> list[bool]:
    return [follows(text, one, loose=loose) for one in instructions]
