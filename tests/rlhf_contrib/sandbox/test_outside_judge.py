"""What becomes of a test: one part is evaluated beside the program, the other one judged here."""

import contextlib
import io
import sys

import pytest

from rlhf_contrib.sandbox.outside_judge import driver, judged_outside
from rlhf_core.errors import DataError

PROGRAM = """
from collections import Counter, OrderedDict, namedtuple
from decimal import Decimal
from fractions import Fraction
import math
Point = namedtuple("Point", "x y")
def same(value): return value
"""


def verdict(test: str, program: str = PROGRAM) -> str:
    """Run program and test in this process, as the sandbox does in its own."""
    outside = judged_outside(test, "word")
    written = io.StringIO()
    with contextlib.redirect_stdout(written), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(outside.code))
        exec(driver(program).replace("sys.__stdout__", "sys.stdout"), {"__name__": "__main__"})
    assert sys.stdout is not written
    return outside.verdict(written.getvalue().rpartition("\nword")[2])


RIGHT = [
    "assert same([1, 2.5, 'a\\n', None, True, b'x']) == [1, 2.5, 'a\\n', None, True, b'x']",
    "assert same((1, [2])) == (1, [2])",
    "assert same({1: {2, 3}, 'k': frozenset({4})}) == {1: {2, 3}, 'k': {4}}",
    "assert same(10**400) == 1" + "0" * 400,
    "assert same(float('inf')) > 1e308",
    "assert same(2 + 3j) == 2 + 3j",
    "assert same(Fraction(1, 2)) == 0.5",
    "assert same(Decimal('0.5')) == 0.5",
    "assert Counter('aab') == {'a': 2, 'b': 1}",
    "assert OrderedDict(a=1) == {'a': 1}",
    "assert Point(1, 2) == (1, 2)",
    "assert same(None) is None",
    "assert same(True) is True",
    "assert 4 < same(5)",
    "assert same(3) in [1, 3]",
    "assert not same([])",
    "assert same([0])",
    "assert same(object())",
    "assert abs(same(1.5) - 1.5) < 1e-9",
    "assert abs(1.5 - same(1.5)) <= 0",
    "assert round(same(1.2345), 2) == 1.23",
    "assert math.isclose(same(1.0), 1.0 + 1e-12, rel_tol=1e-9)",
    "x = same(3)\nassert x == 3\ny = x + 1\nassert y == 4, 'a message'",
    "for n in (1, 2):\n    assert same(n) == n",
    "assert same(1) == same(1)",
    "from __future__ import annotations\nassert same(1) == 1",
    "assert 1 in same(range(3))",
    "assert 2 in {1: 2}.values()",
    "assert {1: 2}.keys() == {1}",
    "assert same(range(2)) == range(2) and 3 < same(5) < 6",
    "assert not same(4) != 4",
    "assert math.isclose(1.0, same(1.0))",
    "def isclose(a, b, tol): return abs(a - b) < tol\nassert isclose(same(1.0), 1.5, tol=1)",
    "import collections\nassert not collections.deque()",
    "class Empty:\n    def __len__(self): return 0\nassert not Empty()",
]
WRONG = [
    ("assert same([1]) == [2]", "AssertionError: [1]"),
    ("assert same((1,)) == [1]", "AssertionError: (1,)"),
    ("assert same('4') == 4", "AssertionError: '4'"),
    ("assert same(object()) == 1", "AssertionError: <object>"),
    ("assert same('a') < 1", "AssertionError: 'a': TypeError("),
    ("assert same(1) is True", "AssertionError: 1"),
    ("assert same(float('nan')) == 1.0", "AssertionError: nan"),
    ("assert abs(same(1.6) - 1.5) < 1e-9", "AssertionError: 1.6"),
    ("assert same(1) == 1\nassert same(2) == 3", "AssertionError: 2"),
    ("assert same(1) == 1 and same(2) == 3", "AssertionError: 2"),
    ("assert 3 < same(7) < 6", "AssertionError: 7"),
    ("assert not same(4) == 4", "AssertionError: 4"),
    ("assert math.isclose(1.5, same(1.0))", "AssertionError: 1.0"),
    ("class Empty:\n    def __len__(self): return 0\nassert Empty()", "AssertionError: False"),
    ("assert same(10**5000) == 1", "AssertionError: a int"),
]


@pytest.mark.parametrize("test", RIGHT)
def test_what_python_says_is_right_is_right(test):
    names: dict[str, object] = {}
    exec(PROGRAM, names)
    exec(test, names)
    assert verdict(test) == ""


@pytest.mark.parametrize(("test", "said"), WRONG)
def test_what_python_says_is_wrong_is_wrong(test, said):
    with pytest.raises((AssertionError, TypeError)):
        exec(PROGRAM + test, {})
    assert verdict(test).startswith(said)


def test_the_program_never_sees_what_is_expected():
    assert "31337" not in judged_outside("assert f(1) == 31337\nassert abs(f(2) - 31337.0) < 0.5", "word").code


@pytest.mark.parametrize(
    "written",
    ["", "[", "[1]", '["int"]', '[["int", "4"], ["int", "4"]]', "[" * 100_000, '[["dict", [[["list", []], 1]]]]'],
)
def test_what_cannot_be_read_or_counted_is_wrong(written):
    assert judged_outside("assert f(1) == 4", "word").verdict(written) != ""


@pytest.mark.parametrize("test", ["assert f(1) ==", "f = 1", "'nothing'", "42", "", "assert\x00"])
def test_a_test_that_is_none_is_refused(test):
    with pytest.raises(DataError, match=r"^label = .*; (fix the test|assert something of the program)$"):
        judged_outside(test, "word")
