"""Tests of every form that people write: a right program passes each, and none that cheats passes any."""

import subprocess
import sys

import pytest

from rlhf_contrib.sandbox.code import read_tests
from rlhf_contrib.sandbox.local import Assertions, Execution, Limits, run_tests
from rlhf_core.errors import DataError

RIGHT = "def f(x):\n    if x < 0: raise ValueError(x)\n    return x * x\ndef g(x): return [x, x * x]"
FORMS = {
    "HumanEval": "METADATA = {}\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\ncheck(f)",
    "HumanEval, with a tolerance": "def check(candidate):\n    assert abs(candidate(1.5) - 2.25) < 1e-6\ncheck(f)",
    "HumanEval+": """
def assertion(out, exp, atol):
    exact = out == exp
    if not exact and atol: assert abs(out - exp) < atol
    else: assert exact
def check(candidate):
    for given, expected in zip([[2], [3]], [4, 9]):
        assertion(candidate(*given), expected, 0)
check(f)""",
    "a loop": "for x, y in [(2, 4), (3, 9)]:\n    assert f(x) == y, x",
    "a loop in a function": "def test_f():\n    cases = {2: 4, 3: 9}\n    for x in cases:\n        assert f(x) == cases[x]\ntest_f()",
    "a loop with a tolerance": "for x, y in [(2, 4), (3, 9)]:\n    assert -1e-6 < f(x) - y < 1e-6 and abs(f(x) - y) < 1e-6",
    "all": "assert all(f(x) == x ** 2 for x in range(4))",
    "or": "assert f(2) == 5 or f(2) == 4",
    "a chain": "y = 4\nassert 3 < f(2) == y",
    "not": "assert not f(2) == 5\nassert not f(0)\nassert f(2)",
    "a condition": "if f(2) != 4:\n    assert False",
    "two computed values": "assert f(2) == sum([1, 3])\nassert f(3) in [7 + 2]",
    "in": "assert 4 in g(2)\ny = 4\nassert y in g(2)\nassert 5 not in g(2)",
    "nothing is true": "y = 5\nassert f(2) != y\nassert f(2) == y - 1",
    "an error": "try:\n    f(-1)\n    assert False\nexcept ValueError: pass\nassert f(2) == 4",
    "an error that is looked at": "try:\n    f(-1)\nexcept Exception as error:\n    assert str(error) == str(-1)\nassert f(2) == 4",
    "with": "import contextlib\nwith contextlib.suppress(KeyError):\n    assert f(2) == 4",
    "an error, with suppress": "import contextlib\nwith contextlib.suppress(ValueError):\n    f(-1)\n    assert False",
    "sets": "assert set(g(2)) == set([2, 4])\nassert sorted(g(2)) == sorted([4, 2])",
    "main": "def test(): assert f(2) == 4\nif __name__ == '__main__': test()",
    "unittest": """
import unittest
class Tests(unittest.TestCase):
    def test_f(self):
        self.assertEqual(f(2), 4)
        self.assertAlmostEqual(f(1.5), 2.25, places=3)
        for x in (2, 3): self.assertAlmostEqual(f(x), x * x, delta=0.1)
        with self.assertRaises(ValueError): f(-1)
unittest.main()""",
    "unittest, run by hand": """
import unittest
class Tests(unittest.TestCase):
    def test_f(self):
        with self.subTest(2): self.assertTrue(f(2) == 4)
        self.assertIn(f(3), [9, 10])
unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Tests))""",
}
ANY = """
class Any({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([Any()])
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __hash__(self): return 4
f = g = lambda x: Any()
"""
CHEATS = {
    **{f"equals everything, a {base}": ANY.format(base=base) for base in ("object", "int", "str", "list")},
    "replaces builtins": (
        "import builtins\nbuiltins.all = builtins.any = builtins.bool = builtins.isinstance = lambda *_: True\n"
        "builtins.zip = builtins.range = lambda *_: []\nbuiltins.abs = lambda _: 0\nbuiltins.AssertionError = ValueError\n"
        "f = g = lambda x: [] if x == 0 else 7"
    ),
    "has names of builtins": (
        "all = any = bool = isinstance = lambda *_: True\nzip = range = enumerate = lambda *_: []\n"
        "abs = set = sorted = sum = lambda *_: 0\nAssertionError = ValueError = Exception\n"
        "f = g = lambda x: 7"
    ),
    "exits": "import sys\ndef f(x): sys.exit(0)\ng = f",
    "exits at once": "import os\ndef f(x): os._exit(0)\ng = f",
    "has last words": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 7\ng = f",
    "replaces unittest": (
        "import unittest\n"
        "for name in dir(unittest.TestCase):\n"
        "    if name.startswith('assert') and name != 'assertRaises': setattr(unittest.TestCase, name, lambda *_, **__: None)\n"
        "class Passed: wasSuccessful = lambda self: True\n"
        "class Main:\n    result = Passed()\n    def __init__(self, *_, **__): pass\n"
        "unittest.main = Main\nunittest.TextTestRunner = lambda: type('R', (), {'run': lambda *_: Passed()})()\n"
        "def f(x): return 7\ng = f"
    ),
    "returns a constant": "f = g = lambda x: True",
}


def plainly(program: str, stdin: str, *, limits: Limits) -> Execution:
    """Run a program of ours without a sandbox, which takes longer."""
    command = [sys.executable, "-I", "-S", "-c", program]
    ran = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    return Execution("error" if ran.returncode else "finished", ran.returncode, ran.stdout, ran.stderr)


def passes(test: str, program: str) -> bool:
    return run_tests(program, [Assertions(test)], limits=Limits(), run=plainly).outcome == "passed"


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_and_no_cheat_does(form):
    assert passes(FORMS[form], RIGHT)
    assert [name for name, cheat in CHEATS.items() if passes(FORMS[form], cheat)] == []
    assert read_tests(FORMS[form])  # not refused as a test that checks nothing


def test_a_program_may_be_asked_for_a_function_that_is_named_as_a_builtin():
    program = "list = [2, 3]\ndef sum(a, b): return a + b\ndef f(): return list"
    assert passes("for a, b in [(1, 3), (2, 4)]:\n    assert sum(a, 2) == b", program)
    assert passes("assert all(one in f() for one in list((2, 3)))", program)


@pytest.mark.parametrize("test", ["try:\n    f(-1)\n    assert False\nexcept: pass", "if True:\n    assert False"])
def test_one_that_checks_nothing_is_refused(test):
    with pytest.raises(DataError, match="checks nothing"):
        read_tests(test)
