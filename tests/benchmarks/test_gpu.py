"""The first day on a GPU, up to the device: its steps run on a CPU, and what fails is reported."""

import importlib
import json
import sys

import pytest
import torch

import benchmarks.gpu
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.steps import STEPS, Place, Step


def broken(place, figures):
    figures["so far"] = 1
    raise ValueError("out of luck")


@pytest.mark.parametrize(
    ("cuda", "text"),
    [("13.0", "sees no GPU on this machine; run it where"), (None, "is a build for CPUs; make clean-venv")],
)
def test_without_a_gpu_one_line_says_what_to_do(cuda, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("--device = 'cuda': torch ") and text in told.err and "--device cpu" in told.err
    assert not told.out and list(tmp_path.iterdir()) == []


def test_a_machine_without_torch_lacks_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"^torch is not installed for .*; make install$"):
        importlib.reload(benchmarks.gpu)


def test_a_step_that_fails_keeps_what_it_measured(tmp_path):
    assert gpu.run_here(Step("odd", "", broken, never_on_cpu="all"), Place("cpu", tmp_path)) == 0
    written = json.loads((tmp_path / "odd.json").read_text())
    assert (written["status"], written["figures"], written["error"]) == (
        "failed",
        {"so far": 1},
        "ValueError: out of luck",
    )
    lines = list(gpu.table([gpu.Result(**written)]))
    assert lines[1:] == [
        "| odd | failed | 0 | so far 1 |",
        "odd failed: ValueError: out of luck",
        "never run here: odd: all",
    ]


def test_a_step_has_a_time_limit_and_others_go_on(tmp_path, monkeypatch, capsys):
    hurried = Step("imports", "", STEPS["imports"].run, timeout_s=0.01)
    monkeypatch.setitem(STEPS, "imports", hurried)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--steps", "imports", "tests"]) == 1
    kept = {file.stem: json.loads(file.read_text())["status"] for file in tmp_path.glob("*.json")}
    assert kept == {"imports": "timed out", "tests": "not run"}
    assert "took more than 0.01 s" in capsys.readouterr().out


def test_the_table_is_in_a_file_and_names_steps_for_which_no_time_was_left(tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", "imports", "sync"]
    assert gpu.main([*arguments, "--minutes", "1"]) == 0  # a step may take 15 s, a quarter
    written = (tmp_path / "table.md").read_text()
    assert written.count("| not run |") == 2 and "never run here: sync: no time was left (--minutes)" in written
    assert written.strip() in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_that_a_cpu_can_run_pass_there(tmp_path, capsys):
    """One of each kind: what the others call is in these, or in tests of its own. `make gpu DEVICE=cpu` runs all."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    steps = ["imports", "train", "adapters", "grpo", "tests"]
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--steps", *steps]) == 0
    kept = {file.stem: json.loads(file.read_text())["status"] for file in tmp_path.glob("*.json")}
    assert kept == {name: "passed" if STEPS[name].on_cpu else "not run" for name in steps}
    told = capsys.readouterr().out
    assert all(f"never run here: {name}: " in told for name in steps)
