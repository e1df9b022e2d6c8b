"""Tests of every form that people write: a right program passes each, and none that cheats passes any."""

import subprocess
import sys

import pytest

from rlhf_contrib.sandbox.local import Assertions, Execution, Limits, checks_nothing, run_tests

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
    **{f"equals everything, a {base}": ANY.format(base=base) for base in ("object", "int", "list")},
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
    assert not checks_nothing(Assertions(FORMS[form]), limits=Limits(), run=plainly)


def test_a_program_may_be_asked_for_a_function_that_is_named_as_a_builtin():
    program = "list = [2, 3]\ndef sum(a, b): return a + b\ndef f(): return list"
    assert passes("for a, b in [(1, 3), (2, 4)]:\n    assert sum(a, 2) == b", program)
    assert passes("assert all(one in f() for one in list((2, 3)))", program)


PAYING_EVERYBODY = [
    "assert f",
    "assert callable(f)",
    "assert f(1) == 2 or True",
    "assert True or f(1) == 2",
    "assert f(1) == 2 or not None",
    "assert lambda: f(1) == 2",
    "assert isinstance(f, object)",
    "try:\n    assert f(1) == 2\nexcept Exception:\n    pass",
    "try:\n    assert f(1) == 2\nexcept AssertionError as error:\n    print(error)",
    "try:\n    f(-1)\n    assert False\nexcept: pass",
    "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(1) == 2",
    "if True:\n    pass\nelse:\n    assert f(1) == 2",
    "for x in []:\n    assert f(x) == 2",
    "def check(f):\n    return\n    assert f(1) == 2\ncheck(f)",
    "print(f(1))",
]
WEAK = [
    "assert f(1) != 5",
    "assert f(1) is not None",
    "assert not f(1)",
    "x = f(1)\nif x: assert x == 2",
    "assert f(1) == f(1)",
]


@pytest.mark.parametrize("test", PAYING_EVERYBODY)
def test_a_test_that_passes_whatever_a_program_returns_checks_nothing(test):
    assert checks_nothing(Assertions(test), limits=Limits(), run=plainly)


@pytest.mark.parametrize("test", WEAK)
def test_a_weak_test_checks_something(test):
    assert not checks_nothing(Assertions(test), limits=Limits(), run=plainly)


