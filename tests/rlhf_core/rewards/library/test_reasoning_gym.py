"""Tasks of reasoning-gym."""

import json
import sys
from types import SimpleNamespace

import pytest

from rlhf_core.errors import DataError
from rlhf_core.rewards.library.reasoning_gym import reasoning_gym_reward

ENTRY = {
    "question": "Calculate 309 using 6, 61, 94, 4.",
    "answer": "94*4 - 61 - 6",
    "metadata": {"source_dataset": "countdown", "numbers": [6, 61, 94, 4], "target": 309, "expression": "94*4-61-6"},
}


@pytest.mark.slow
def test_the_task_judges_by_its_own_rule():
    pytest.importorskip("reasoning_gym")  # imports 100 tasks: ten seconds
    label = json.dumps(ENTRY)
    answers = ["I think <answer>4*94 - 6 - 61</answer>", "4*94", "4*94 - 6 - 61"]
    values = reasoning_gym_reward([""] * 4, [*answers, "x"], [label, label, label, None])
    assert values[0] == values[2] == 1.0 and values[1] is not None and values[1] < 1.0 and values[3] is None


def test_a_label_that_is_no_entry_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(get_score_answer_fn=lambda name: None))
    with pytest.raises(DataError, match="is no entry of reasoning-gym"):
        reasoning_gym_reward([""], ["1"], ["42"])
    with pytest.raises(DataError, match="is no entry of reasoning-gym"):
        reasoning_gym_reward([""], ["1"], ["[" * 100_000])
