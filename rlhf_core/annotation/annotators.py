"""Collect judgments of comparisons from a simulated annotator or from files that people fill in."""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.annotation.proposing import CHOICES, Choice, Comparison, Judgment
from rlhf_core.config.annotators import FileAnnotator, ProgramAnnotator
from rlhf_core.data.shards import replace_file
from rlhf_core.errors import DataError
from rlhf_core.rewards.batches import checked
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.types import Generation, Prompt, answered, derive_seed

EXPORT = "comparisons.jsonl"  # written for people, who never see the policies
IMPORT = "judgments.jsonl"  # written by people, one object a line
LONGEST_S = 1e9  # 32 years: a larger number is no time that a person took


class NotJudgedYet(Exception):
    """Raised while judgments are missing; the message has their number and place."""


# ---------------------------------------------------------------- simulated people


def ask_program(
    config: ProgramAnnotator, comparisons: Sequence[Comparison], *, code: Mapping[str, str], notes: str = "", seed: int
) -> list[Judgment]:
    """Draw the judgments of simulated people (Bradley and Terry 1952) from the seed and the comparison.

    `code` holds the digests under which the function entered the key; further files that it reads are noted in `notes`.
    """
    pairs = rewards_of_sides(config.function, comparisons, code=code, notes=notes, timeout_s=config.timeout_s)
    names = [f"program-{number + 1}" for number in range(config.annotators)]
    return [
        Judgment(one.id, name, _drawn(config, pair, random.Random(derive_seed(seed, "annotator", name, one.id))))
        for name in names
        for one, pair in zip(comparisons, pairs, strict=True)
    ]


def rewards_of_sides(
    function: str, comparisons: Sequence[Comparison], *, code: Mapping[str, str], notes: str = "", timeout_s: float
) -> list[tuple[float, float]]:
    """Compute the rewards of the first and the second answer of each comparison."""
    answers = [_generation(one, text) for one in comparisons for text in (one.first, one.second)]
    settings = WorkerSettings(code=dict(code), notes=notes)
    with IsolatedReward("annotator", function, timeout_s=timeout_s, settings=settings) as reward:
        values = checked("annotator", reward(answers), answers)
    return list(zip(values[::2], values[1::2], strict=True))


def _drawn(config: ProgramAnnotator, rewards: tuple[float, float], rng: random.Random) -> Choice:
    difference = rewards[0] - rewards[1]
    if abs(difference) < config.tie_below:
        return "tie"
    scaled = difference / config.temperature  # Bradley-Terry: P(first) = sigmoid((r1 - r2) / T)
    first = 1 / (1 + math.exp(-scaled)) if scaled > 0 else math.exp(scaled) / (1 + math.exp(scaled))  # no overflow
    return "first" if rng.random() < first else "second"


def _generation(one: Comparison, text: str) -> Generation:
    """An answer in the form that a reward function receives."""
    return answered(Prompt(one.id, one.prompt, one.label, one.source), text)


# ---------------------------------------------------------------- people, through files


def ask_file(config: FileAnnotator, comparisons: Sequence[Comparison], *, name: str) -> list[Judgment]:
    """Read the judgments in the file. Raises NotJudgedYet if too few comparisons have one.

    The files are in the folder `name`, which holds these comparisons alone: rounds and runs may share a configuration.
    The comparisons are exported first, unless they are there already. Raises DataError for a line that does not judge
    one of them.
    """
    folder = Path(config.folder).expanduser() / name
    lines = [json.dumps(_shown(one), ensure_ascii=False) for one in comparisons]
    content = "".join(f"{line}\n" for line in lines).encode()
    export = folder / EXPORT
    if not export.is_file() or export.read_bytes() != content:
        replace_file(export, content)
    judgments = read_judgment_lines(folder / IMPORT, {one.id for one in comparisons})
    done, needed = len({one.comparison for one in judgments}), math.ceil(config.needed * len(comparisons))
    if done < needed and not config.is_late(export.stat().st_mtime, now=time.time()):
        raise NotJudgedYet(f"{done} of {needed} comparisons are judged; add lines to {folder / IMPORT}")
    return judgments


def read_judgment_lines(path: Path, known: set[str]) -> list[Judgment]:
    """Read the judgments in a JSONL file, [] if it is missing.

    Raises DataError for a line that judges none of `known`.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")  # and not splitlines, which also splits at characters that JSON may hold
    written = lines if _is_json(lines[-1]) else lines[:-1]  # the last one may still be being written
    judgments = [_judgment(f"{path}:{at}", line, known) for at, line in enumerate(written, start=1) if line.strip()]
    twice = [name for name, count in Counter((one.comparison, one.annotator) for one in judgments).items() if count > 1]
    if twice:
        rule = f"{len(twice)} comparisons are judged twice by the same annotator, the first: {twice[0][0]}"
        raise DataError("judgments", str(path), rule, "keep one line for each")
    return judgments


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _shown(one: Comparison) -> dict[str, Any]:
    """The annotator's view: neither the policies nor the expected answer."""
    messages = [{"role": message.role, "content": message.content} for message in one.prompt]
    return {"id": one.id, "prompt": messages, "first": one.first, "second": one.second}


def _judgment(place: str, content: bytes, known: set[str]) -> Judgment:
    line = content.decode(errors="replace")
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise DataError(place, line[:80], "is not JSON in UTF-8", "write one object per line") from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not isinstance(row.get("choice"), str):
        raise DataError(place, line[:80], "needs the texts id and choice", "add what is missing")
    if row["choice"] not in CHOICES:
        raise DataError(f"{place}.choice", row["choice"], f"must be one of {', '.join(CHOICES)}", "correct it")
    if row["id"] not in known:
        rule = "is none of the given comparisons"
        raise DataError(f"{place}.id", row["id"], rule, f"take the ids of {EXPORT}")
    annotator, reason, seconds = row.get("annotator", "annotator-1"), row.get("reason", ""), row.get("seconds", 0.0)
    if not isinstance(annotator, str) or not isinstance(reason, str):
        raise DataError(place, line[:80], "annotator and reason must be texts", "correct them")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= LONGEST_S:
        raise DataError(f"{place}.seconds", str(seconds)[:80], "must be a number of seconds", "correct it")
    return Judgment(row["id"], annotator, row["choice"], reason, float(seconds))
