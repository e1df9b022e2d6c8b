"""The parameters of a user's function, as `inspect.signature` gives them: from its file alone, or by loading it elsewhere.

A file tells them for functions, also under decorators that keep them, lambdas, `functools.partial`, classes and their
instances. A function with the same parameters and no code stands for each.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter
from types import MethodType
from typing import Any, TypeAlias

from rlhf_core.processes.child import take_standard_streams
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.sources import user_code_environment, user_modules
from rlhf_core.user_code.syntax import parse_source

logger = logging.getLogger(__name__)

Parameters: TypeAlias = Mapping[str, Parameter]
LOAD_TIMEOUT_S = 120.0  # as for the processes of rewards
_KEEPING = ("cache", "lru_cache", "no_grad", "inference_mode")
"""Decorators of functools and torch that set `__wrapped__`, from which `inspect` takes the parameters."""
_SIGNATURE = ("__signature__", "__wrapped__", "__defaults__", "__kwdefaults__", "__code__", "__call__")
"""Attributes that change the parameters of what has them."""
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Untold(Exception):
    """Raised for parameters that only running the file would tell."""


def parameters_of(spec: str, *, key: str = "callable") -> Parameters | None:
    """Parameters of `package.module:function` or `file.py:function`. None if its file does not tell."""
    module, name = user_modules(spec, key=key)[0], spec.rpartition(":")[2]
    if module.source.names is None:
        return None
    try:
        return inspect.signature(_File(parse_source(module.source.content, str(module.path))).named(name)).parameters
    except (_Untold, RecursionError, TypeError, ValueError):  # as of a `partial` with arguments that do not fit
        return None


def loaded_parameters(spec: str) -> Parameters | None:
    """Parameters of a function that is loaded in a process of its own, without GPUs. None if it cannot be loaded there."""
    command = [sys.executable, "-P", "-m", "rlhf_core.user_code.signatures", spec]
    environment = user_code_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=LOAD_TIMEOUT_S, check=True)
    except subprocess.SubprocessError:
        logger.info("%s: its parameters are known when its stage loads it", spec)
        return None
    found: Parameters = pickle.loads(ended.stdout)
    return found


# ---------------------------------------------------------------- from a file


class _File:
    """The stand-ins for the callables of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._body = tree.body
        nodes = list(ast.walk(tree))
        self._rebound = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        stored = [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        if any(name in _SIGNATURE for name in stored):
            raise _Untold

    def named(self, name: str) -> Callable[..., Any]:
        """Stand-in for a name at the top level."""
        match self._binding(name):
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                for decorator in function.decorator_list:  # the outermost first, as `inspect` unwraps
                    if isinstance(decorator, ast.Call) and self._is(decorator.func, "wraps") and decorator.args:
                        return self._value(decorator.args[0])
                    if not self._keeps(decorator):
                        raise _Untold
                return _bare(function.args)
            case ast.ClassDef() as kind:
                return self._method(kind, "__init__")
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                return self._value(value)
        raise _Untold

    def _binding(self, name: str) -> ast.AST:
        """The only statement that binds a name."""
        found = list(_bindings(self._body, name))
        if len(found) != 1 or name in self._rebound:
            raise _Untold
        return found[0]

    def _value(self, value: ast.expr) -> Callable[..., Any]:
        match value:
            case ast.Lambda(args=arguments):
                return _bare(arguments)
            case ast.Name(id=name):
                return self.named(name)
            case ast.Call(func=called, args=[function, *given], keywords=named) if self._is(called, "partial"):
                if any(isinstance(one, ast.Starred) for one in given) or not all(one.arg for one in named):
                    raise _Untold
                return partial(self._value(function), *(None for _ in given), **{str(one.arg): None for one in named})
            case ast.Call(func=called, args=[function], keywords=[]) if self._keeps(called):
                return self._value(function)
            case ast.Call(func=ast.Name(id=name)) if isinstance(kind := self._binding(name), ast.ClassDef):
                return self._method(kind, "__call__")
        raise _Untold

    def _method(self, kind: ast.ClassDef, name: str) -> Callable[..., Any]:
        """Stand-in for a method of an instance."""
        found = list(_bindings(kind.body, name))
        others = [one for name in ("__new__", "__signature__") for one in _bindings(kind.body, name)]
        if others or kind.keywords or kind.decorator_list:  # they may make something else
            raise _Untold
        match found, kind.bases:
            case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as function], _:
                return MethodType(_bare(function.args), kind)
            case [], [] if name == "__init__":
                return lambda: None
            case [], [ast.Name(id=base)] if isinstance(inherited := self._binding(base), ast.ClassDef):
                return self._method(inherited, name)
        raise _Untold

    def _keeps(self, decorator: ast.expr) -> bool:
        """Whether a decorator sets `__wrapped__`: one of a library, or a function that returns one under `functools.wraps`."""
        if any(self._is(decorator.func if isinstance(decorator, ast.Call) else decorator, name) for name in _KEEPING):
            return True
        made = self._binding(decorator.id) if isinstance(decorator, ast.Name) else None
        if not isinstance(made, ast.FunctionDef) or made.decorator_list or len(made.args.args) != 1:
            return False
        match [one for one in made.body if not isinstance(one, ast.Expr)]:
            case [
                ast.FunctionDef(name=inner, decorator_list=[ast.Call(func=called, args=[ast.Name(id=wrapped)])])
                | ast.AsyncFunctionDef(name=inner, decorator_list=[ast.Call(func=called, args=[ast.Name(id=wrapped)])]),
                ast.Return(value=ast.Name(id=returned)),
            ]:
                return returned == inner and wrapped == made.args.args[0].arg and self._is(called, "wraps")
        return False

    def _is(self, node: ast.expr, name: str) -> bool:
        """Whether an expression is a name of functools or torch, as `functools.partial` or `partial`."""
        text = ast.unparse(node)
        lines = list(_bindings(self._body, text.partition(".")[0]))
        if text == name:
            return (
                len(lines) == 1 and isinstance(lines[0], ast.ImportFrom) and lines[0].module in ("functools", "torch")
            )
        return text in (f"functools.{name}", f"torch.{name}") and all(isinstance(one, ast.Import) for one in lines)


def _bindings(body: Sequence[ast.stmt], name: str) -> Iterator[ast.AST]:
    """Yield the nodes that bind a name in a module or class, also inside `if` and `try`; `import *` may bind it."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (*_DEFS, ast.ClassDef)):
            bound = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound = [name if one.name == "*" else one.asname or one.name.partition(".")[0] for one in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] * bool(node.value)
            bound = [one.id for one in targets if isinstance(one, ast.Name)]
            waiting += [one for one in targets if not isinstance(one, ast.Name)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            bound = [node.id]
        else:
            bound = []
            waiting += ast.iter_child_nodes(node)
        if name in bound:
            yield node


def _bare(arguments: ast.arguments) -> Callable[..., Any]:
    """A function with these parameters, whose defaults are None, that does nothing."""
    bare = copy.deepcopy(arguments)
    for one in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg):
        if one is not None:
            one.annotation = None
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [one and ast.Constant(None) for one in bare.kw_defaults]
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    made: Callable[..., Any] = eval(compile(expression, "<parameters>", "eval"), {})
    return made


# ---------------------------------------------------------------- in another process


def main(spec: str) -> None:
    """Write the parameters, with None for each default."""
    answers, _ = take_standard_streams()
    found = inspect.signature(load_callable("function", spec)).parameters
    plain = {
        name: Parameter(name, one.kind, default=one.empty if one.default is one.empty else None)
        for name, one in found.items()
    }
    pickle.dump(plain, answers)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
