"""Programs, rewarded for the tests that they pass in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.rewards.library.labels import against_labels
from rlhf_core.rewards.sandbox import Assertions, InputOutput, Limits, find_isolation, run_tests

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


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
    **columns: Any,
) -> list[float | None]:
    """Return 1.0 where the answer's program passes all tests of the label, else 0.0; `share`: the part that it passes.

    The program is the last Python code fence of the answer, or all of it. The label is `{"inputs": [...], "outputs":
    [...]}` for standard input and output, `{"tests": ["assert ...", ...]}`, or plain `assert` lines, one test each. None
    without a label. A program that hits a limit has failed: that is the program's doing, not the reward's.
    """
    if score not in ("all", "share"):
        raise ConfigError(explain("score", score, 'must be "all" or "share"', "use one of them"))
    find_isolation(allow_network)  # before the threads: it is tried once
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)

    def judge(text: str, label: str) -> float:
        verdict = run_tests(read_program(text), read_tests(label), limits=limits, allow_network=allow_network)
        return verdict.share if score == "share" else float(verdict.outcome == "passed")

    with ThreadPoolExecutor(workers) as pool:
        pairs = zip(completions, labels, strict=True)
        return [
            one for found in pool.map(lambda pair: against_labels([pair[0]], [pair[1]], judge), pairs) for one in found
        ]


def read_program(text: str) -> str:
    r"""Return the last Python code fence of `text`, else all of it.

    >>> read_program("So:\n```python\nprint(1)\n```")
    'print(1)\n'
    """
    fences = _FENCED.findall(text)
    return str(fences[-1]) if fences else text


def read_tests(label: str) -> list[InputOutput | Assertions]:
    """Return the tests of a label; DataError if it holds none.

    >>> read_tests("assert f(1) == 2")
    [Assertions(code='assert f(1) == 2')]
    """
    try:
        content = json.loads(label)
    except ValueError:
        content = {"tests": [line for line in label.splitlines() if line.strip()]}
    match content:
        case {"inputs": [*inputs], "outputs": [*outputs]} if inputs and len(inputs) == len(outputs):
            return [InputOutput(str(given), str(expected)) for given, expected in zip(inputs, outputs, strict=True)]
        case {"tests": [*tests]} | [*tests] if tests and all(isinstance(test, str) for test in tests):
            return [Assertions(test) for test in tests]
    raise DataError(
        explain("label", label[:200], "holds no tests", 'give {"inputs": [...], "outputs": [...]} or assert lines')
    )