COMPUTED = {
    "one line": "a = [3, 1, 2]\nassert f(a) == sorted(a)",
    "a result": "a = [3, 1, 2]\nr = f(a)\nassert r == sorted(a)",
    "expected afterwards": "a = [3, 1, 2]\nr = f(a)\nright = list(sorted(a))\nassert r == right",
    "another name": "a = [3, 1, 2]\nb = a\nr = f(b)\nassert len(r) == len(a) and r == sorted(a)",
    "a reference": "def ref(x): return sorted(x)\nfor a in [[3, 1, 2], [2, 1]]: assert f(a) == ref(a)",
    "random": "import random\nfor _ in range(3):\n    a = [random.random() for _ in range(5)]\n    assert f(a) == sorted(a)",
    "a check": "def check(g):\n    a = [3, 1, 2]\n    assert g(a) == sorted(a)\ncheck(f)",
    "not in": "a = [3, 1, 2]\nassert a not in [f(a)] and f(a)[0] == min(a)",
    "isclose": "import math\na = [3, 1, 2]\nr = f(a)\nassert math.isclose(r[0] + 1, min(a) + 1) and len(r) == 3",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        a = [3, 1, 2]\n"
        "        self.assertEqual(f(a), sorted(a))\nunittest.main()"
    ),
}
SORTS = {
    "sorted": "def f(a): return sorted(a)",
    "in place": "def f(a):\n    a.sort()\n    return a",
    "a class": "class F:\n    def __call__(self, a): return self.sort(a)\n    def sort(self, a): return sorted(a)\nf = F()",
    "recursive": "def f(a):\n    return [min(a)] + f([x for x in a if x > min(a)]) if a else []",
    "with names of builtins": "list = sum = 3\ndef f(a):\n    print('sorting', a)\n    return sorted(a)",
    "a thread": (
        "from threading import Thread\ndef f(a):\n    found = []\n"
        "    t = Thread(target=lambda: found.extend(sorted(a)))\n    t.start()\n    t.join()\n    return found"
    ),
}
SEEKS = "import gc, os, sys, builtins, math, random, unittest\n"
SORT_CHEATS = {
    "clears its argument": "def f(a):\n    a.clear()\n    return a",
    "returns its argument": "def f(a): return a",
    "makes its argument what it returns": "def f(a):\n    a[:] = [7] * len(a)\n    return a",
    "equals everything": (
        "class Any(list):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "    def __getitem__(self, at): return Any()\n    def __add__(self, other): return Any()\n    def __len__(self): return 3\n"
        "def f(a): return Any(a)"
    ),
    "equals everything, an object": (
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n    def __len__(self): return 3\n"
        "    def __getitem__(self, at): return Any()\n    def __add__(self, other): return Any()\n    def __float__(self): return 0.0\n"
        "def f(a): return Any()"
    ),
    "replaces math.isclose and sorted": (
        SEEKS + "math.isclose = lambda *_, **__: True\nbuiltins.sorted = builtins.list = lambda a: a\n"
        "builtins.min = lambda a: a[0]\nbuiltins.all = builtins.len = lambda a: 3\ndef f(a): return a"
    ),
    "patches modules": (
        SEEKS + "random.random = lambda: 0.5\nunittest.TestCase.assertEqual = lambda *_: None\n"
        "unittest.main = lambda *_, **__: None\ndef f(a): return [0] * len(a)"
    ),
    "sets a trace function": (
        SEEKS
        + "def trace(frame, event, arg):\n    for name in ('a', 'r', 'right', 'x'): frame.f_locals.pop(name, None)\n"
        "    frame.f_globals.update(sorted=lambda a: a, min=lambda a: a[0], ref=lambda a: a)\n    return trace\n"
        "sys.settrace(trace)\ndef f(a):\n    frame = sys._getframe()\n    while frame:\n"
        "        trace(frame, '', None)\n        frame = frame.f_back\n    return a"
    ),
    "finds the judge's objects": (
        SEEKS
        + "def f(a):\n    for one in gc.get_objects():\n        if isinstance(one, dict) and '_rlhf_before' in one: one['sorted'] = lambda a: a\n"
        "        if type(one).__name__ in ('ProgramSide', 'TestSide', 'Link'):\n"
        "            one.before = one.unread = lambda a: []\n            one.names.update(sorted=lambda a: a, ref=lambda a: a, min=max)\n"
        "            one.wanted = ['sorted', 'min', 'ref', 'a', 'r', 'right']\n"
        "            one.names.update(a=[], r=[], right=[], len=lambda a: 3)\n    return a"
    ),
    "asks the test for its reference": (
        SEEKS + "def f(a):\n    for one in gc.get_objects():\n        if type(one).__name__ == 'ProgramSide':\n"
        "            for name in ('ref', 'sorted', 'right'):\n                try: return one.ask('getitem', name)\n"
        "                except Exception: pass\n            one.ask('call', sys.exit, 0)\n    return []"
    ),
    "writes messages of its own": (
        SEEKS + "def f(a):\n    for number in range(3, 64):\n"
        '        try: os.write(number, b\'{"value": true, "news": {}, "printed": "", "changed": [], "same": null}\\n\' * 20)\n'
        "        except OSError: pass\n    return a"
    ),
    "prints that it passed": SEEKS
    + "print('\\n1 passed')\nos.write(1, b'\\nOK')\nos.write(2, b'\\nOK')\ndef f(a): os._exit(0)",
    "sys.exit": SEEKS + "def f(a): sys.exit(0)",
    "is sys.exit": "from sys import exit as f",
    "is os._exit": "from os import _exit as f",
    "raises SkipTest": SEEKS + "def f(a): raise unittest.SkipTest('no')",
    "raises a warning": "def f(a): raise DeprecationWarning",
    "forks": SEEKS + "def f(a):\n    if os.fork(): return a\n    return sorted(a)[:0]",
    "kills its parent": SEEKS + "import signal\ndef f(a):\n    os.kill(os.getppid(), signal.SIGINT)\n    return a",
    "ends with its last words": SEEKS + "import atexit\natexit.register(print, 'OK')\ndef f(a): return a",
    "returns types that lie": (
        "class Decimal:\n    def __str__(self): return '3'\n    def __eq__(self, other): return True\n"
        "Decimal.__module__ = 'decimal'\ndef f(a): return Decimal()"
    ),
    "returns functions": "def f(a): return lambda *_: True",
}


QUICK = ("one line", "expected afterwards", "a reference", "unittest")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in COMPUTED]
)
def test_a_computed_side_is_out_of_reach_of_the_program(form):
    test = COMPUTED[form]
    assert [name for name, program in SORTS.items() if not passes(test, program)] == []
    assert [name for name, cheat in SORT_CHEATS.items() if passes(test, cheat)] == []
    assert not checks_nothing(Assertions(test), limits=Limits(), run=plainly)


