"""The templates that we ship, and the ends that a policy declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.data.chat_templates import SHIPPED, declared_ends, other_opening, shipped_for


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_template_is_found_by_the_tokens_of_the_models_own(name: str) -> None:
    assert shipped_for(SHIPPED[name]) == name
    assert shipped_for("{{ messages }}") == ""


def test_the_first_difference_is_shown_and_no_template_is_offered_twice() -> None:
    rule, remedy = other_opening("<｜Assistant｜> of the model", "<｜Assistant｜><think>\n", "<｜Assistant｜>42")
    assert rule == "asks for an answer with '<think>\\n' where it shows one with '42', so there is no exact loss mask"
    assert remedy.startswith('set prepare_data.chat_template = "deepseek_r1"')
    _, remedy = other_opening(SHIPPED["deepseek_r1"], "ab", "ac")
    assert remedy.startswith("give a template that shows an answer")


def test_a_policy_declares_one_end_or_several(tmp_path: Path) -> None:
    assert declared_ends(tmp_path) == set()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert declared_ends(tmp_path) == {1, 2, 106}
