"""Tasks of reasoning-gym, scored by the task's own rule."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlhf_core.errors import DataError, explain
from rlhf_core.rewards.library.labels import against_labels, needed

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    dataset: str = "",
    **columns: Any,
) -> list[float | None]:
    """Score the answer with reasoning-gym, in [0, 1]: its last `<answer>` block, or else all of it.

    The label is the JSON of a task's entry: `{"question": ..., "answer": ..., "metadata": {"source_dataset": ...}}`;
    `dataset` names the rule where the metadata do not. None without a label.
    """
    gym = needed("reasoning_gym", "reasoning-gym")

    def judge(text: str, label: str) -> float:
        entry = _read_entry(label)
        name = dataset or entry["metadata"].get("source_dataset", "")
        try:
            score = gym.get_score_answer_fn(name)
        except ValueError as error:
            raise DataError(explain("label", name, f"{error}", "name a dataset of reasoning-gym")) from None
        answers = _ANSWER.findall(text)
        return float(score(answer=(answers[-1] if answers else text).strip(), entry=entry))

    return against_labels(completions, labels, judge)


def _read_entry(label: str) -> dict[str, Any]:
    try:
        entry = json.loads(label)
        if isinstance(entry["metadata"], dict) and "answer" in entry:
            return dict(entry)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(explain("label", label[:200], "is no entry of reasoning-gym", "give the JSON of the whole entry"))
