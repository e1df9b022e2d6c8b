"""Loading reward functions by name, and the checks on what they return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.functions import as_floats, checked, load_reward, score_functions
from rlhf_core.types import Completion, Generation, Message, Prompt


def generation(prompt_id: str, text: str) -> Generation:
    prompt = Prompt(prompt_id, (Message("user", "2+2?"),), "4", "test")
    return Generation(prompt, (1, 2), Completion((3,), (-0.5,), text, "stop", 0, 7))


GENERATIONS = [generation("a", "4"), generation("b", "5")]


def test_a_function_is_loaded_from_a_module() -> None:
    assert load_reward("rlhf_core.rewards.verifiable:exact_match")(GENERATIONS) == [1.0, 0.0]


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(generations):\n    return [len(g.completion.text) for g in generations]\n")
    assert load_reward(f"{file}:length")(GENERATIONS) == [1, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rlhf_core.rewards.verifiable:exact_macth", "has no exact_macth; did you mean exact_match"),
        ("rlhf_core.rewards.verifable:exact_match", "no module rlhf_core.rewards.verifable; did you mean verifiable"),
        ("no_such_package.rewards:f", "there is no module no_such_package"),
        ("rlhf_core.rewards.functions:LARGEST_REWARD", "LARGEST_REWARD is a float; name a function"),
        ("rlhf_core.rewards.verifiable", "must read module:function"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(spec)


def test_a_missing_file_is_refused_with_the_nearest_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    with pytest.raises(ConfigError, match=r"no file .*reward\.py .*did you mean rewards\.py"):
        load_reward(f"{tmp_path}/reward.py:f")


def test_a_file_that_does_not_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match="no_such_package_at_all"):
        load_reward(f"{tmp_path}/broken.py:f")


def test_scores_are_kept_by_name() -> None:
    def constant(generations: Sequence[Generation]) -> list[float]:
        return [0.5 for _ in generations]

    assert score_functions({"x": constant}, GENERATIONS) == {"x": [0.5, 0.5]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e6])
def test_a_value_that_is_not_a_reward_names_the_reward_and_the_prompt(value: float) -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality\[prompt b\]"):
        checked("quality", [0.0, value], GENERATIONS)


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(RewardError, match=r"rewards\.quality = 1: values for 2 generations"):
        checked("quality", [0.0], GENERATIONS)


def test_booleans_become_numbers() -> None:
    assert as_floats(lambda generations: [True, False], GENERATIONS) == [1.0, 0.0]
