"""Decide the conditions of a shell script and compute its numbers, as far as the values in it suffice."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from pipelines.importers.openrlhf.syntax import Block, Item

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_WHOLE = re.compile(r"-?\d+")


def computed(text: str) -> int | None:
    """Return the value of an expression of whole numbers, 1 or 0 for a comparison; None if it has none."""
    if not re.fullmatch(r"[\d\s+*/%()<>=!&|-]+", text):
        return None
    try:
        return _arithmetic(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def test(words: list[str], *, patterns: bool = False) -> bool | None:
    """Return the value of a test, None if it is of a file or has a word without a value in the script."""
    if any("$" in word for word in words):
        return None
    match words:
        case ["!", *rest]:
            value = test(rest, patterns=patterns)
            return None if value is None else not value
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatchcase(left, right) if patterns else left == right) == (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS and _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right):
            return _COMPARISONS[sign](int(left), int(right))
        case _:
            return None


def double_test(items: Sequence[Item], text: Callable[[str], str]) -> bool | None:
    """Return the value of what is in `[[ ]]`, None if the script does not decide it; `text` expands a word."""
    value: bool | None = True
    for item in items:
        if isinstance(item.node, Block):
            one = double_test(item.node.branches[0].body, text)
        else:
            one = test([text(word) for word in item.node.words], patterns=True)
        one = not one if item.negated and one is not None else one
        if item.operator == "||":
            value = True if True in (value, one) else None if None in (value, one) else False
        else:
            value = False if False in (value, one) else None if None in (value, one) else True
    return value


def _arithmetic(node: ast.expr) -> int:
    """Return the value of whole numbers joined by + - * / %, comparisons, and, or."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
            return int(_OPERATORS[type(sign)](_arithmetic(left), _arithmetic(right)))
        case ast.BoolOp(op=sign, values=values):
            return int((all if isinstance(sign, ast.And) else any)([_arithmetic(value) for value in values]))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_arithmetic(inner)
        case _:
            raise SyntaxError("only + - * / %, comparisons, && and || of whole numbers")
