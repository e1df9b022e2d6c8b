from __future__ import annotations

import pytest

from rlhf_core.errors import TrainingError
from rlhf_core.training.trainer import check_updated, count_skipped


def test_updates_that_are_skipped_in_a_row_end_the_stage_and_a_good_one_forgives() -> None:
    count = 0
    for step in range(4):
        count = count_skipped(count, {"skipped": 1.0}, label="sft", step=step)
    assert count == 4
    assert count_skipped(count, {"skipped": 0.0}, label="sft", step=4) == 0
    with pytest.raises(TrainingError, match=r"sft\.step = 4: 5 updates in a row"):
        count_skipped(count, {"skipped": 1.0}, label="sft", step=4)


def test_a_step_that_updated_neither_or_only_one_of_its_models_ends_the_stage() -> None:
    good, bad = {"policy/skipped": 0.0, "value/skipped": 0.0}, {"policy/skipped": 1.0, "value/skipped": 0.0}
    check_updated([good, bad], label="ppo", step=3)
    check_updated([{"value/skipped": 0.0}], label="ppo", step=3)  # the policy waits for the warm-up
    with pytest.raises(TrainingError, match=r"ppo\.step = 3: every update of the policy had a non-finite"):
        check_updated([bad, bad], label="ppo", step=3)
