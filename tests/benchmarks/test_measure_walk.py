"""The walk of a prompt: how it is counted, and that docs/where_a_prompt_goes.md follows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.measure_walk import ROOT, trace_step

PAGE = ROOT / "docs" / "where_a_prompt_goes.md"
STEP = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")


def steps_under(heading: str) -> list[tuple[str, str]]:
    """Return (file, function) of the numbered lines below a heading of the page."""
    below = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [(found[1], found[2]) for line in below.splitlines() if line[:1].isdigit() and (found := STEP.search(line))]


def names_in(file: Path) -> set[str]:
    """Return the functions and classes of a file, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("file", "name"), sorted(set(STEP.findall(PAGE.read_text()))))
def test_every_function_that_the_page_names_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert name in names_in(ROOT / file)


def test_every_numbered_line_of_the_page_has_a_file_and_a_function() -> None:
    numbered = re.findall(r"^\d+\. ", PAGE.read_text(), flags=re.MULTILINE)
    assert len(numbered) == len(steps_under("The prompt")) + len(steps_under("`ppo.kl_coef`")) > 30


@pytest.mark.slow
def test_a_prompt_walks_as_the_page_says() -> None:
    trace = trace_step()
    first = {call: number for number, call in reversed(list(enumerate(trace.calls)))}
    walked = steps_under("The prompt")
    assert [step for step in walked if step not in first] == []
    assert sorted(walked, key=lambda step: first[step]) == walked, "the page lists the calls in another order"
