"""Values refuse what does not fit, and seeds depend on their parts alone."""

import json

import pytest
from pydantic import ValidationError

from rlhf_core.types import (
    Completion,
    PolicyRef,
    PolicySample,
    PreparedDataRef,
    TokenSample,
    ValueSample,
    derive_seed,
    encodable,
)


def test_a_completion_needs_one_logprob_per_token():
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        Completion((1, 2), (-0.5,), "text", "stop", policy_version=0, seed=0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TokenSample, ((1, 2), (0,))),
        (PolicySample, ((1, 2), (0, 1), (0.0, -1.0), (0.0, -1.0), (0.0, -1.0), (0.0,))),
        (ValueSample, ((1, 2), (0, 1), (0.0,), (0.0, 1.0))),
    ],
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
