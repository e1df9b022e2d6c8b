"""Rewrite a test so that its assertions record the program's values instead of judging them.

`assert f(2) == 4` becomes `_rlhf_record(0, f(2))`, and `4` stays here, in the judge of assertion 0. Of an assertion
without a literal the whole is written down. Comparisons of two computed values become `_rlhf_compare("Eq", f(2), g(2))`, in
whatever place of the test, which compares them as plain values (`outside_judge`). A builtin that the test uses is the real
one (`_rlhf_all`), whatever the program calls so, unless only builtins are used: then the program may be asked for a `sum`.
"""

import ast
import builtins
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
_RECORD, _TRUTH, _COMPARE, _MINUS = "_rlhf_record", "_rlhf_truth", "_rlhf_compare", "_rlhf_minus"
_ASSERTS: dict[str, type[ast.cmpop]] = {
    **dict.fromkeys(("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertSetEqual"), ast.Eq),
    **dict.fromkeys(("assertTupleEqual", "assertSequenceEqual", "assertMultiLineEqual"), ast.Eq),
    "assertNotEqual": ast.NotEq,
    "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
    "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE,
    "assertIn": ast.In,
    "assertNotIn": ast.NotIn,
    "assertIs": ast.Is,
    "assertIsNot": ast.IsNot,
    "assertIsNone": ast.Is,
    "assertIsNotNone": ast.IsNot,
}
"""Methods of `unittest.TestCase` -> the comparison that they make."""


@dataclass(frozen=True)
class Site:
    """An assertion of a test: how to judge its values, and the known bounds of how often it is reached.

    A `sure` one is reached; one that is `expected` may be the only one that is. Those of a `block` follow each other, and are
    reached equally often.
    """

    judge: Judge
    sure: bool
    expected: bool
    block: int | None


def rewritten(tree: ast.Module) -> tuple[str, tuple[Site, ...]]:
    """Return the code of the test `tree`, which changes, and its assertions in the order of their numbers."""
    rewriting = _Rewriting(tree)
    return ast.unparse(ast.fix_missing_locations(rewriting.tree)), tuple(rewriting.sites)


def catches_assertions(node: ast.Try | ast.With | ast.AsyncWith) -> bool:
    """Return whether a failed assertion in the body of `node` goes no further."""
    if isinstance(node, ast.Try):
        kinds = [handler.type for handler in node.handlers]
        return None in kinds or any(_names_assertion(kind) for kind in kinds if kind is not None)
    return any(_names_assertion(item.context_expr) for item in node.items)


# ---------------------------------------------------------------- private


def _names_assertion(kinds: ast.expr) -> bool:
    caught = ("AssertionError", "Exception", "BaseException")
    return any(isinstance(node, ast.Name) and node.id in caught for node in ast.walk(kinds))


