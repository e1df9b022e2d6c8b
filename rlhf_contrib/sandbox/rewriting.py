"""Find the names that a test uses of a program, and mark arguments that need their value from before a call.

A program may change its argument: `a.clear(); return a` must not pass `assert f(a) == sorted(a)`. The argument becomes
`_rlhf_unread(a)`, so a change of the copy in the program's process is not applied in the test's. Tests of functions
that change their argument inspect it afterwards (`f(a)`, then `assert a == [1, 2]`), so there it stays `f(a)`. In
`assert a == sorted(a)`, the second `a` becomes `_rlhf_before(a)`.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterator

_BUILTINS = {name for name in dir(builtins) if name[0] != "_"}


def test_input(code: str, word: str) -> str:
    """Standard input of `two_processes`: a test, the names that it uses, and the secret word that reports a pass."""
    tree = ast.parse(code)
    own = set(_bound(tree))
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used = {name for name in names if name[:2] != "__"}
    free = used - own - _BUILTINS
    if free - {"self"}:  # without any, the program may define a function named `sum`
        used -= _BUILTINS - own
    tree = ast.fix_missing_locations(_Arguments(tree, free).visit(tree))
    parts = {"code": ast.unparse(tree), "used": sorted(used), "free": sorted(free), "word": word}
    return json.dumps(parts)


# ---------------------------------------------------------------- private


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a test assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(name=name, asname=shorter):
                yield shorter or name.partition(".")[0]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _root(node: ast.AST) -> str:
    """The variable at the root of attributes, items and calls: `a` for `a.b[0]()`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Arguments(ast.NodeTransformer):
    """Marks arguments of the program's functions. `_computed`: names of its functions and of their results."""

    def __init__(self, tree: ast.Module, free: set[str]) -> None:
        nodes = list(ast.walk(tree))
        parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
        called = {_root(node.func) for node in nodes if isinstance(node, ast.Call)}
        self._computed = free | (parameters & called) - {"self"}
        loops = [node for node in nodes if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)]
        for loop in loops:
            if _names(loop.iter) & self._computed:
                self._computed |= _names(loop.target)
        before = -1
        while before < len(self._computed):
            before = len(self._computed)
            for node in nodes:
                for target in _targets(node):
                    if _names(node.value) & self._computed:  # type: ignore[attr-defined]
                        self._computed |= _names(target)
        self._read = {name for node in nodes for name in self._looked_at(_sides(node))}
        self._statements = {node.value for node in nodes if isinstance(node, ast.Expr)}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Mark arguments of a call whose result the test uses."""
        self.generic_visit(node)
        self._mark_earlier(node)
        if node not in self._statements and _root(node.func) in self._computed:
            node.args = [self._unread(one) for one in node.args]
            for option in node.keywords:
                option.value = self._unread(option.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Mark arguments in a comparison with themselves."""
        self.generic_visit(node)
        self._mark_earlier(node)
        return node

    def _unread(self, value: ast.expr) -> ast.expr:
        marked = isinstance(value, ast.Name | ast.Attribute | ast.Subscript) and _root(value) not in self._read
        return _call("_rlhf_unread", value) if marked else value

    def _looked_at(self, sides: list[ast.expr]) -> Iterator[str]:
        """Names on a side without results of the program, provided that no other side has any."""
        for side in sides:
            others = [_names(one) & self._computed for one in sides if one is not side]
            slices = [_names(one) for one in ast.walk(side) if isinstance(one, ast.Slice)]
            inside = _names(side) & self._computed - set[str]().union(*slices)
            if not inside and not any(others):
                yield from _names(side)

    def _mark_earlier(self, node: ast.AST) -> None:
        """In `a == sorted(a)`, replace `a` on the second side by its value from before the program changed it."""
        sides = _sides(node)
        for name in {_root(one) for one in sides if not isinstance(one, ast.Call)} - self._computed - {""}:
            for side in sides:
                if _root(side) != name or isinstance(side, ast.Call):
                    _Earlier(name, self._computed).visit(side)


class _Earlier(ast.NodeTransformer):
    """Replaces a variable by its value from before a call, except where it is an argument of the program."""

    def __init__(self, name: str, computed: set[str]) -> None:
        self._name, self._computed = name, computed

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Visit only the arguments, and skip calls of the program's functions."""
        if _root(node.func) not in self._computed:
            node.args = [self.visit(one) for one in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Mark the variable."""
        return _call("_rlhf_before", node) if node.id == self._name else node


def _call(name: str, value: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            return targets
        case (
            ast.AnnAssign(target=target, value=ast.expr()) | ast.AugAssign(target=target) | ast.NamedExpr(target=target)
        ):
            return [target]
    return []


def _sides(node: ast.AST) -> list[ast.expr]:
    """The sides of a comparison by an operator, by `math.isclose`, or by a method of unittest."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if (
            name == "isclose" or name[:6] == "assert"
        ):
            return args[:2]
    return []
