"""The parameters of a user's function, as `inspect.signature` gives them: from its file alone, or by loading it elsewhere.

The file is enough for plain functions and lambdas. All others, such as decorated functions and objects with `__call__`,
are loaded in a separate process before a run computes anything.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeAlias

from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import take_standard_streams
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.sources import user_code_environment, user_modules
from rlhf_core.user_code.syntax import binds_out_of_sight, parse_source

logger = logging.getLogger(__name__)

Parameters: TypeAlias = Mapping[str, Parameter]
LOAD_TIMEOUT_S = 120.0  # as for the processes of rewards
_SIGNATURE = ("__signature__", "__wrapped__", "__defaults__", "__kwdefaults__", "__code__", "__call__")
"""Attributes that change the parameters of their object."""


def parameters_of(spec: str, *, key: str = "callable") -> Parameters | None:
    """Parameters of `package.module:function` or `file.py:function`. None if they do not follow from the file alone."""
    module, name = user_modules(spec, key=key)[0], spec.rpartition(":")[2]
    if module.source.names is None:
        return None
    found = _callable(parse_source(module.source.content, str(module.path)), name)
    return None if found is None else inspect.signature(found).parameters


def loaded_parameters(spec: str, *, key: str = "callable") -> Parameters | None:
    """Parameters of a function, loaded in a separate process without GPUs. None if its file cannot be loaded there.

    Raises ConfigError if the file has no such function.
    """
    command = [sys.executable, "-P", "-m", "rlhf_core.user_code.signatures", spec, key]
    environment = user_code_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=LOAD_TIMEOUT_S, check=True)
        found: Parameters | str = pickle.loads(ended.stdout)
    except (subprocess.SubprocessError, EOFError, pickle.UnpicklingError):  # of a file that ends the process
        logger.info("%s: its parameters are known when its stage loads it", spec)
        return None
    if isinstance(found, str):
        raise ConfigError(found)
    return found


# ---------------------------------------------------------------- from a file


def _callable(tree: ast.Module, name: str) -> Callable[..., Any] | None:
    """A stand-in for a function or lambda that a file binds to a name once, and does not change."""
    nodes = list(ast.walk(tree))
    stored = [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    bound = [one for node in nodes for one in _bound(node) if one in (name, "*")]
    if bound[-1:] == ["*"] or bound.count(name) != 1 or {*stored} & {*_SIGNATURE, name} or binds_out_of_sight(tree):
        return None
    for node in tree.body:
        match node:
            case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) if node.name == name:
                return _bare(node.args)
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Lambda(args=arguments)) if target == name:
                return _bare(arguments)
    return None


def _bound(node: ast.AST) -> list[str]:
    """The names that a node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.alias(name=name, asname=given):
            return [given or name.partition(".")[0]]
    return [getattr(node, "name", None) or getattr(node, "rest", None) or ""]


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


def main(spec: str, key: str) -> None:
    """Write the parameters, with None for each default, or the error in the name."""
    hide_in_logs()
    answers, _ = take_standard_streams()
    try:
        found = inspect.signature(load_callable(key, spec)).parameters
    except ConfigError as error:
        if error.__cause__ is not None:  # the file fails here, perhaps for want of a GPU
            raise
        pickle.dump(str(error), answers)
        return
    plain = {
        name: Parameter(name, one.kind, default=one.empty if one.default is one.empty else None)
        for name, one in found.items()
    }
    pickle.dump(plain, answers)
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
