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


def instruction_rows(generations: Sequence[Generation]) -> list[Row]:
    """Return a row per prompt with prompt- and instruction-level accuracy, strict and loose, under IFEval's names.

    Raises DataError for a label that describes no instructions.
    """
    rows = []
    for places in by_prompt(generations):
        first = generations[places[0]]
        instructions = _instructions(first.prompt.label, first.prompt.id)
        values = {}
        for name in ("strict", "loose"):
            held = [_held(generations[place], instructions, loose=name == "loose") for place in places]
            values[f"prompt_level_{name}_acc"] = fmean(float(all(one)) for one in held)
            values[f"inst_level_{name}_acc"] = fmean(fmean(one) for one in held)
        weights = {name: float(len(instructions)) for name in values if name.startswith("inst_")}
        rows.append(row_of(first, values, weights))
    return rows


def _held(generation: Generation, instructions: Sequence[Any], *, loose: bool) -> list[bool]:
    try:
        return [follows(generation.completion.text, one, loose=loose) for one in instructions]
    except (KeyError, TypeError, AttributeError) as error:
        raise _bad(generation.prompt.label, generation.prompt.id, f"has no instruction {error}") from None


def _instructions(label: str, prompt: str) -> list[Any]:
    try:
        read = json.loads(label)
        instructions = read["instructions"] if isinstance(read, dict) else read
    except (ValueError, KeyError, RecursionError) as error:
        raise _bad(label, prompt, f"describes no instructions ({error})") from None
    if not isinstance(instructions, list) or not instructions:
        raise _bad(label, prompt, "describes no instructions")
    return instructions


def _bad(label: str, prompt: str, rule: str) -> DataError:
    remedy = "see rlhf_core.rewards.library.instructions for the form of a label"
    return DataError(explain(f"evaluate.suites.prompts[{prompt}].label", label[:80], rule, remedy))
