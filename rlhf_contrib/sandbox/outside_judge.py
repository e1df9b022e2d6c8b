"""Judge tests outside of the program's process: it reports its values and never sees the expected ones.

`assert f(2) == [4]` becomes: evaluate `f(2)` in the sandbox, write the value down, compare it with `[4]` here. An object whose
`__eq__` always agrees, a replaced builtin or a look at the test's text gain nothing then. So it is for every assertion of a
test, those of functions (HumanEval's `check(candidate)`), loops and unittest's methods too. What is compared with another
computed value is compared beside the program, as plain values: copies of Python's own types, by operators and builtins
from before the program ran. An assertion whose failure the test itself catches stays as it is.
"""

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rlhf_contrib.sandbox.rewriting import Site, rewritten
from rlhf_core.errors import DataError

_LONGEST_NUMBER = 10_000
"""Limit on hexadecimal digits and decimal exponents; larger numbers would take too long to compute."""

_ENCODER = """
import operator, sys
from decimal import Decimal
from fractions import Fraction
from json import dumps, loads
out, values = sys.__stdout__, []
scalars = (int, float, str, bool, bytes, complex, type(None))
def run(tests, names):
    text, word = loads(tests)
    names["__builtins__"] = __builtins__
    names.update(("_rlhf_" + name, value) for name, value in __builtins__.items())
    names.update(_rlhf_record=record, _rlhf_truth=truth, _rlhf_compare=compare, _rlhf_minus=minus)
    exec(compile(text, "tests", "exec"), names)
    out.write("\\n" + word + dumps(values) + "\\n")
def record(site, value):
    values.append([site, encode(value)])
def truth(site, value):
    written = encode(value)
    values.append([site, ["constant", not not value] if written[0] == "other" else written])
def compare(signs, *sides):
    return all(_compare(*one) for one in zip(signs.split(), sides, sides[1:]))
def _compare(sign, left, right):
    if type(left) in scalars and type(right) in (*scalars, set, frozenset, dict, range):
        return operations[sign](left, right)
    lefts, rights = [], []
    one, other = plain(left, lefts), plain(right, rights)
    if sign in ("In", "NotIn") and rights == [right] and hasattr(right, "__iter__"):
        return any(_compare("Eq", left, item) for item in right) == (sign == "In")
    if lefts and rights:  # of types of their own, on both sides: their own comparison
        return operations[sign](left, right)
    return operations[sign](one, other)
def minus(left, right):
    if type(left) in scalars and type(right) in scalars:
        return left - right
    lefts, rights = [], []
    one, other = plain(left, lefts), plain(right, rights)
    if not any(isinstance(side, (int, float, complex, Fraction, Decimal)) for side in (one, other)):
        return left - right
    return float("nan") if lefts or rights else one - other
def plain(value, others):
    for kind, copied in copies:
        if isinstance(value, kind):
            return copied(value, others)
    if value is None or type(value) in (range, complex, Fraction, Decimal):
        return value
    others.append(value)
    return object()
def each(kind):
    return lambda value, others: kind(plain(one, others) for one in kind.__iter__(value))
copies = (
    (bool, lambda value, others: value),
    (str, lambda value, others: str.__str__(value)),
    (int, lambda value, others: int.__pos__(value)),
    (float, lambda value, others: value if type(value) is float else float.__pos__(value)),
    ((bytes, bytearray), lambda value, others: bytes(value)),
    *((kind, each(kind)) for kind in (list, tuple, set, frozenset)),
    ((type({}.keys()), type({}.items())), lambda value, others: {plain(one, others) for one in value}),
    (dict, lambda value, others: {plain(key, others): plain(one, others) for key, one in dict.items(value)}),
)
operations = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "In": lambda one, many: one in many, "NotIn": lambda one, many: one not in many,
}
def encode(value):
    if value is None or isinstance(value, bool):
        return ["constant", value]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real.hex(), value.imag.hex()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", [hex(value.start), hex(value.stop), hex(value.step)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(one) for one in value]]
    if isinstance(value, (type({}.keys()), type({}.items()))):
        return ["set", [encode(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(one)] for key, one in value.items()]]
    if isinstance(value, Fraction):
        return ["Fraction", [hex(value.numerator), hex(value.denominator)]]
    if isinstance(value, Decimal):
        return ["Decimal", str(value)]
    return ["other", type(value).__name__]
"""
"""Runs before the program, with names of its own: a program may call its variables `str` or `list`, and replace builtins."""


