"""The history that monitors read: bounded, restored from JSON, cut by a rollback."""

from __future__ import annotations

import json

from rlhf_core.monitoring.bands import EVALUATIONS, FIRST, LAST, History


def test_first_and_last_values_are_kept_and_those_between_are_not() -> None:
    history = History(["a"])
    for step in range(1, 1001):
        history.add(step, {"a": float(step), "b": 1.0})
    assert history.first("a", 2) == [(1, 1.0), (2, 2.0)]
    assert history.last("a", 2) == [(999, 999.0), (1000, 1000.0)]
    assert len(history.state()["points"]["a"]) == FIRST + LAST
    assert history.last("a", LAST)[0] == (1000 - LAST + 1, 1000.0 - LAST + 1)


def test_only_the_last_evaluations_keep_the_score_of_each_prompt() -> None:
    history = History([])
    for step in range(EVALUATIONS + 5):
        history.add_samples(step, {"eval/reward/mean": (1.0, 2.0)})
    assert [step for step, _ in history.samples("eval/reward/mean", 1000)] == list(range(5, EVALUATIONS + 5))


def test_a_history_survives_json_and_forgets_what_was_rolled_back() -> None:
    history = History(["a"])
    for step in (1, 2, 3):
        history.add(step, {"a": 0.1 * step})
        history.add_samples(step, {"m": (0.1, 0.2)})
    restored = History(["a"])
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.state() == history.state()
    restored.forget_after(2)
    assert restored.last("a", 9) == [(1, 0.1), (2, 0.2)]
    assert [step for step, _ in restored.samples("m", 9)] == [1, 2]
