"""Runs of a work pool, by a real worker on a real server: in order of priority, as typed, and after both were killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.services.home import Home
from tests.support.small_pipeline import write_mini

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PATIENCE_S = 900.0
LIMITED = "[deployments]\nlimits = {prepare_data = 1}\n"


@pytest.fixture
def project(tmp_path, monkeypatch, prefect_home) -> Path:
    """A folder with a profile, and the state folder of a machine that knows the address of its team's server alone."""
    theirs = {name: os.environ[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    for name in [name for name in os.environ if name.startswith(("PREFECT", "MLFLOW", "RLHF_OWN"))]:
        monkeypatch.delenv(name)
    for name, value in {**theirs, "RLHF_HOME": str(tmp_path / "worker"), "RLHF_USER": "ada"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    write_mini(tmp_path, LIMITED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words: str, module: str = "pipelines.cli.main") -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *words], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def worker(folder: Path) -> Iterator[psutil.Process]:
    with (folder / "worker.log").open("ab") as log:
        command = [sys.executable, "-P", "-m", "pipelines.cli.main", "worker", "--pool", "gpus"]
        process = psutil.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.is_running():
                process.terminate()
            process.wait(120)


def until(read: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """Return what `read` gives as soon as that is good."""
    deadline = time.monotonic() + PATIENCE_S
    while not good(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_a_pool_runs_by_priority_and_its_dead_runs_get_their_state_and_slot(project, client):
    from prefect.client.schemas.filters import FlowRunFilter  # late: it reads the settings of the fixture

    made = typed("deploy", "mini.toml", "--pool", "gpus", "--name", "full", "--set", "name=slow")
    assert "rlhf-pipeline/full: made of profile" in made
    typed("deploy", "mini.toml", "--pool", "gpus", "--set", "deployments.priority=high", "--set", "seed=5")
    (project / "mini.toml").unlink()  # the profile is in the parameters
    found = {name: client.read_deployment_by_name(f"rlhf-pipeline/{name}") for name in ("full", "mini")}
    assert [(one.work_queue_name, one.tags[-1]) for one in found.values()] == [
        ("default", "user:ada"),
        ("high", "user:ada"),
    ]

    typed("deployment", "run", "rlhf-pipeline/full", "--param", "until=sft", module="prefect")
    [low] = client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id={"any_": [found["full"].id]}))
    high = client.create_flow_run_from_deployment(found["mini"].id, parameters={"until": "prepare_data"})
    with worker(project) as process:
        until(lambda: client.read_flow_run(low.id).labels, lambda labels: "owner.pid" in labels)
        for one in [process, *process.children()]:  # the worker first, which would report the other's end
            one.send_signal(signal.SIGKILL)
    low, high = (client.read_flow_run(one.id) for one in (low, high))
    assert (low.state.name, high.state.name) == ("Running", "Completed")
    assert high.end_time <= low.start_time, "the one in the queue `high` is first, though it came last"
    assert {"user:ada", "pipeline"} <= set(low.tags)
    assert client.read_global_concurrency_limit_by_name("stage:prepare_data").limit == 1

    with worker(project):
        state = until(lambda: client.read_flow_run(low.id).state, lambda state: state.is_final())
        assert (state.name, "ended without reporting a result" in state.message) == ("Crashed", True)
        again = client.create_flow_run_from_deployment(found["full"].id, parameters={"until": "prepare_data"})
        assert until(lambda: client.read_flow_run(again.id), ended).state.name == "Completed"


def ended(flow_run: Any) -> bool:
    return flow_run.state is not None and flow_run.state.is_final()


def test_without_a_server_that_is_shared_there_is_no_pool(tmp_path, monkeypatch, capsys):
    from pipelines.cli.main import main

    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for words in (["worker", "--pool", "gpus"], ["deploy", str(write_mini(tmp_path)), "--pool", "gpus"]):
        monkeypatch.setenv("PREFECT_API_URL", "")
        assert main(words) == 2
        assert "there is no Prefect server; set PREFECT_API_URL" in capsys.readouterr().err
    assert Home(tmp_path / "home").root.exists()
