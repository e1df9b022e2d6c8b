"""Programs against tests, in the real sandbox."""

import json

import pytest

from rlhf_contrib.sandbox.code import code_reward, read_program, read_tests
from rlhf_contrib.sandbox.local import find_isolation
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.batches import NoReward, screened
from rlhf_core.rewards.protocols import read_result
from tests.rlhf_contrib.sandbox.test_rewriting import COMPUTED, SORT_CHEATS, SORTS
from tests.rlhf_core.rewards.answers import answer


@pytest.fixture(autouse=True)
def _isolated() -> None:
    try:
        find_isolation(False)
    except ConfigError as error:
        pytest.skip(str(error))


def test_programs_are_judged_by_their_output_and_by_assertions():
    doubles = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]})
    answers = ["```python\nprint(int(input()) * 2)\n```", "print(4)", "def f(x): return x + 1", "x"]
    labels = [doubles, doubles, "assert f(1) == 2", None]
    assert code_reward([""] * 4, answers, labels) == [1.0, 0.0, 1.0, None]
    assert code_reward([""], answers[1:2], [doubles], score="share") == [0.5]


def test_the_last_fence_is_the_program():
    assert read_program("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\n") == "x = 2\n"
    assert read_program("x = 3") == "x = 3"


def test_a_label_without_tests_is_refused():
    for label in ("{}", '{"inputs": ["1"], "outputs": []}', "[]", "3"):
        with pytest.raises(DataError, match="holds no tests"):
            read_tests(label)


@pytest.mark.parametrize(
    ("label", "rule"),
    [
        ("{'inputs': ['2'], 'outputs': ['4']}", "checks nothing"),
        ("print(f(1))", "checks nothing"),
        ("# assert f(1) == 2", "checks nothing"),
        ("assert True", "checks nothing"),
        ("assert f", "checks nothing"),
        ("assert f(1) == 2 or True", "checks nothing"),
        ("try:\n    assert f(1) == 2\nexcept Exception:\n    pass", "checks nothing"),
        ('assert (f(1) == 2, "wrong")', "checks nothing"),
        ("def check(f):\n    assert f(1) == 2", "checks nothing"),
        ('["assert f(1) == 2", ""]', "checks nothing"),
        ("assert f(1) = 2", "is no Python"),
        ('["assert f(1) == "]', "is no Python"),
        ("assert f(" + "(" * 5000 + ")" * 5000 + ")", "is no Python"),
        ("the answer is 4", "is no Python"),
        ("from solution import f\nassert f(1) == 2", "imports solution, and the sandbox"),
        ("def check(f):\n    import numpy as np\n    assert np.all(f(1))\ncheck(f)", "imports numpy, and the sandbox"),
        ('{"tests": ["assert f(1) == 2", 3]}', "holds no tests"),
        ('{"inputs": [[2]], "outputs": ["4"]}', "has list for text"),
        ('{"inputs": ["2"], "outputs": [true]}', "has bool for text"),
        ('{"inputs": ["2"], "outputs": [" "]}', "expects no output"),
        ('{"fn_name": "f", "inputs": ["2"], "outputs": ["4"]}', "calls 'f' by its name"),
    ],
)
def test_a_test_that_is_none_is_refused_and_pays_nobody(label, rule):
    with pytest.raises(DataError, match=rule):
        code_reward([""], ["pass"], [label])


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("assert f(1) == 2\nassert (\n    f(2)\n    == 3\n)", 2),
        ("    assert f(1) == 2\n    assert f(2) == 3", 2),
        ("import math\nassert f(1) == math.trunc(2.5)\nassert f(2) == 3", 1),
        ("def check(f):\n    assert f(1) == 2\n\ncheck(f)", 1),
        ("if f(1) != 2:\n    raise ValueError", 1),
        ("import unittest\nunittest.TestCase().assertEqual(f(1), 2)", 1),
        ('["assert f(1) == 2", "assert f(2) == 3"]', 2),
    ],
)
def test_tests_in_python_may_be_written_as_people_write_them(label, count):
    assert len(read_tests(label)) == count
    assert code_reward([""] * 2, ["f = lambda x: x + 1", "f = lambda x: x"], [label] * 2) == [1.0, 0.0]


@pytest.mark.slow
def test_programs_that_sort_are_paid_for_a_computed_test_and_cheats_are_not():
    slow = "import time\ndef f(a):\n    end = time.process_time() + 1\n    while time.process_time() < end: pass\n    return sorted(a)"
    programs = [*SORTS.values(), slow, *SORT_CHEATS.values()]
    rewards = [1.0] * (len(SORTS) + 1) + [0.0] * len(SORT_CHEATS)
    label = "\n".join((COMPUTED["a reference"], COMPUTED["isclose"]))
    assert code_reward([""] * len(programs), programs, [label] * len(programs)) == rewards


def test_a_program_that_waits_has_no_reward_and_its_answer_is_invalid():
    waits, wrong = "```python\nimport time\ntime.sleep(99)\n```", "```python\ndef f(x): return 0\n```"
    label = "assert f(1) == 2"
    found = code_reward(["q"] * 2, [waits, wrong], [label] * 2, timeout_s=0.2)
    assert isinstance(found[0], NoReward) and found[1] == 0.0
    outcome = read_result(found, 2, also={})
    assert outcome.values == (None, 0.0) and "longer than 1 s" in outcome.failures[0]
    assert screened("code", outcome, [answer(waits), answer(wrong)], on_failure="fail") == outcome  # it ends no run


def test_a_wait_after_a_wrong_answer_does_not_pay():
    waits = "```python\nimport time\ndef f(x):\n  if x == 2: time.sleep(99)\n  return 0\n```"
    label = "assert f(1) == 1\nassert f(2) == 2"
    assert code_reward(["q"], [waits], [label], timeout_s=0.2) == [0.0]
    (share,) = code_reward(["q"], [waits], [label], timeout_s=0.2, score="share")
    assert isinstance(share, NoReward)