class _Rewriting(ast.NodeTransformer):
    """A test whose assertions write down values; `sites` are the assertions in the order of their numbers."""

    def __init__(self, tree: ast.Module) -> None:
        self.sites: list[Site] = []
        self._builtins = _builtins_used(tree)
        self._in_case = False  # inside a class of unittest
        self._blocks = itertools.count()
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        ours = [(node.module, name.asname or name.name) for node in imported for name in node.names]
        self._isclose_is_ours = ("math", "isclose") in ours
        self._mains = {"unittest.main"} | {"main"} & {name for module, name in ours if module == "unittest"}
        calls = [statement for statement in tree.body if isinstance(statement, ast.Expr | ast.Assign)]
        self._called = {_name(node.func) for call in calls for node in ast.walk(call) if isinstance(node, ast.Call)}
        tree.body = self._block(tree.body, sure=True, expected=True)
        self.tree = tree

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Compare plain values."""
        self.generic_visit(node)
        if any(isinstance(sign, ast.Is | ast.IsNot) for sign in node.ops):
            return node
        signs = ast.Constant(" ".join(type(sign).__name__ for sign in node.ops))
        return ast.Call(ast.Name(_COMPARE, ast.Load()), [signs, node.left, *node.comparators], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Subtract plain numbers, as tolerances do."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.Sub) or {type(node.left), type(node.right)} == {ast.Constant}:
            return node
        return ast.Call(ast.Name(_MINUS, ast.Load()), [node.left, node.right], [])

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Use the builtins from before the program ran."""
        return ast.Name(f"_rlhf_{node.id}", node.ctx) if node.id in self._builtins else node

    def _block(self, statements: list[ast.stmt], *, sure: bool, expected: bool) -> list[ast.stmt]:
        leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
        whole = not any(isinstance(node, leaves) for one in _outer(statements) for node in ast.walk(one))
        block = next(self._blocks) if whole and expected else None
        return [
            made
            for one in statements
            for made in self._statement(one, sure=sure and whole, expected=expected, block=block)
        ]

    def _statement(self, one: ast.stmt, *, sure: bool, expected: bool, block: int | None) -> list[ast.stmt]:
        one = self._of_unittest(one)
        match one:
            case ast.Assert():
                known = not isinstance(one.test, ast.Constant) or bool(one.test.value)
                return [
                    ast.copy_location(
                        self._site(part, sure and known, expected and known, block if known else None), one
                    )
                    for part in _parts(one.test)
                ]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                method = self._in_case and one.name.startswith("test") and not one.decorator_list
                runs = one.name in self._called or method
                one.body = self._block(one.body, sure=sure and runs, expected=expected)
            case ast.ClassDef():
                self._in_case = any(_name(base).endswith("TestCase") for base in one.bases)
                one.body = self._block(one.body, sure=sure and self._in_case, expected=expected)
                self._in_case = False
            case ast.For() | ast.AsyncFor():
                one.iter = self.visit(one.iter)
                one.body = self._block(one.body, sure=False, expected=expected)
                one.orelse = self._block(one.orelse, sure=False, expected=False)
            case ast.If() | ast.While():
                one.test = self.visit(one.test)
                main = isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)
                one.body = self._block(one.body, sure=False, expected=expected and main)
                one.orelse = self._block(one.orelse, sure=False, expected=False)
            case ast.Try() | ast.With() | ast.AsyncWith() if catches_assertions(one):
                return [self.visit(one)]
            case ast.Try():
                one.body = self._block(one.body, sure=False, expected=False)
                for part in one.handlers:
                    part.type = part.type and self.visit(part.type)
                    part.body = self._block(part.body, sure=False, expected=False)
                one.orelse = self._block(one.orelse, sure=False, expected=False)
                one.finalbody = self._block(one.finalbody, sure=False, expected=False)
            case ast.With() | ast.AsyncWith():
                one.items = [self.visit(item) for item in one.items]
                one.body = self._block(one.body, sure=False, expected=expected)
            case _:
                return [self.visit(one)]
        return [one]

    def _site(self, test: ast.expr, sure: bool, expected: bool, block: int | None) -> ast.Expr:
        how, value, judge = _split(test, isclose_is_ours=self._isclose_is_ours)
        number = ast.Constant(len(self.sites))
        self.sites.append(Site(judge, sure, expected, block))
        return ast.Expr(ast.Call(ast.Name(how, ast.Load()), [number, self.visit(value)], []))

    def _of_unittest(self, one: ast.stmt) -> ast.stmt:
        """Return the assertion that a statement of unittest makes, or the statement itself."""
        match one:
            case ast.Expr(ast.Call(func, _, keywords) as call) if _name(func) in self._mains:
                kept = [option for option in keywords if option.arg not in ("exit", "argv")]
                argv = ast.keyword("argv", ast.List([ast.Constant("tests")], ast.Load()))
                call.keywords = [*kept, argv, ast.keyword("exit", ast.Constant(False))]
                result = ast.Attribute(call, "result", ast.Load())
                test: ast.expr = ast.Call(ast.Attribute(result, "wasSuccessful", ast.Load()), [], [])
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name), [left, *rest])) if name in _ASSERTS:
                right = ast.Constant(None) if name.endswith("None") else rest[0] if rest else None
                if right is None:
                    return one
                test = ast.Compare(left, [_ASSERTS[name]()], [right])
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "assertTrue"), [left, *_])):
                test = left
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "assertFalse"), [left, *_])):
                test = ast.UnaryOp(ast.Not(), left)
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Name("self"), "assertAlmostEqual"), [left, right, *rest], options)
            ):
                named = {str(option.arg): _literal(option.value) for option in options}
                places = _literal(rest[0]) if rest else named.get("places", 7)
                bound = named.get("delta", 0.5 * 10.0**-places if isinstance(places, int) else None)
                if not isinstance(bound, (int, float)):
                    return one
                difference = ast.Call(ast.Name("abs", ast.Load()), [ast.BinOp(left, ast.Sub(), right)], [])
                test = ast.Compare(difference, [ast.LtE()], [ast.Constant(bound)])
            case _:
                return one
        return ast.copy_location(ast.Assert(test), one)


def _builtins_used(tree: ast.Module) -> set[str]:
    """Return the builtins that a test uses beside names of the program; {} if it uses no names of the program."""
    used, own = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                own.add(name)
            case ast.alias(name=name, asname=shorter):
                own.add(shorter or name.partition(".")[0])
    known = {name for name in dir(builtins) if name[0] != "_"} - {"super"}  # the compiler looks for that name
    return used & known - own if used - own - known - {"self"} else set()


def _outer(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return those that are no functions or classes, which have a flow of their own."""
    return [one for one in statements if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


def _parts(test: ast.expr) -> list[ast.expr]:
    """Return the conditions that must all hold: the operands of `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for operand in test.values for part in _parts(operand)]
    return [test]


def _split(test: ast.expr, *, isclose_is_ours: bool) -> tuple[str, ast.expr, Judge]:
    """Return the recording code, the expression to evaluate, and the judge of its value."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            how, value, judge = _split(inner, isclose_is_ours=isclose_is_ours)
            return how, value, lambda found: not judge(found)
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            if (found := _against_a_literal(left, comparison, right)) is not None:
                return _RECORD, *found
        case ast.Compare(left=low, ops=[first, second], comparators=[middle, high]):
            ends = _literal(low), _literal(high)
            if _NO_LITERAL not in ends and not isinstance(first, ast.Is | ast.IsNot | ast.In | ast.NotIn):
                least, most, below, above = *ends, _COMPARISONS[type(first)], _COMPARISONS[type(second)]
                return _RECORD, middle, lambda found: bool(below(least, found) and above(found, most))
        case ast.Call(func=function, args=[one, other], keywords=keywords) if _name(function) in (
            ("math.isclose", "isclose") if isclose_is_ours else ("math.isclose",)
        ):
            options = {str(option.arg): _literal(option.value) for option in keywords}
            literals = [_literal(one), _literal(other)]
            if literals.count(_NO_LITERAL) == 1 and _NO_LITERAL not in options.values():
                computed = (one, other)[literals.index(_NO_LITERAL)]
                expected = next(literal for literal in literals if literal is not _NO_LITERAL)
                return _RECORD, computed, lambda found: math.isclose(found, expected, **options)
    return _TRUTH, test, bool  # whether an object of another type counts as true is decided in its own process


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
    """Return the argument of `abs(... - 1.5)` or `round(..., 2)`, and the function to apply here: a program can replace them."""
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
