"""Reward programs for the tests that they pass in the sandbox."""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from rlhf_contrib.sandbox.fusion import SandboxFusion
from rlhf_contrib.sandbox.local import (
    WALL_TIMES,
    Assertions,
    InputOutput,
    Limits,
    RunProgram,
    checks_nothing,
    find_isolation,
    run_program,
    run_tests,
)
from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.rewards.batches import NoReward
from rlhf_core.rewards.library.fences import Fence, fences, last_fence
from rlhf_core.rewards.library.labels import against_labels

_PYTHON = re.compile(r"i?py(thon)?\d*")


def code_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    score: Literal["all", "share"] = "all",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    workers: int = 2,
    allow_network: bool = False,
    sandbox_url: str = "",
    sandbox_headers: Mapping[str, str] = {},  # never changed
    **columns: Any,
) -> list[float | NoReward | None]:
    """Score 1.0 if the answer's program passes all tests of the label, else 0.0; "share" scores the fraction that pass.

    The program is the last Python code fence of the answer, else the last other fence that holds a program, else the
    whole answer. The label is `{"inputs": [...], "outputs": [...]}` for standard input and output, `{"tests": ["assert
    ...", ...]}`, or plain Python: each `assert` line is one test, any other code is a single test. The score is None
    without a label. DataError is raised for a label whose tests any program would pass. A program that exceeds a limit
    has failed; `timeout_s` is CPU time. If a program twice takes five times as long in wall time, it has no reward,
    because it waits or the machine is busy. With `sandbox_url`, a SandboxFusion server runs the programs instead of
    this machine; RewardError if the server returns no result.
    """
    if score not in ("all", "share"):
        raise ConfigError(explain("score", score, 'must be "all" or "share"', "use one of them"))
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)

    @functools.cache
    def tests_of(label: str) -> list[InputOutput | Assertions]:
        tests = read_tests(label)
        if not sandbox_url:
            _check_imports(tests, label)
        for test in tests:
            if isinstance(test, Assertions) and not _compares(test) and checks_nothing(test, limits=limits, run=run):
                rule, remedy = "has a test that checks nothing", "let it assert what the program does"
                raise _refusal(label, f"{rule}: {test.code[:80]!r}", remedy)
        return tests

    def judge(text: str, label: str) -> float | NoReward:
        tests = tests_of(label)
        verdict = run_tests(read_program(text), tests, limits=limits, run=run)
        if verdict.outcome == "stalled" or (score == "share" and not verdict.complete):
            return NoReward(
                f"the program took longer than {WALL_TIMES * timeout_s:g} s, and less CPU time than timeout_s"
            )
        return verdict.share if score == "share" else float(verdict.outcome == "passed")

    with _sandbox(sandbox_url, sandbox_headers, allow_network) as run, ThreadPoolExecutor(workers) as pool:
        pairs = zip(completions, labels, strict=True)
        return [
            one for found in pool.map(lambda pair: against_labels([pair[0]], [pair[1]], judge), pairs) for one in found
        ]


def read_program(text: str) -> str:
    r"""The last Python code fence of `text`, else the last other fence with a program, else all of `text`.

    A Python fence without statements is ignored. A fence that uses functions of earlier fences, as example calls do,
    is appended to these.

    >>> read_program("So:\n```python\nprint(1)\n```")
    'print(1)\n'
    """
    found = _continued(fences(text))
    choices: list[Callable[[Fence], bool]] = [
        lambda one: bool(_PYTHON.fullmatch(one.language)),
        lambda one: not one.language and _is_program(one.content),  # the last one may be its output
        lambda one: _is_program(one.content),
        lambda one: not one.language,
    ]
    contents = (last_fence(found, accepts) for accepts in choices)
    return next((one for one in contents if one is not None), text)


