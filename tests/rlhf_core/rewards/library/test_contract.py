"""Every library reward is called as a profile calls it: by its import path, through the adapter, with its arguments."""

import asyncio

import pytest

from rlhf_core.rewards.protocols import adapt
from rlhf_core.user_code.modules import load_callable
from tests.rlhf_core.rewards.answers import answer

ENTRY = '{"question": "?", "answer": "4", "metadata": {"source_dataset": "basic_arithmetic"}}'


@pytest.mark.parametrize(
    ("function", "arguments", "label", "text", "value"),
    [
        ("math:math_reward", {}, "4", "4.0", 1.0),
        ("text:exact_match", {"ignore_case": False}, "Four", "Four.", 1.0),
        ("text:regex_match", {"pattern": "[0-9]"}, "", "4", 1.0),
        ("text:length_target", {"target": 2, "width": 2}, "", "4", 1.0),  # two tokens
        ("text:overlong_penalty", {"limit": 2, "buffer": 2}, "", "4", -1.0),
        ("text:repetition_penalty", {"ngram": 1}, "", "4 4", -0.5),
        ("structure:think_format", {"opened": True}, "", "hm</think>4", 1.0),
        ("structure:json_schema", {}, '{"type": "integer"}', "4", 1.0),
        ("code:code_reward", {"score": "share"}, '{"inputs": ["2"], "outputs": ["4"]}', "print(4)", 1.0),
        pytest.param("reasoning_gym:reasoning_gym_reward", {}, ENTRY, "4", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_library_reward_works_by_its_import_path(function, arguments, label, text, value):
    if function.startswith("math"):
        pytest.importorskip("math_verify")
    if function.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    adapted = adapt(
        load_callable("function", f"rlhf_core.rewards.library.{function}"), protocol="auto", arguments=arguments
    )
    with asyncio.Runner() as runner:
        assert adapted.protocol == "columns"
        given = [[answer(text, label=label, tokens=(5, 2))]]
        assert adapted.outcomes(given, runner)[0].values == (value,)
