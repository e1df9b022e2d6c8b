"""The steps of the first day on a GPU that take minutes (`make gpu` has all of them)."""

import pytest

from benchmarks.gpu.__main__ import run_apart
from benchmarks.gpu.steps import STEPS, Place

SHORT = (
    "imports",
    "train",
    "sync",
    "adapters",
    "experts",
    "sleep",
    *(name for name in STEPS if name.startswith("generate")),
)


@pytest.mark.parametrize("name", SHORT)
def test_a_step_passes(name, tmp_path):
    result = run_apart(STEPS[name], Place("cuda", tmp_path))
    assert result.status == "passed", result
