"""Labels that are missing, packages that are missing."""

import sys

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards import verifiable
from rlhf_core.rewards.library.labels import against_labels
from rlhf_core.rewards.library.math import math_reward
from rlhf_core.rewards.library.reasoning_gym import reasoning_gym_reward
from rlhf_core.rewards.library.structure import json_schema
from rlhf_core.rewards.library.text import exact_match
from tests.rlhf_core.rewards.answers import answer


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


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("42", '["42"]', 1.0),
        ("42", "[42]", 1.0),
        ("42", "['42']", 1.0),
        ("42", '"42"', 1.0),
        ("42", "42.0", 1.0),
        ("42.0", "42", 1.0),
        ("\u22125", "-5", 1.0),
        ("\u22125", "5", 0.0),
        ("\uff0d\uff15", "-5", 1.0),
        ("\u0664\u0662", "42", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("1.10", "1.1", 0.0),
        ("\u202a42\u202c", "42", 1.0),
        ("4\u00ad2", "42", 1.0),
        ("[0, 1]", "[0, 1]", 1.0),
        ("[0, 2]", "[0, 1]", 0.0),
        ("42", '["42", "forty-two"]', None),
        ("42", '[["42"]]', None),
        ("42", '{"answer": "42"}', None),
        ("42", "{'answer': '42'}", None),
    ],
)
def test_a_label_is_compared_by_what_it_expects(text, label, reward):
    assert exact_match([""], [text], [label]) == [reward]
    assert verifiable.exact_match([answer(text, label=label)]) == [reward]
    assert verifiable.boxed_match([answer(f"\\boxed{{{text}}}", label=label)]) == (
        [1.0] if text == "1.10" else [reward]
    )


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("The answer is \u22125", "5", 0.0),
        ("The answer is \u22125", "-5", 1.0),
        ("The answer is \u20135", "-5", 1.0),
        ("a walk of 3\u20135 km", "5", 1.0),
        ("#### 1\u202f000", "1000", 1.0),
        ("#### \uff14\uff12", "42", 1.0),
        ("#### \u0663\u066b\u0665", "3.5", 1.0),
        ("#### 42", '["42"]', 1.0),
        ("#### 1000", "1e3", 1.0),
        ("#### 3", "1e3", 0.0),
        ("#### 42", "42.0", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### -$5", "5", 0.0),
        (r"\boxed{-\$5}", "-5", 1.0),
        ("$10-$5", "5", 1.0),
    ],
)
def test_the_final_number_has_the_sign_and_the_digits_of_its_script(text, label, reward):
    assert verifiable.final_number([answer(text, label=label)]) == [reward]
