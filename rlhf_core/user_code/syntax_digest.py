"""Digest the syntax tree of a module. Of our modules, the texts that only people read do not count."""

import ast
from collections.abc import Iterator
from typing import Any, TypeGuard

from rlhf_core.store.fingerprint import sha256_text

LOGGERS = ("log", "logger", "logging", "warnings")
LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")
_ALL_LOCALS = ("locals", "vars", "eval", "exec")
READERS = ("__doc__", "getdoc")
"""Names with which a module reads docstrings while it runs; they may be prompts then."""


def digest_with_texts(tree: ast.Module) -> str:
    """Digest of a tree without positions and comments, for modules of users."""
    return sha256_text(syntax_text(tree, docstrings=True))


def digest_without_texts(tree: ast.Module) -> str:
    """Digest of a tree also without docstrings and messages, for modules of ours. Empties the messages in `tree`.

    A message is a text that an exception, `explain`, an `assert`, a log call or a warning gets, directly or by a local
    variable without other use. Of f-strings the values in braces count. Docstrings count in a module that reads them.

    >>> digests = [digest_without_texts(ast.parse(f"raise ValueError(f'{text}')")) for text in ("{x} is bad", "bad: {x}", "{y}")]
    >>> digests[0] == digests[1], digests[0] == digests[2]
    (True, False)
    """
    nodes = list(ast.walk(tree))
    messages = [text for node in nodes for part in _messages(node) for text in _texts(part)]
    read = {id(text) for text in messages if isinstance(text, ast.Name)}
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for text in [*messages, *(text for function in functions for text in _local_messages(function, read))]:
        if isinstance(text, ast.Constant):
            text.value = ""
        elif isinstance(text, ast.JoinedStr):
            text.values = [value for value in text.values if isinstance(value, ast.FormattedValue)]
    names = {getattr(node, "attr", getattr(node, "id", getattr(node, "value", None))) for node in nodes}
    return sha256_text(syntax_text(tree, docstrings=not names.isdisjoint(READERS)))


def syntax_text(node: ast.AST, *, docstrings: bool) -> str:
    """The tree as text without positions, comments and empty fields.

    `ast.dump` is not used because its output changes between Python versions.
    """
    parts = [type(node).__name__]
    for field in node._fields:
        value = getattr(node, field, None)
        if value is None or value == [] or field in ("type_comment", "kind", "ctx"):
            continue
        if isinstance(value, ast.AST):
            parts.append(f"{field}={syntax_text(value, docstrings=docstrings)}")
        elif isinstance(value, list):
            kept = [item for item in value if docstrings or not _is_text(item)]
            items = (
                syntax_text(item, docstrings=docstrings) if isinstance(item, ast.AST) else repr(item) for item in kept
            )
            parts.append(f"{field}=[{','.join(items)}]")
        else:
            parts.append(f"{field}={value!r}")
    return f"({' '.join(parts)})"


# ---------------------------------------------------------------- private


def _messages(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a node whose texts are messages."""
    if isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    elif isinstance(node, ast.Call):
        name, of = _name(node.func), _name(getattr(node.func, "value", None))
        if (
            (name.endswith("Error") and name[0].isupper())
            or name == "explain"
            or (name in LOG_METHODS and of.lower().strip("_") in LOGGERS)
        ):
            yield from _arguments(node)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _texts(node: ast.expr) -> Iterator[ast.expr]:
    """The strings, f-strings and variables of which a message is put together. Arguments of other calls are none."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr() | ast.Name():
            yield node
        case ast.Call(func=ast.Attribute(value=ast.Constant() | ast.JoinedStr() as text)):  # "{} rows".format(count)
            yield from _texts(text)
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            yield from _texts(left)
            yield from _texts(right)
        case ast.BoolOp(values=values) | ast.Tuple(elts=values):
            for value in values:
                yield from _texts(value)


def _local_messages(function: ast.AST, read: set[int]) -> Iterator[ast.expr]:
    """The texts assigned to variables of a function that only messages read; `read` has the nodes that messages read."""
    nodes = list(ast.walk(function))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    assigned = [(list(_texts(node.targets[0])), node.value) for node in nodes if _is_plain_assignment(node)]
    plain = {id(target) for targets, _ in assigned for target in targets}
    other = {node.id for node in names if id(node) not in (read if isinstance(node.ctx, ast.Load) else plain)}
    other |= {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    if any(isinstance(node, ast.ClassDef) for node in nodes) or not other.isdisjoint(_ALL_LOCALS):
        return
    for targets, value in assigned:
        if {target.id for target in targets if isinstance(target, ast.Name)}.isdisjoint(other):
            yield from _texts(value)


def _is_plain_assignment(node: ast.AST) -> TypeGuard[ast.Assign]:
    """True for `name = value` and `name, name = value`."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return False
    target = node.targets[0]
    return all(isinstance(one, ast.Name) for one in (target.elts if isinstance(target, ast.Tuple) else [target]))


def _is_text(node: Any) -> bool:
    """True for a statement that is only a string: the docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
