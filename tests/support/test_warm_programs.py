"""Programs that are forks: what they see, how they end, and what they cannot leave to each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_programs
from tests.support.forks import soon
from tests.support.warm_programs import ROOT, EngineProgram, end_parents, start_program

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs are no forks"),
]
PROGRAM = """
import json, os, sys, time
seen = ["deepspeed" in sys.modules, sys.argv[1:], os.environ.get("ONLY_HERE"), os.getcwd(), __name__]
seen += [os.environ.get("LEFT"), hasattr(sys, "left")]  # by a program before this one
os.environ["LEFT"] = sys.left = "over"
print(json.dumps(seen))
print("an error", file=sys.stderr)
{then}
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a program; its last line is given."""
    monkeypatch.chdir(tmp_path)

    def start_named(name: str, then: str, **environment: str) -> EngineProgram:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        program = tmp_path / f"{name}.py"
        program.write_text(PROGRAM.format(then=then))
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        return start_program("deepspeed", [program, name, 7], variables, tmp_path / f"said by {name}")

    return start_named


def output_of(name: str, folder: Path, only_here: str) -> str:
    return f'[true, ["{name}", "7"], {only_here}, "{folder}", "__main__", null, false]\n'


def test_programs_run_at_the_same_time_with_their_own_environment_output_and_status(start, tmp_path):
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    first = start("first", waits, ONLY_HERE="here")
    second = start("second", f"open({str(tmp_path / 'go')!r}, 'w'); sys.exit(3)")
    assert (second.communicate(timeout=100), second.returncode) == (
        (output_of("second", tmp_path, "null"), "an error\n"),
        3,
    )
    assert (first.communicate(timeout=100), first.returncode) == (
        (output_of("first", tmp_path, '"here"'), "an error\n"),
        0,
    )


def test_a_program_that_takes_too_long_can_be_killed(start):
    hanging = start("hanging", "time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        hanging.communicate(timeout=0.2)
    hanging.kill()
    hanging.communicate(timeout=100)
    assert hanging.returncode == -9
    hanging.kill()  # of a process id that is free again: nothing


def test_a_parent_ends_and_its_programs_continue(start, tmp_path):
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    start("waiting", f"{waits}; open({str(tmp_path / 'done')!r}, 'w')")
    (parent,) = warm_programs._parents.values()
    end_parents()
    assert parent._process.returncode == 0 and not warm_programs._parents
    (tmp_path / "go").touch()
    soon((tmp_path / "done").exists)
