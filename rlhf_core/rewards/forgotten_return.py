"""Find the function that may lack a `return`, once a reward function has returned None for an answer.

An explicit None means that a reward does not apply. A function that ends without `return` also returns None, usually by
mistake.
"""

import ast
import copy
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from rlhf_core.processes.installed import is_users_own

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_END = "the end of the function"
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def forgotten_return(function: Callable[..., Any]) -> str:
    """Find a function that returns a value on some paths and ends without `return` on another, or that never returns
    one although its value is used. Looks at `function` and the user's functions that it calls; "" if all are fine.
    """
    trees = [(one, tree) for one in _reached(function) for tree in [_tree(one)] if tree is not None]
    used = {name for _, tree in trees for name in _used(tree)}
    # An object that a decorator puts in the place of a function has another name.
    used |= {one.__code__.co_name for one, _ in trees if hasattr(one, "__wrapped__") or _names_of(one) & used}
    for one, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, Definition) and _forgets(node, used):
                file = Path(one.__code__.co_filename).name
                return f"{node.name} ({file}, line {one.__code__.co_firstlineno + node.lineno - 1})"
    return ""


def _reached(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield the plain function of a callable, and the user's functions that it names, transitively."""
    waiting, seen = [*_plain(function)], set[FunctionType]()
    while waiting:
        one = waiting.pop()
        if one in seen or not is_users_own(Path(one.__code__.co_filename)):
            continue
        seen.add(one)
        yield one
        names = set(_names(one.__code__))
        for value in [one.__globals__[name] for name in names if name in one.__globals__]:
            inside = [getattr(value, name, None) for name in names] if isinstance(value, ModuleType) else [value]
            waiting += [plain for named in inside for plain in _plain(named)]


def _plain(value: Any) -> Iterator[FunctionType]:
    """Yield a function and its wrapped functions, or the methods of an object or a class."""
    while isinstance(value, partial):
        value = value.func
    methods = [value]
    if not isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
        owner = value.__self__ if isinstance(value, MethodType) else value
        kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
        methods = [one for kind in kinds for one in vars(kind).values()]
    while methods:
        one = methods.pop()
        if isinstance(one, FunctionType):
            yield one
        if isinstance(one, (staticmethod, classmethod, MethodType)):
            methods.append(one.__func__)
        methods += [one.fget] if isinstance(one, property) else []
        methods += [vars(one)["__wrapped__"]] if "__wrapped__" in getattr(one, "__dict__", ()) else []


def _names_of(function: FunctionType) -> set[str]:
    return {name for name, value in function.__globals__.items() if value is function}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _tree(function: FunctionType) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError):  # no source file, or a lambda inside a longer expression
        return None


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions that are called or passed on for their result."""
    calls = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    dropped = {id(call.func) for call in calls if isinstance(call, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in dropped:
            yield node.id if isinstance(node, ast.Name) else node.attr


def _forgets(node: Definition, used: set[str]) -> bool:
    own = list(_own(node))
    if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in own) or not _ends_open(node):
        return False
    returns = [one.value for one in own if isinstance(one, ast.Return)]
    return any(value is not None for value in returns) or (not returns and node.name in used)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without the nodes of the functions inside it."""
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        child = waiting.pop()
        yield child
        if not isinstance(child, _INNER):
            waiting += ast.iter_child_nodes(child)


class _Plain(ast.NodeTransformer):
    """Removes the parts that prevent compiling a function alone, and `with`, whose body continues in its place."""

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.Pass()

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node if any("suppress" in ast.unparse(item) for item in node.items) else node.body

    visit_AsyncWith = visit_With


def _ends_open(node: Definition) -> bool:
    """Whether the end of a function can be reached: there the compiler keeps a `return`."""
    function = _Plain().visit(copy.deepcopy(node))
    function.decorator_list = []
    function.body.append(ast.Return(ast.Constant(_END)))
    module = compile(ast.fix_missing_locations(ast.Module([function], [])), "<end>", "exec")
    codes = [one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == node.name]
    return any(one.argval == _END for one in dis.get_instructions(codes[-1]))
