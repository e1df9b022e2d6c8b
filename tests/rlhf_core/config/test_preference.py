"""The losses on preferences by name, with their own options and no other's."""

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.policy import PreferenceLoss
from rlhf_core.schema.base import CustomFunction

LOSS: TypeAdapter[Any] = TypeAdapter(PreferenceLoss)
KINDS = [kind for kind in get_args(get_args(PreferenceLoss)[0]) if not issubclass(kind, CustomFunction)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_there_by_its_bare_name(kind):
    assert LOSS.validate_python(kind().type) == LOSS.validate_python({"type": kind().type}) == kind()


def test_names_are_told_apart_and_two_have_no_reference():
    assert len({kind().type for kind in KINDS}) == len(KINDS)
    assert {kind().type for kind in KINDS if not kind().uses_reference} == {"simpo", "orpo"}
    assert all(("beta" in kind.model_fields) != (kind().type == "orpo") for kind in KINDS)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("dop", "'dpo', 'cdpo'"),
        ({"type": "dpo", "label_smoothing": 0.1}, "Extra inputs"),
        ({"type": "cdpo", "label_smoothing": 0.0}, "greater than 0"),
        ({"type": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"type": "ipo", "beta": 0}, "greater than 0"),
    ],
)
def test_options_that_a_loss_does_not_have_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        LOSS.validate_python(table)
