import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.key import key_payload, payload_key, stage_module
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import PolicyRef
from tests.support import toy_stage
from tests.support.toy_stage import Inner, ToyConfig, stage_key, toy_spec

POLICY = PolicyRef(uri="store://aa", digest="aa11", parents=("p",))
OTHER = PolicyRef(uri="store://bb", digest="bb22")


def test_the_key_of_a_fixed_spec_never_changes():
    # If this fails, every artifact of every user is about to be made again: raise KEY_SCHEMA only on purpose.
    spec = toy_spec(inputs={"policy": POLICY, "reward_models": {"b": OTHER, "a": POLICY}, "data": (OTHER, POLICY)})
    assert key_payload(spec) == {
        "schema": 1,
        "stage": "toy",
        "version": 1,
        "config": {"kl_coef": 0.05, "steps": 3, "inner": {"rate": 0.5}, "names": ["a", "b"]},
        "inputs": {"policy": "aa11", "reward_models": {"b": "bb22", "a": "aa11"}, "data": ["bb22", "aa11"]},
        "seed": 7,
        "engines": {},
        "callables": {},
    }
    assert stage_key(spec) == "f6cc47a7f38bab926f6c8f56517c5951ef861f2b247b06897dfa8b17d84f2110"


@given(st.permutations(["kl_coef", "steps", "names", "inner", "workers"]))
def test_the_order_of_fields_and_inputs_does_not_matter(order):
    values: dict[str, Any] = {"kl_coef": 0.05, "steps": 3, "names": ("a", "b"), "inner": Inner(), "workers": 1}
    inputs = {f"in_{name}": PolicyRef(uri="store://x", digest=name) for name in order}
    ordered = {name: inputs[name] for name in sorted(inputs)}
    config = ToyConfig(**{name: values[name] for name in order})
    assert stage_key(toy_spec(config, inputs=inputs)) == stage_key(toy_spec(ToyConfig(), inputs=ordered))


def test_operational_fields_and_the_label_do_not_enter_the_key():
    key = stage_key(toy_spec())
    assert stage_key(toy_spec(ToyConfig(workers=8, inner=Inner(log_every=1)))) == key
    assert stage_key(toy_spec(label="elsewhere/toy")) == key


@pytest.mark.parametrize(
    "changes",
    [
        {"config": ToyConfig(kl_coef=0.1)},
        {"config": ToyConfig(inner=Inner(rate=0.4))},
        {"config": ToyConfig(names=("b", "a"))},
        {"seed": 8},
        {"version": 2},
        {"name": "other"},
        {"engines": {"trainer": {"dtype": "bfloat16"}}},
        {"inputs": {"policy": POLICY}},
    ],
)
def test_whatever_changes_the_result_changes_the_key(changes):
    assert stage_key(toy_spec(**changes)) != stage_key(toy_spec())


def test_an_input_counts_by_its_content_not_by_its_place_or_its_parents():
    key = stage_key(toy_spec(inputs={"policy": POLICY}))
    moved = PolicyRef(uri="file:///models/x", digest="aa11")
    assert stage_key(toy_spec(inputs={"policy": moved})) == key
    assert stage_key(toy_spec(inputs={"policy": OTHER})) != key
    assert stage_key(toy_spec(inputs={"reference": POLICY})) != key


def test_code_enters_the_key_of_strict_stages_and_on_request(monkeypatch):
    assert "code" not in key_payload(toy_spec())
    asked = key_payload(toy_spec(), strict_code=True)
    assert asked["code"] == sha256_text(canonical_json(module_digests("tests.support.toy_stage")))
    monkeypatch.setattr(toy_stage, "CODE", "strict")
    assert key_payload(toy_spec()) == asked
    assert stage_key(toy_spec()) == payload_key(asked)


def test_a_function_in_the_configuration_is_named_by_its_code_and_not_by_its_path(tmp_path, monkeypatch):
    for name, value in (("one.py", 1), ("two.py", 2)):
        (tmp_path / name).write_text(f"def score(x): return {value}\n")
    one, two = f"{tmp_path}/one.py:score", f"{tmp_path}/two.py:score"

    def key(*specs: str) -> str:
        return stage_key(toy_spec(ToyConfig(names=specs), callables=tuple(dict.fromkeys(specs))))

    before = key(one, two)
    assert key(two, one) != before  # which function is where counts
    monkeypatch.chdir(tmp_path)
    assert key("one.py:score", "./two.py:score") == before
    (tmp_path / "two.py").write_text("# a remark\ndef score(x): return 2\n")
    assert key(one, two) == before
    (tmp_path / "two.py").write_text("def score(x): return 3\n")
    assert key(one, two) != before


def test_refs_are_listed_in_one_order():
    spec = toy_spec(inputs={"z": (OTHER, POLICY), "a": {"y": OTHER, "x": POLICY}, "m": POLICY})
    assert [ref.digest for ref in spec.refs()] == ["aa11", "bb22", "aa11", "bb22", "aa11"]


@pytest.mark.parametrize("value", [None, "store://x", (POLICY, "x"), {"a": 1}])
def test_an_input_that_is_no_handle_is_refused(value):
    with pytest.raises(ConfigError, match=r"inputs\.policy = "):
        stage_key(toy_spec(inputs={"policy": value}))


def test_a_module_without_run_is_no_stage(tmp_path, monkeypatch):
    (tmp_path / "no_stage.py").write_text("VERSION = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"module = 'no_stage': has no function `run`; see docs/add_a_stage.md"):
        stage_module(toy_spec(module="no_stage"))


def test_a_code_policy_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"toy\.code = 'loose': must be 'strict' or 'warn'"):
        toy_spec(code="loose")


def test_a_key_needs_the_source_of_the_stage_and_not_its_import(tmp_path, monkeypatch):
    (tmp_path / "unimportable.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert stage_key(toy_spec(module="unimportable", code="strict")) != stage_key(toy_spec(code="strict"))
