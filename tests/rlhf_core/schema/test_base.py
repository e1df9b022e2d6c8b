"""Configuration is frozen and strict; operational fields stay out of the key."""

from typing import Annotated

import pytest
from pydantic import ValidationError

from rlhf_core.schema.base import OPERATIONAL, Config, added_option, keyed


class Inner(Config):
    rate: float = 0.5
    workers: Annotated[int, OPERATIONAL] = 1


class Outer(Config):
    name: str = "x"
    inner: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(), Inner(rate=1.0, workers=7))
    by_name: dict[str, Inner] = {"a": Inner(workers=3)}
    threads: Annotated[int, OPERATIONAL] = 2


def test_operational_fields_are_left_out_at_every_depth():
    assert keyed(Outer()) == {
        "name": "x",
        "inner": {"rate": 0.5},
        "several": [{"rate": 0.5}, {"rate": 1.0}],
        "by_name": {"a": {"rate": 0.5}},
    }


def test_an_unknown_key_and_a_change_are_refused():
    with pytest.raises(ValidationError, match="Extra inputs"):
        Outer.model_validate({"nane": "y"})
    with pytest.raises(ValidationError, match="frozen"):
        Outer().name = "y"


class Later(Config):
    rate: float = 0.5
    floor: float = added_option(0.0, ge=0)


def test_an_option_that_was_added_later_enters_the_key_and_the_json_only_when_it_is_set():
    assert keyed(Later()) == keyed(Later(floor=0.0)) == {"rate": 0.5}
    assert keyed(Later(floor=2.0)) == {"rate": 0.5, "floor": 2.0}
    assert Later().model_dump_json() == '{"rate":0.5}'
    assert Later.model_validate_json(Later(floor=2.0).model_dump_json()).floor == 2.0
    with pytest.raises(ValidationError, match="floor"):
        Later(floor=-1.0)


class Newer(Outer):
    """The same configuration after two options were added."""

    watch: Inner | None = added_option(None)
    bounds: tuple[float, ...] = added_option(())


def test_an_option_that_is_not_used_is_neither_written_nor_keyed():
    assert keyed(Newer()) == keyed(Outer())
    assert Newer().model_dump_json() == Outer().model_dump_json()
    used = Newer(watch=Inner(workers=9), bounds=(0.5,))
    assert keyed(used) == keyed(Outer()) | {"watch": {"rate": 0.5}, "bounds": [0.5]}
    assert Newer.model_validate_json(used.model_dump_json()) == used
    assert Newer.model_validate_json(Newer().model_dump_json()) == Newer()
