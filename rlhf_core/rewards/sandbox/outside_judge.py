"""Tests that are judged where the program cannot reach: it says what it computed, and never sees what is expected.

`assert f(2) == [4]` becomes: evaluate `f(2)` in the sandbox, write the value down, compare it with `[4]` here. An object whose
`__eq__` always agrees, a replaced builtin or a look at the test's text gain nothing then.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rlhf_core.errors import DataError, explain

Judge = Callable[[Any], bool]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_SINGLETONS = (None, True, False)
_NO_LITERAL = object()
_RECORD = "_rlhf_record"
_LONGEST_NUMBER = 10_000
"""Hexadecimal digits of a fraction's parts, and the largest exponent of a decimal number: beyond it reckoning takes long."""

_ENCODER = """
import json, sys
values = []
def record(value):
    values.append(encode(value))
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
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return ["Fraction", [hex(value.numerator), hex(value.denominator)]]
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return ["Decimal", str(value)]
    return ["other", type(value).__name__]
def write(word):
    sys.__stdout__.write("\\n" + word + json.dumps(values) + "\\n")
"""
"""Runs with names of its own: a program may call its variables `str` or `list`."""


class Other:
    """A value of a type that is not written down: equal to nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


@dataclass(frozen=True)
class OutsideTest:
    """`code` runs after the program and writes down a value for each of `judges`, in their order."""

    code: str
    judges: tuple[Judge, ...]

    def verdict(self, written: str) -> str:
        """Return an empty text if all values are right, else what is wrong with the first that is not."""
        try:
            values = [decode(value) for value in json.loads(written.partition("\n")[0])]
        except Exception as error:  # the program decides what is written
            return f"what it computed cannot be read: {type(error).__name__}"
        if len(values) != len(self.judges):
            return f"{len(values)} of {len(self.judges)} assertions were reached"
        for value, judge in zip(values, self.judges, strict=True):
            try:
                wrong = "" if judge(value) else f"AssertionError: {_shown(value)}"
            except Exception as error:  # as the comparison raises in Python
                wrong = f"AssertionError: {_shown(value)}: {_shown(error)}"
            if wrong:
                return wrong
        return ""


def judged_outside(code: str, word: str) -> OutsideTest:
    """Return the test with its own assertions (not those inside functions and loops) taken out of the program's reach.

    What was computed is written as the last line, after `word`. DataError for what is no Python.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(explain("label", code[:200], f"is no test in Python ({error})", "fix the test")) from error
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(tree)):
        raise DataError(
            explain("label", code[:200], "is a test that no program fails", "assert something of the program")
        )
    judges: list[Judge] = []
    imported = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "math"
        and any(name.name == "isclose" for name in node.names)
        for node in tree.body
    )
    body: list[ast.stmt] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Assert):
            body.append(statement)
            continue
        for test in _parts(statement.test):
            value, judge = _split(test, isclose_is_ours=imported)
            judges.append(judge)
            call = ast.Call(ast.Name(_RECORD, ast.Load()), [value], [])
            body.append(ast.copy_location(ast.Expr(call), statement))
    tree.body = body
    text = ast.unparse(ast.fix_missing_locations(tree))
    names = "_rlhf_names"
    lines = (
        "import builtins as _rlhf_builtins",
        f"{names} = {{}}",
        f"_rlhf_builtins.exec({_ENCODER!r}, {names})",
        f"{_RECORD} = {names}['record']",
        f"_rlhf_builtins.exec(_rlhf_builtins.compile({text!r}, 'tests', 'exec'), _rlhf_builtins.globals())",
        f"{names}['write']({word!r})",
    )
    return OutsideTest("\n".join(lines) + "\n", tuple(judges))


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


def _parts(test: ast.expr) -> list[ast.expr]:
    """Return what must all be true for the test to be: the operands of `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for operand in test.values for part in _parts(operand)]
    return [test]


def _split(test: ast.expr, *, isclose_is_ours: bool) -> tuple[ast.expr, Judge]:
    """Return what the program's process is to evaluate, and how to judge it here."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare() as compared):
            value, judge = _split(compared, isclose_is_ours=isclose_is_ours)
            return value, lambda found: not judge(found)
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            if (found := _against_a_literal(left, comparison, right)) is not None:
                return found
        case ast.Compare(left=low, ops=[first, second], comparators=[middle, high]):
            ends = _literal(low), _literal(high)
            if _NO_LITERAL not in ends and not isinstance(first, ast.Is | ast.IsNot | ast.In | ast.NotIn):
                least, most, below, above = *ends, _COMPARISONS[type(first)], _COMPARISONS[type(second)]
                return middle, lambda found: bool(below(least, found) and above(found, most))
        case ast.Call(func=function, args=[one, other], keywords=keywords) if _name(function) in (
            ("math.isclose", "isclose") if isclose_is_ours else ("math.isclose",)
        ):
            options = {str(option.arg): _literal(option.value) for option in keywords}
            literals = [_literal(one), _literal(other)]
            if literals.count(_NO_LITERAL) == 1 and _NO_LITERAL not in options.values():
                computed = (one, other)[literals.index(_NO_LITERAL)]
                expected = next(literal for literal in literals if literal is not _NO_LITERAL)
                return computed, lambda found: math.isclose(found, expected, **options)
    # Whether an object counts as true is for its own process to say.
    return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test)), bool


def _against_a_literal(left: ast.expr, comparison: ast.cmpop, right: ast.expr) -> tuple[ast.expr, Judge] | None:
    expected, value = _literal(right), left
    swapped = expected is _NO_LITERAL
    if swapped:
        expected, value = _literal(left), right
    identity = isinstance(comparison, ast.Is | ast.IsNot)
    if expected is _NO_LITERAL or (identity and not any(expected is one for one in _SINGLETONS)):
        return None
    if swapped and isinstance(comparison, ast.In | ast.NotIn):
        return None  # what contains it may be of any type
    compare = _COMPARISONS[type(comparison)]
    value, prepare = _unwrap(value)
    if swapped:
        return value, lambda found: bool(compare(expected, prepare(found)))
    return value, lambda found: bool(compare(prepare(found), expected))


def _unwrap(value: ast.expr) -> tuple[ast.expr, Callable[[Any], Any]]:
    """Return what is inside `abs(... - 1.5)` and `round(..., 2)`, and what these make of it: a program can replace them."""
    match value:
        case ast.Call(func=ast.Name("abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)], keywords=[]):
            for inside, other in ((left, _literal(right)), (right, _literal(left))):
                if other is not _NO_LITERAL:
                    return inside, lambda found, other=other: abs(found - other)  # type: ignore[misc]
        case ast.Call(func=ast.Name("round"), args=[inside, places], keywords=[]):
            digits = _literal(places)
            if digits is not _NO_LITERAL:
                return inside, lambda found: round(found, digits)
    return value, lambda found: found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _NO_LITERAL


def _name(function: ast.expr) -> str:
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""
