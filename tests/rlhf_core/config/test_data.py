"""What the data configuration refuses."""

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.data import ArithmeticWorld, DataConfig, Files, Source, SupportWorld, Use

ADAPTER: TypeAdapter[SupportWorld | ArithmeticWorld | Files] = TypeAdapter(DataConfig)
SOURCE = {"name": "a", "path": "a.jsonl", "use": {"prompts": 1.0}}


def test_the_type_chooses_the_class():
    assert ADAPTER.validate_python({"type": "support"}) == SupportWorld()
    assert ADAPTER.validate_python({"type": "arithmetic", "largest": 12}) == ArithmeticWorld(largest=12)
    assert ADAPTER.validate_python({"type": "files", "sources": [SOURCE]}) == Files(
        sources=(Source(name="a", path="a.jsonl", use=Use(prompts=1.0)),)
    )


@pytest.mark.parametrize("use", [{}, {"demonstrations": 0.6, "prompts": 0.5}])
def test_shares_add_to_more_than_nothing_and_at_most_one(use):
    with pytest.raises(ValidationError, match="the shares add to"):
        Use(**use)
    assert Use(demonstrations=0.1, preferences=0.2, prompts=0.3, eval_prompts=0.4).eval_prompts == 0.4


def test_source_names_differ():
    with pytest.raises(ValidationError, match="each source needs its own name"):
        ADAPTER.validate_python({"type": "files", "sources": [SOURCE, SOURCE]})


def test_held_out_rows_are_of_a_table_that_is_trained_on():
    test = SOURCE | {"name": "test", "use": {"eval_steps": 1.0}}
    with pytest.raises(ValidationError, match=r"use\.eval_steps of the source test: no source has steps to train on"):
        ADAPTER.validate_python({"type": "files", "sources": [SOURCE, test]})


def test_a_misspelt_key_is_refused():
    with pytest.raises(ValidationError, match="demonstratons"):
        ADAPTER.validate_python({"type": "support", "demonstratons": 3})
