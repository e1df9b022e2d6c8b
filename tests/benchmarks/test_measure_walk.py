"""The walk of a prompt: docs/walk.md is what a real step does, and names what exists."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.measure_walk import ROOT, trace_step
from docs.generate_walk import OTHER_WAYS, PAGE, page


def names_in(file: Path) -> set[str]:
    """Return the functions and classes of a file, methods as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    inner = {f"{node.name}.{one.name}" for node in found for one in node.body if isinstance(one, kinds)}
    return inner | {node.name for node in found}


def test_every_function_that_the_page_names_by_hand_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", OTHER_WAYS)
    assert len(named) == 7
    assert [one for one in named if one[1] not in names_in(ROOT / one[0])] == []


@pytest.mark.slow
def test_the_page_is_the_trace_of_a_step() -> None:
    trace = trace_step()
    assert trace.switches() > len(trace.files()) > 20
    written = page(trace)
    steps = [
        written.find(f"`{name}`: ")
        for name in ("measure", "LocalTrainer.logprobs", "estimate", "LocalTrainer.optim_step")
    ]
    assert steps == sorted(steps) and steps[0] > 0, "the steps of PPO in their order"
    assert "`ClipLoss.loss`: " in written
    assert PAGE.read_text(encoding="utf-8") == written, "python -m docs.generate_walk"