def _continued(found: Sequence[Fence]) -> list[Fence]:
    defined: dict[str, str] = {}
    made: list[Fence] = []
    for one in found:
        if not _PYTHON.fullmatch(one.language):
            made.append(one)
            continue
        try:
            tree = ast.parse(one.content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            made.append(one)
            continue
        used, own = _names(tree)
        earlier = dict.fromkeys(defined[name] for name in sorted(used - own) if name in defined)
        content = "\n".join((*earlier, one.content))
        if tree.body:
            made.append(Fence(one.language, content))
        tops = (
            node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        )
        defined |= dict.fromkeys(tops, content)
    return made


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a program reads, and the names that it binds anywhere or that are builtins."""
    used, own = set[str](), set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.alias(name=name):
                own.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.ExceptHandler(name=str(name)):
                own.add(name)
    return used, own


def _is_program(text: str) -> bool:
    """Whether `text` is Python that does something; a bare value is taken for the output of a program."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(one, ast.Expr) or isinstance(one.value, ast.Call) for one in body)


def read_tests(label: str) -> list[InputOutput | Assertions]:
    """Parse the tests of a label; DataError if it has none.

    >>> read_tests("assert f(1) == 2")
    [Assertions(code='assert f(1) == 2')]
    """
    try:
        content = json.loads(label)
    except (ValueError, RecursionError):
        return [_assertions(test, label) for test in _split(textwrap.dedent(label).strip(), label)]
    match content:
        case {"fn_name": name} if name:
            raise _refusal(label, f"calls {name!r} by its name", "write the calls as assert lines")
        case {"inputs": [*inputs], "outputs": [*outputs]} if inputs and len(inputs) == len(outputs):
            return _input_outputs(inputs, outputs, label)
        case {"tests": [*tests]} | [*tests] if tests and all(isinstance(test, str) for test in tests):
            return [_assertions(textwrap.dedent(test).strip(), label) for test in tests]
    raise _refusal(label, "holds no tests", 'give {"inputs": [...], "outputs": [...]} or assert lines')


# ---------------------------------------------------------------- private


def _sandbox(url: str, headers: Mapping[str, str], allow_network: bool) -> AbstractContextManager[RunProgram]:
    """Open the runner of programs: the server at `url`, or this machine's sandbox, which must support isolation."""
    if not url:
        if headers:
            rule, remedy = "goes to no server without sandbox_url", "give that, or leave the headers"
            raise ConfigError(explain("sandbox_headers", sorted(headers), rule, remedy))
        find_isolation(allow_network)  # before the threads: it is tried once
        return nullcontext(functools.partial(run_program, allow_network=allow_network))
    if allow_network:
        rule = "is for the sandbox of this machine; the server of sandbox_url has rules of its own"
        raise ConfigError(explain("allow_network", allow_network, rule, "leave it, and configure the server"))
    return SandboxFusion(url, headers)


def _input_outputs(inputs: Sequence[Any], outputs: Sequence[Any], label: str) -> list[InputOutput | Assertions]:
    for value in (*inputs, *outputs):
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise _refusal(label, f"has {type(value).__name__} for text", "give inputs and outputs as text")
    tests = [InputOutput(str(given), str(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    if not any(test.stdout.strip() for test in tests):
        raise _refusal(label, "expects no output: a program that does nothing would pass", "give what must be printed")
    return list(tests)


def _check_imports(tests: Sequence[InputOutput | Assertions], label: str) -> None:
    """Raise DataError for a test that imports a module which the sandbox of this machine does not provide."""
    waiting: list[ast.AST] = [_parsed(test.code, label) for test in tests if isinstance(test, Assertions)]
    while waiting:
        node = waiting.pop()
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                rule = f"imports {name or 'a module of its package'}, and the sandbox has the standard library alone"
                raise _refusal(label, rule, "write the test without it, or set sandbox_url to a server that has it")
        if not isinstance(node, ast.Try):  # which may handle the missing module
            waiting.extend(ast.iter_child_nodes(node))


def _split(code: str, label: str) -> list[str]:
    """Split `code` into single `assert` statements if it has nothing else; otherwise all of it is one test."""
    statements = _parsed(code, label).body
    if statements and all(isinstance(statement, ast.Assert) for statement in statements):
        return [ast.get_source_segment(code, statement) or "" for statement in statements]
    return [code]


def _assertions(code: str, label: str) -> Assertions:
    _parsed(code, label)
    return Assertions(code)


def _parsed(code: str, label: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last for brackets too deep
        raise _refusal(label, f"has a test that is no Python ({error})", "mend the test") from error


def _compares(test: Assertions) -> bool:
    """True for `assert f(...) == 4`, which checks something; no run is needed to see it."""
    match ast.parse(test.code).body:
        case [ast.Assert(test=ast.Compare(left=ast.Call(), ops=[ast.Eq()], comparators=[ast.Constant()]))]:
            return True
    return False


def _refusal(label: str, rule: str, remedy: str) -> DataError:
    return DataError(explain("label", label[:200], rule, remedy))
