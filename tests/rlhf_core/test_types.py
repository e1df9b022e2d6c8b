"""Values refuse what does not fit, and seeds depend on their parts alone."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from pydantic import ValidationError

from rlhf_core.types import (
    Column,
    Completion,
    PolicyRef,
    PreparedDataRef,
    StepSample,
    TokenSample,
    derive_seed,
    encodable,
)


def test_a_completion_needs_one_logprob_per_token():
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        Completion((1, 2), (-0.5,), "text", "stop", policy_version=0, seed=0)


NUMBERS = {
    "i": some.integers(-(2**31), 2**31 - 1),
    "B": some.integers(0, 255),
    "f": some.floats(width=32, allow_nan=False),
    "d": some.floats(allow_nan=False),
}


@given(some.data(), some.sampled_from(sorted(NUMBERS)))
def test_a_column_is_the_tuple_of_its_numbers(draw, kind):
    one, other = (tuple(draw.draw(some.lists(NUMBERS[kind], max_size=6))) for _ in range(2))
    column = Column(kind, one)
    second = Column(kind, np.array(other, dtype=kind))
    assert len(column) == len(one) and [*column[1:]] == [*one[1:]]
    assert (column == one, hash(column), repr(column), list(column), len(column)) == (
        True,
        hash(one),
        repr(one),
        list(one),
        len(one),
    )
    assert (column == second, column < second, column == 7) == (one == other, one < other, False)
    assert [column + other, one + second, Column(kind, second) + one] == [one + other, one + other, other + one]
    part = draw.draw(some.slices(len(one)))
    assert (column[part], column[::-1], tuple(reversed(column))) == (one[part], one[::-1], one[::-1])
    asked = [*one, 0.0, 1.0, 1.5, 300, "1"]
    assert [(column.count(each), each in column) for each in asked] == [
        (one.count(each), each in one) for each in asked
    ]
    assert list(map(column.index, one)) == list(map(one.index, one))
    again = pickle.loads(pickle.dumps(column))
    assert (again, np.asarray(column.data).tolist(), np.asarray(again.data).dtype) == (one, list(one), np.dtype(kind))
    assert not np.asarray(column.data).flags.writeable


@pytest.mark.parametrize(
    ("kind", "values", "error"), [("i", (2**31,), OverflowError), ("B", (-1,), OverflowError), ("i", (0.5,), TypeError)]
)
def test_a_column_takes_no_number_that_it_cannot_hold(kind, values, error):
    with pytest.raises(error):
        Column(kind, values)


def test_a_column_keeps_what_it_was_made_of():
    numbers = np.arange(3, dtype=np.int32)
    column = Column("i", numbers)
    numbers[0] = 7
    assert column == (0, 1, 2)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(TokenSample, ((1, 2), (0,))), (StepSample, ((1, 2), (0, 1), (0.5,)))],
)
def test_per_token_fields_have_equal_lengths(kind, fields):
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*align them first"):
        kind(*fields)


def test_a_handle_is_frozen_refuses_unknown_fields_and_survives_json():
    ref = PreparedDataRef(uri="store://ab", digest="ab", base=PolicyRef(uri="store://ab/base", digest="cd"))
    assert PreparedDataRef.model_validate_json(ref.model_dump_json()) == ref
    with pytest.raises(ValidationError, match="frozen"):
        ref.digest = "ef"
    with pytest.raises(ValidationError, match="Extra inputs"):
        PolicyRef.model_validate({"uri": "u", "digest": "d", "path": "p"})


def test_a_seed_is_the_same_for_the_same_parts_and_another_for_any_other():
    # golden: a change here changes every sample of every run
    assert derive_seed(17, "ppo", 3, "prompt-1", 0) == 1593641948
    seeds = {
        derive_seed(17, "ppo", step, f"p{prompt}", i) for step in range(4) for prompt in range(4) for i in range(4)
    }
    assert len(seeds) == 64
    assert derive_seed(1, "12") != derive_seed(11, "2")
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_halves_of_surrogate_pairs_become_question_marks_and_the_rest_stays():
    assert encodable(json.loads('"a\\ud83d\\u00e9"')) == "a?\u00e9"
    assert encodable("\U0001f600 whole") == "\U0001f600 whole"
    assert encodable("") == ""
