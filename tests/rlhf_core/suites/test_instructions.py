"""Strict and loose accuracy of prompts and of instructions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_core.errors import DataError
from rlhf_core.suites.results import instruction_rows, means
from rlhf_core.types import Generation
from tests.support.workshop import generation

NO_COMMAS, SHORT, QUESTION = {"kind": "no_commas"}, {"kind": "at_most_words", "count": 3}, {"kind": "question"}


def asked(prompt: str, text: str, instructions: object) -> Generation:
    one = generation(prompt, text)
    return replace(one, prompt=replace(one.prompt, label=json.dumps(instructions)))


def test_the_four_accuracies_count_as_ifeval_does() -> None:
    rows = instruction_rows(
        [
            asked("p1", "Yes, but why?", [NO_COMMAS, SHORT, QUESTION]),  # 2 of 3
            asked("p2", "Sure, here:\nRain falls", {"instructions": [NO_COMMAS]}),  # only without its first line
        ]
    )
    found = {name: value["mean"] for name, value in means(rows, shares=()).items()}
    # instructions: strict 2 of 4, loose 3 of 4; prompts: strict 0 of 2, loose 1 of 2
    assert found == {
        "prompt_level_strict_acc": 0.0,
        "inst_level_strict_acc": 0.5,
        "prompt_level_loose_acc": 0.5,
        "inst_level_loose_acc": 0.75,
    }


@pytest.mark.parametrize("label", ["rain", [], [{"kind": "sing"}], ["no_commas"], {"topic": []}])
def test_a_label_that_is_no_instructions_is_refused_with_its_prompt(label: object) -> None:
    with pytest.raises(DataError, match=r"evaluate\.suites\.prompts\[p1\]\.label"):
        instruction_rows([asked("p1", "Rain", label)])
