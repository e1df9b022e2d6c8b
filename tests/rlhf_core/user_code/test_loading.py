from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.user_code.modules import load_callable


def test_a_function_is_loaded_from_a_module() -> None:
    assert load_callable("function", "rlhf_core.rewards.verifiable:exact_match").__name__ == "exact_match"


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(texts):\n    return [len(text) for text in texts]\n")
    assert load_callable("function", f"{file}:length")(["a", "bc"]) == [1, 2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rlhf_core.rewards.verifiable:exact_macth", "has no exact_macth; did you mean exact_match"),
        ("rlhf_core.rewards.verifable:exact_match", "no module rlhf_core.rewards.verifable; did you mean verifiable"),
        ("no_such_package.rewards:f", "there is no module no_such_package"),
        ("rlhf_core.rewards.batches:LARGEST_REWARD", "LARGEST_REWARD is a float; name a function or a class"),
        ("rlhf_core.rewards.verifiable", "must read module:name"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable("function", spec)


def test_a_missing_file_is_refused_with_the_nearest_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    with pytest.raises(ConfigError, match=r"no file .*reward\.py .*did you mean rewards\.py"):
        load_callable("function", f"{tmp_path}/reward.py:f")


def test_a_file_that_does_not_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match="no_such_package_at_all"):
        load_callable("function", f"{tmp_path}/broken.py:f")


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_an_agent.py").write_text("SIZE = 3\n")
    (tmp_path / "agent.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour_of_an_agent import SIZE\n"
        "@dataclass\nclass World:\n    size: int = SIZE\n"
    )
    assert load_callable("agent.environment", f"{tmp_path}/agent.py:World")().size == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("World = 3\n", "World is a int"),
        ("import no_such_thing\n", "importing it fails"),
        ("class Word: ...", "did you mean Word"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"^agent\.environment.*{reason}"):
        load_callable("agent.environment", f"{tmp_path}/agent.py:World")
