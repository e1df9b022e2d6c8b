"""Corrected faults: exactly the configurations that may have had them get other keys, and the plan gives the reason."""

import pytest

from rlhf_core.stage.corrections import CORRECTIONS, corrections
from rlhf_core.stage.decision import differences


@pytest.mark.parametrize(
    ("stage", "config", "names"),
    [
        ("score", {"terms": {"a": {"type": "judge"}}}, ["judges"]),
        ("ppo", {"rewards": {"terms": {"a": {"type": "function", "function": "my/file.py:f"}}}}, ["functions"]),
        ("ppo", {"rewards": [{"function": "rlhf_contrib.sandbox.code:code_reward"}]}, ["functions", "code_tests"]),
        ("ppo", {"rewards": [{"function": "rlhf_core.rewards.verifiable:final_number"}, {"type": "tools"}]}, None),
        ("ppo", {"rewards": [{"function": "rlhf_core.rewards.verifiable:think_format"}]}, []),
        (
            "evaluate_suite",
            {"type": "pass_at_k", "function": "rlhf_core.rewards.verifiable:boxed_match"},
            ["functions"],
        ),
        ("ppo", {"rewards": [{"function": "rlhf_core.data.worlds.arithmetic:exact_match"}]}, []),
        ("evaluate_suite", {"type": "judge"}, ["judges"]),
        ("collect_preferences", {"annotator": {"type": "judge"}}, ["judges"]),
        ("generate", {"agent": {"type": "tools"}}, ["tool_calls"]),
        ("synthesize", {"server": {"url": "http://h/v1"}}, ["filtered_replies"]),
        ("synthesize", {"server": None}, []),
        ("score", {"terms": {"a": {"type": "model"}}}, []),
        ("sft", {"type": "judge", "function": "a:b"}, []),
    ],
)
def test_only_configurations_that_may_have_had_a_fault_are_touched(stage, config, names):
    assert corrections(stage, config) == (["functions", "tool_calls"] if names is None else names)


def test_a_plan_gives_the_reason():
    old = {
        "stage": "score",
        "version": 4,
        "seed": 1,
        "schema": 1,
        "config": {},
        "inputs": {},
        "engines": {},
        "callables": {},
    }
    new = old | {"corrections": ["judges"]}
    assert list(differences("score", old, new, {}, {})) == [f"corrected since, {CORRECTIONS['judges'].about}"]
    assert list(differences("score", new, new, {}, {})) == []
