"""Labels that are missing, packages that are missing."""

import sys

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.library.labels import against_labels
from rlhf_core.rewards.library.math import math_reward
from rlhf_core.rewards.library.reasoning_gym import reasoning_gym_reward
from rlhf_core.rewards.library.structure import json_schema


def test_only_answers_with_a_label_are_judged():
    values = against_labels(["a", "b", "c"], ["a", "  ", None], lambda text, label: float(text == label))
    assert values == [1.0, None, None]


@pytest.mark.parametrize(
    ("reward", "module", "package"),
    [
        (math_reward, "math_verify", "math-verify"),
        (reasoning_gym_reward, "reasoning_gym", "reasoning-gym"),
        (json_schema, "jsonschema", "jsonschema"),
    ],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, reward, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        reward(["?"], ["1"], ["1"])
