"""Tests marked `full` are left out, counted once however many workers there are, and run with FULL=1."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = {
    "conftest.py": """
from tests.support.full_runs import FullRuns

def pytest_sessionstart(session):
    session.config.pluginmanager.register(FullRuns())
""",
    "pytest.ini": "[pytest]\nmarkers = full: a variant\n    other: of -m\n",
    "test_it.py": """
import pytest

def test_quick(): pass

@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2])
def test_variants(number): pass

@pytest.mark.full
@pytest.mark.other
def test_other(): pass
""",
}
REMEDY = "marked `full`: make test-all FULL=1 runs everything"


def run_pytest(folder: Path, *options: str, full: str = "") -> str:
    for name, text in PROJECT.items():
        (folder / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "FULL": full}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60).stdout


def test_variants_are_left_out_with_a_line_that_says_how_to_run_them(tmp_path):
    found = run_pytest(tmp_path, "-n", "2")
    assert "1 passed" in found and f"left out 3 tests {REMEDY}" in found


def test_only_what_is_selected_is_counted_and_everything_runs_with_full(tmp_path):
    assert f"left out 1 test {REMEDY}" in run_pytest(tmp_path, "-m", "other or not full")
    found = run_pytest(tmp_path, full="1")
    assert "4 passed" in found and "left out" not in found
