"""Errors are the standard exceptions that they replace, and read key = value: rule; remedy."""

import pytest

from rlhf_core import errors
from rlhf_core.errors import nearest


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.ArtifactError, RuntimeError),
        (errors.SamplingError, RuntimeError),
        (errors.TrainingError, RuntimeError),
        (errors.RewardError, RuntimeError),
    ],
)
def test_an_error_can_be_caught_as_ours_or_as_the_standard_one(kind, standard):
    assert issubclass(kind, errors.RlhfError)
    assert issubclass(kind, standard)


def test_a_message_names_key_value_rule_and_remedy():
    message = errors.explain("ppo.kl_coef", -1, "must be >= 0", "use 0 to switch the penalty off")
    assert message == "ppo.kl_coef = -1: must be >= 0; use 0 to switch the penalty off"


def test_the_nearest_name_is_the_remedy_and_without_one_all_of_them():
    assert nearest("finl_number", ["finished", "final_number"]) == "did you mean final_number?"
    assert nearest("zzz", ["b", "a"]) == "choose from a, b"
    assert nearest("zzz", []) == "check the spelling"


def test_no_side_of_a_comparison_is_guessed_for_another_name():
    names = ["prompt", "response1", "response2"]
    for name in ("response", "response_0", "response3"):
        assert nearest(name, names) == "choose from prompt, response1, response2"
    assert [nearest(f"response_{side}", names)[-2] for side in "abAB12"] == ["1", "2", "1", "2", "1", "2"]
    assert nearest("respnse2", names) == "did you mean response2?"
