from __future__ import annotations

import pytest

from pipelines.cli.start_verbs import STARTER
from rlhf_core.user_code.modules import load_callable


def test_the_reward_of_a_new_project_prefers_short_thanks():
    reward = load_callable("function", f"{STARTER / 'reward.py'}:reward")
    answers = ["Thank you.", "Thank you so much.", "No."]
    # 1 - 10/500, 1 - 18/500, 0 - 3/500
    assert reward(["", "", ""], answers, ["", "", ""]) == pytest.approx([0.98, 0.964, -0.006])
