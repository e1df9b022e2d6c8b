import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import pipelines
from pipelines.cli import run_command
from pipelines.cli.main import main
from pipelines.execution import request
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.flows.profile import load_profile
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.small_pipeline import two_toys, write_mini

NOTEBOOK = Path(__file__).parents[3] / "docs" / "tutorial" / "python.ipynb"


@pytest.fixture
def toys(monkeypatch) -> None:
    """Let each run be two toy stages, without Prefect and MLflow, but with the setting of a Prefect server."""

    def run_flow(run: PipelineRun, *_: object) -> None:
        os.environ["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
        run_stages(run, two_toys, run.directly, tags={})

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(run_command, "lifecycle", two_toys)
    monkeypatch.setattr(run_command, "prefect_server", lambda home: nullcontext())
    monkeypatch.setattr(run_command, "open_tracker", lambda config, home: MemoryTracker())
    monkeypatch.setattr(run_command, "import_tracker", lambda home: None)
    monkeypatch.setattr("pipelines.cli.command_flow.run_flow", run_flow)


@pytest.mark.usefixtures("toys")
def test_a_run_from_python_returns_what_each_stage_made(tmp_path, capsys):
    before, home = dict(os.environ), tmp_path / "home"
    first = pipelines.run(write_mini(tmp_path), until="first", home=home)
    assert [(stage, one.decision) for stage, one in first.items()] == [("first", "RUN")]
    assert first["first"].path == home / "store" / "objects" / first["first"].digest[:2] / first["first"].digest
    both = pipelines.run(write_mini(tmp_path), home=home)
    assert [(one.decision, bool(one.metrics)) for one in both.values()] == [("HIT", True), ("RUN", True)]
    again = pipelines.run(write_mini(tmp_path), home=home)
    assert {one.decision for one in again.values()} == {"HIT"} and again["second"].digest == both["second"].digest
    assert pipelines.run(write_mini(tmp_path), force=["second"], home=home)["second"].decision == "RUN"
    assert dict(os.environ) == before
    assert "second: RUN: " in capsys.readouterr().out


@pytest.mark.usefixtures("toys")
def test_overrides_from_python_are_those_of_the_command_line(tmp_path, monkeypatch):
    given: list[list[str]] = []
    monkeypatch.setattr(
        request, "load_profile", lambda profile, changes: given.append(changes) or load_profile(profile, changes)
    )
    values = {"name": "5", "seed": 7, "ppo.kl.coef": 1e-5, "evaluate": None, "sft.loop": {"epochs": 2, "batch_size": 4}}
    pipelines.run(write_mini(tmp_path), overrides=values, home=tmp_path / "home")
    config = load_profile(write_mini(tmp_path), given[0])
    assert config.ppo is not None and config.sft is not None
    assert (config.name, config.seed, config.ppo.kl.coef, config.evaluate) == ("5", 7, 1e-5, None)
    assert (config.sft.loop.epochs, config.sft.loop.batch_size) == (2, 4)


@pytest.mark.parametrize(
    "arguments",
    [{"profile": "tiny/ful"}, {"overrides": {"ppo.kl_coeff": 0.1}}, {"until": "sfft"}, {"home": "a?b"}],
    ids=lambda one: next(iter(one)),
)
def test_an_error_has_the_text_of_the_command_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"profile": "tiny/full", "home": "home"} | arguments
    with pytest.raises(RlhfError) as raised:
        pipelines.run(**given)  # type: ignore[arg-type]
    monkeypatch.setenv("RLHF_HOME", str(given["home"]))
    words = ["--set", "ppo.kl_coeff=0.1"] if "overrides" in given else []
    words += ["--until", "sfft"] if "until" in given else []
    assert main(["run", str(given["profile"]), *words]) == 2
    assert capsys.readouterr().err == f"{raised.value}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"overrides": ["sft.max_length=5"]}, "overrides = .*: must map keys to values"), ({"force": "sft"}, r"force = 'sft': must be a list of stages; \['sft'\]")],
)  # fmt: skip
def test_arguments_of_another_type_are_refused(arguments, message, tmp_path):
    with pytest.raises(RlhfError, match=message):
        pipelines.run("tiny/full", home=tmp_path, **arguments)


@pytest.mark.slow
@pytest.mark.engine
def test_the_cells_of_the_notebook_run_as_in_jupyter(tmp_path, migrated_home):
    """They run one after the other while a loop of asyncio is running."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    script = f"""
import asyncio
async def notebook():
    for cell in {["".join(cell["source"]) for cell in cells]!r}:
        exec(cell, globals())
asyncio.run(notebook())
assert [one.decision for one in results.values()] == ["RUN", "RUN"], results
assert [one.decision for one in again.values()] == ["HIT", "HIT"], again
assert results["sft"].metrics["steps"] == 5, results["sft"].metrics
"""
    environment = os.environ | {"RLHF_HOME": str(migrated_home.root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr and "never awaited" not in done.stderr, done.stderr