class Other:
    """A value of a type that is not written down: equal to nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


@dataclass(frozen=True)
class OutsideTest:
    """`code` is the standard input of `driver`, which writes down a value each time that one of `sites` is reached."""

    code: str
    sites: tuple[Site, ...]

    def verdict(self, written: str) -> str:
        """Return "" if all values are right, else the problem of the first wrong one."""
        try:
            values = [(self.sites[site], decode(value)) for site, value in json.loads(written.partition("\n")[0])]
            counts = Counter(site for site, _ in json.loads(written.partition("\n")[0]))
        except Exception as error:  # the program decides what is written
            return f"what it computed cannot be read: {type(error).__name__}"
        if not self._reached(counts):
            return f"{len(counts)} of {len(self.sites)} assertions were reached"
        for site, value in values:
            try:
                wrong = "" if site.judge(value) else f"AssertionError: {_shown(value)}"
            except Exception as error:  # as the comparison raises in Python
                wrong = f"AssertionError: {_shown(value)}: {_shown(error)}"
            if wrong:
                return wrong
        return ""

    def _reached(self, counts: Counter[int]) -> bool:
        blocks: defaultdict[int, set[int]] = defaultdict(set)
        for number, site in enumerate(self.sites):
            if site.sure and not counts[number]:
                return False
            if site.block is not None:
                blocks[site.block].add(counts[number])
        alike = all(len(found) == 1 for found in blocks.values())
        return alike and bool(counts or not any(site.expected for site in self.sites))


def driver(program: str) -> str:
    """Return a program that runs `program` and then the test that it reads before."""
    return (
        "def _rlhf_main(names):\n"
        "    import builtins, sys\n"
        "    tests, judge = sys.stdin.read(), {'__builtins__': dict(vars(builtins))}\n"
        f"    exec({_ENCODER!r}, judge)\n"
        f"    exec(compile({program!r}, 'main.py', 'exec'), names)\n"
        "    judge['run'](tests, names)\n"
        "_rlhf_main(globals())\n"
    )


def judged_outside(code: str, word: str) -> OutsideTest:
    """Return the test with its assertions taken out of the program's reach.

    What was computed is written as the last line, after `word`. DataError for what is no Python.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError("label", code[:200], f"is no test in Python ({error})", "fix the test") from error
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(tree)):
        raise DataError("label", code[:200], "is a test that no program fails", "assert something of the program")
    text, sites = rewritten(tree)
    return OutsideTest(json.dumps([text, word]), sites)


def decode(written: Any) -> Any:
    """Return the value that the program's process wrote down.

    >>> decode(["list", [["int", "0x2"], ["str", "a"]]])
    [2, 'a']
    """
    kind, content = written
    match kind:
        case "constant" | "str":
            return content
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*(float.fromhex(part) for part in content))
        case "bytes":
            return bytes.fromhex(content)
        case "list" | "tuple" | "set" | "frozenset":
            made: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
            return made[kind](decode(one) for one in content)
        case "dict":
            return {decode(key): decode(value) for key, value in content}
        case "range":
            return range(*(int(part, 16) for part in content))
        case "Fraction" if all(len(part) <= _LONGEST_NUMBER for part in content):
            return Fraction(*(int(part, 16) for part in content))
        case "Decimal" if len(content) <= _LONGEST_NUMBER:
            number = Decimal(content)
            if not number.is_finite() or abs(number.adjusted()) <= _LONGEST_NUMBER:
                return number
    return Other(str(content))


# ---------------------------------------------------------------- private


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except Exception:  # whole numbers of too many digits, for one
        return f"a {type(value).__name__}"