STACK = """
class StackError(Exception): pass
class Empty(StackError):
    def __init__(self, size): super().__init__(size); self.size = size
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty(0)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, at): return self.items[at]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return len(self) < len(other)
    def __add__(self, other): return Stack(self.items + other.items)
    def __repr__(self): return f"Stack({self.items})"
    def __enter__(self): return self
    def __exit__(self, *_): self.items = []
"""
OTHERS = """
import asyncio, collections, enum, math
from collections import Counter
from decimal import Decimal
from fractions import Fraction
Point = collections.namedtuple("Point", "x y")
class Color(enum.IntEnum):
    RED = 1
    BLUE = 2
class Words(list):
    def first(self): return self[0]
total = 0
def count():
    global total
    total += 1
def numbers(n):
    for i in range(n): yield i
async def later(x): return x + 1
def greet(): print("Hello,", input())
def shift(p): return Point(p.x + 1, p.y)
def same(x): return x
def dedupe(a):
    kept = sorted(set(a))
    a[:len(kept)] = kept
    return len(kept)
def rotate(m): m[:] = [list(row) for row in zip(*m[::-1])]
def fill(d, k): d[k] = 1
def compose(f, g): return lambda x: f(g(x))
def each(f, items): return [f(one) for one in items]
def length(node): return 1 + length(node.next) if node else 0
def make(x): return Node(x)
"""
NODE = "class Node:\n    def __init__(self, x, next=None): self.x = x; self.next = next\n"
USED = [
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1] and 1 in s and s[0] == 1",
    "s = Stack([1, 2])\nassert list(s) == [1, 2] and Stack([1]) == Stack([1]) != Stack([2]) and s",
    "try:\n    Stack().pop()\n    assert False\nexcept StackError as error:\n    assert error.size == 0 and str(error) == '0'",
    "a, b = Stack([1]), Stack([2, 3])\nassert sorted([b, a])[0] is a and (a + b).items == [1, 2, 3] and isinstance(a + b, Stack)",
    "with Stack([1]) as s:\n    s.items = [4]\n    assert repr(s) == 'Stack([4])' and f'{s!r}' == str(s)\nassert not s",
    "assert hasattr(Stack, 'push') and not hasattr(Stack(), 'peek')\nassert Stack([1]).items == [1]",
    "assert list(numbers(3)) == [0, 1, 2]\nassert next(numbers(5)) == 0 and sum(numbers(10)) == sum(range(10))",
    "import asyncio\nassert asyncio.run(later(1)) == 2",
    (
        "import io\nfrom contextlib import redirect_stdout\nimport sys\nsys.stdin = io.StringIO('Ann')\nout = io.StringIO()\n"
        "with redirect_stdout(out): greet()\nassert out.getvalue() == 'Hello, Ann\\n'"
    ),
    (
        "from unittest.mock import patch\nimport io\nwith patch('builtins.input', return_value='Bo'), patch('sys.stdout', io.StringIO()) as out:\n"
        "    greet()\nassert out.getvalue().strip() == 'Hello, Bo'"
    ),
    "assert Point(1, 2) == (1, 2) and shift(Point(1, 2)).x == 2 and isinstance(Point(1, 2), tuple)",
    "assert Color.RED == 1 and same(Color.BLUE).name == 'BLUE' and Color(1) is not None",
    "w = Words('ab')\nw.append('c')\nassert w.first() == 'a' and w == ['a', 'b', 'c'] and len(w) == 3",
    "count()\ncount()\nassert total == 2",
    "a = [3, 1, 1]\nk = dedupe(a)\nassert k == 2 and a[:k] == [1, 3]",
    "m = [[1, 2], [3, 4]]\nrow = m[0]\nassert rotate(m) is None\nassert m == [[3, 1], [4, 2]] and row == [3, 1]",
    "d = {}\nfill(d, 'x')\nfill(d, 'y')\nassert d == {'x': 1, 'y': 1}",
    "assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 7 and each(str, [1, 2]) == ['1', '2'] and each(len, ['ab']) == [2]",
    NODE + "assert length(Node(1, Node(2))) == 2 and make(5).x == 5",
    "x = [1, 2.5, 'a', None, True, b'x', (1, [2]), {3}, frozenset({4}), {1: {2: [3]}}, 2 + 3j, range(4), 10**5000]\nassert same(x) == x",
    "assert [type(one) for one in same([1, 1.0, True, (), 'a'])] == [int, float, bool, tuple, str] and same(int) is int",
    "assert same(Fraction(1, 2)) == 0.5 and same(Decimal('0.5')) == 0.5 and Counter('aab') == {'a': 2, 'b': 1} == same(Counter('aab'))",
    "import datetime\nd = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)\nassert same(d) == d and same(d.date()) == d.date()",
    "assert same(float('inf')) > 1e308 and same(float('nan')) != same(float('nan')) and math.isclose(same(1.0), 1.0 + 1e-12)",
    "import collections\nq = same(collections.deque([1, 2], maxlen=2))\nassert q == collections.deque([1, 2]) and q.maxlen == 2",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    assert list(pool.map(same, range(20))) == list(range(20))",
    "a = [3, 1]\nassert same(a) is a\nassert a == [3, 1]",
]


@pytest.mark.parametrize("test", USED)
def test_a_test_may_use_a_program_as_if_it_were_in_one_process(test):
    verdict = run_tests(STACK + OTHERS, [Assertions(test)], limits=Limits(), run=plainly)
    assert verdict.outcome == "passed", verdict.detail


@pytest.mark.parametrize(
    "test",
    [
        "a = [3, 1]\nassert f(a) == [1, 3]\nassert a == [3, 1]",
        "a = [3, 1]\nf(a)\nassert a == sorted(a)",
        "f([1])\nassert 0",
    ],
)
def test_a_changed_argument_is_seen_where_the_test_looks_at_it(test):
    assert not passes(test, SORT_CHEATS["clears its argument"])
    sorts_a_copy, sorts = "def f(a): return sorted(a)", SORTS["in place"]
    assert [passes(test, program) for program in (sorts_a_copy, sorts)] == [
        "== [3, 1]" in test,
        "sorted(a)" in test,
    ]
