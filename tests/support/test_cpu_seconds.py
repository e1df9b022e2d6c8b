"""Every process here computes for a known number of CPU seconds, so that the clock can be compared with it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import recorded_seconds
from tests.support.cpu_seconds import CpuClock, main
from tests.support.recorded_seconds import unlike_recorded, write_recorded

ROOT = Path(__file__).parents[2]
SPIN = "import time\nwhile time.process_time() < {seconds}: pass\n"
SPUN = 0.6
"""CPU seconds of a spinning process."""
ROUNDED = 0.06
"""/proc counts in hundredths of a second, for user and system time of each process; three processes at most."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def spin(seconds: float = SPUN) -> list[str]:
    return [sys.executable, "-c", SPIN.format(seconds=seconds)]


def in_a_program(body: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, subprocess, sys, time\nSPIN = {spin()!r}\n{body}"]


def test_seconds_of_a_process_that_still_lives_count() -> None:
    clock = CpuClock()
    began = clock.read()
    program = in_a_program("while time.process_time() < 0.6: pass\nprint(flush=True)\ntime.sleep(600)")
    with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        living = clock.read() - began
        child.kill()
    assert living >= SPUN - ROUNDED
    assert clock.read() - began == pytest.approx(living, abs=ROUNDED), "and count once when it has ended"


def test_seconds_of_a_child_count_whose_parent_ignores_its_end() -> None:
    """As Ray's raylet does: the kernel adds such a child to nobody's children, so the control sees nothing."""
    clock = CpuClock()
    began = clock.read()
    body = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.spawnv(os.P_NOWAIT, SPIN[0], SPIN)\ninput()"
    with subprocess.Popen(in_a_program(body), stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while clock.read() - began < SPUN - ROUNDED:
            assert time.monotonic() < deadline, "its seconds were never seen"
            time.sleep(0.02)
        child.communicate(b"\n")
    assert clock.read() - began >= SPUN - 2 * ROUNDED


def test_seconds_of_an_orphan_count() -> None:
    clock = CpuClock()
    began = clock.read()
    body = f"child = subprocess.Popen({spin(2 * SPUN)!r})\nprint(flush=True)\ninput()"
    with subprocess.Popen(in_a_program(body), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        clock.read()  # while it still has its parent
        child.communicate(b"\n")
    deadline = time.monotonic() + 60
    while clock.read() - began < 2 * SPUN - ROUNDED:
        assert time.monotonic() < deadline, "the seconds of the orphan were never seen"
        time.sleep(0.02)


def test_a_phase_has_the_status_of_its_command_and_the_seconds_of_all_its_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = str(tmp_path / "table")
    script = Path(__file__).with_name("cpu_seconds.py")
    # A grandchild that nobody waits for, and that ends after the command: its seconds belong to the phase.
    body = "subprocess.Popen(SPIN, start_new_session=True)\nsys.exit(3)"
    program = [sys.executable, str(script), table, "a phase", *in_a_program(body)]
    assert subprocess.run(program, check=False, timeout=120).returncode == 3
    assert main([table]) == 0
    lines = capfd.readouterr().out.splitlines()
    name, wall, cpu, status = lines[2].rsplit(maxsplit=3)
    assert (name, status) == ("a phase", "failed") and int(wall) >= 1 and int(cpu) >= 1
    assert lines[3].split()[0] == "all"


def test_a_phase_stops_what_its_command_leaves_running_and_says_so(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.support import cpu_seconds\ncpu_seconds.PATIENCE = 0.5\n"
        f"sys.exit(cpu_seconds.run_phase(Path({str(tmp_path / 'table')!r}), 'one', sys.argv[1:]))"
    )
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen(['sleep', '987'], start_new_session=True)"
    program = [sys.executable, "-c", code, *in_a_program(body)]
    done = subprocess.run(program, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True)
    assert "one: left running and stopped" in done.stdout and "sleep 987" in done.stdout


@pytest.mark.parametrize(
    ("taken", "unlike"),
    [
        ({"a": 10.0, "b": 20.0}, []),
        ({"a": 30.0, "b": 60.0}, []),  # a machine of a third of the speed
        ({"a": 10.0, "b": 60.0}, ["a"]),  # speed 70 / 30, so that 23.3 and 46.7 are expected: 10 is below half of 23.3
        ({"a": 10.0, "b": 20.0, "new": 9.9}, []),
        ({"a": 10.0, "b": 20.0, "new": 10.1}, ["new"]),
        ({"a": 19.0, "b": 20.0}, []),  # twice of what is expected, but only 9 seconds more
        ({"b": 20.0}, []),  # a part of the files
    ],
)
def test_a_file_whose_share_has_doubled_or_halved_is_named(taken: dict[str, float], unlike: list[str]) -> None:
    found = unlike_recorded(taken, {"a": 10.0, "b": 20.0})
    assert [line.split(" = ")[0] for line in found] == unlike


def test_a_file_with_skipped_tests_may_take_less_but_not_more() -> None:
    recorded = {"a": 10.0, "b": 20.0, "slurm": 130.0}
    assert unlike_recorded({"a": 10.0, "b": 20.0, "slurm": 0.3}, recorded, {"slurm"}) == []
    assert len(unlike_recorded({"a": 10.0, "b": 20.0, "slurm": 300.0}, recorded, {"slurm"})) == 1
    assert len(unlike_recorded({"a": 10.0, "b": 20.0, "slurm": 0.3}, recorded)) == 2  # b has more of what is left


@pytest.mark.parametrize("status", [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED])
def test_only_a_run_that_passes_is_recorded(status: pytest.ExitCode, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorded_seconds, "SECONDS", tmp_path / "seconds.json")
    former = {"files": {"ran.py": 2.0}, "tests": {}, "fixtures": {}}
    (tmp_path / "seconds.json").write_text(json.dumps(former))
    recorder = recorded_seconds.Recorder(record=True, check=False)
    recorder.taken["files"]["ran.py"] = 1.0
    recorder.pytest_sessionfinish(SimpleNamespace(exitstatus=status, config=SimpleNamespace(rootpath=tmp_path)))
    seconds = 1.0 if status == pytest.ExitCode.OK else 2.0
    assert recorded_seconds.read_recorded()["files"] == {"ran.py": seconds}


def test_what_is_recorded_has_the_tests_that_ran_and_the_files_that_did_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorded_seconds, "SECONDS", tmp_path / "seconds.json")
    for file in ("ran.py", "left_out.py"):
        (tmp_path / file).touch()
    former = {f"{file}.py::test_former": 2.0 for file in ("ran", "left_out", "removed")}
    recorded = {"files": dict.fromkeys(("ran.py", "left_out.py", "removed.py"), 2.0), "tests": former, "fixtures": {}}
    taken = {"files": {"ran.py": 3.0}, "tests": {"ran.py::test_new": 2.9, "ran.py::test_quick": 0.1}, "fixtures": {}}
    write_recorded(taken, recorded, tmp_path)
    assert recorded_seconds.read_recorded() == {
        "files": {"ran.py": 3.0, "left_out.py": 2.0},
        "tests": {"ran.py::test_new": 2.9, "left_out.py::test_former": 2.0},
        "fixtures": {},
    }
