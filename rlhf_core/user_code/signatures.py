"""The parameters of a user's function, read from its file without running it."""

from __future__ import annotations

import ast
from inspect import Parameter

from rlhf_core.user_code.sources import user_modules


def parameters_of(spec: str, *, key: str = "callable") -> dict[str, Parameter] | None:
    """Parameters of `package.module:function` or `file.py:function`. None if it is no plain `def` at the top level."""
    module, name = user_modules(spec, key=key)[0], spec.rpartition(":")[2]
    if module.source.names is None:
        return None
    found = [node for node in ast.parse(module.path.read_bytes()).body if getattr(node, "name", "") == name]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef | ast.AsyncFunctionDef) or found[0].decorator_list:
        return None
    given = found[0].args
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    parameters = [
        Parameter(one.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if at < required else None)
        for at, one in enumerate(positional)
    ]
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(
            Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        )
    if given.vararg:
        parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    if given.kwarg:
        parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return {one.name: one for one in parameters}
