"""The best evaluation so far."""

from __future__ import annotations

import json
import math

from rlhf_core.rollouts.guard import Best


def test_only_a_larger_value_is_better() -> None:
    best = Best().after(0, 1.0).after(10, 1.0).after(20, math.nan)
    assert (best.value, best.step, best.since) == (1.0, 0, 2)
    assert best.after(30, 1.1) == Best(1.1, 30, 0)


def test_the_best_survives_json_also_before_the_first_evaluation() -> None:
    for best in (Best(), Best().after(0, math.nan), Best().after(0, -2.5).after(1, -3.0)):
        restored = Best.restored(json.loads(json.dumps(best.state(), allow_nan=False)))
        assert (restored.value, restored.step) == (best.value, best.step)
        assert restored.since == best.since
