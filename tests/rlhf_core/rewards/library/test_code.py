"""Programs against tests, in the real sandbox."""

from __future__ import annotations

import json

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.library.code import code_reward, read_program, read_tests
from rlhf_core.rewards.sandbox import find_isolation


@pytest.fixture(autouse=True)
def _isolated() -> None:
    try:
        find_isolation(False)
    except ConfigError as error:
        pytest.skip(str(error))


def test_programs_are_judged_by_their_output_and_by_assertions() -> None:
    doubles = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]})
    answers = ["```python\nprint(int(input()) * 2)\n```", "print(4)", "def f(x): return x + 1", "x"]
    labels = [doubles, doubles, "assert f(1) == 2", None]
    assert code_reward([""] * 4, answers, labels) == [1.0, 0.0, 1.0, None]
    assert code_reward([""], answers[1:2], [doubles], score="share") == [0.5]


def test_the_last_fence_is_the_program() -> None:
    assert read_program("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\n") == "x = 2\n"
    assert read_program("x = 3") == "x = 3"


def test_a_label_without_tests_is_refused() -> None:
    for label in ("{}", '{"inputs": ["1"], "outputs": []}', "[]", "3"):
        with pytest.raises(DataError, match="holds no tests"):
            read_tests(label)
