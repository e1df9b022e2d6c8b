import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipelines.cli.main import main
from pipelines.services import servers
from pipelines.services.home import Home, basic
from pipelines.services.running import Services, healthy, is_free, running, wait_for
from rlhf_core.tracking import mlflow_client


def test_services_that_do_not_answer_are_not_well(home, capsys, monkeypatch):
    Services(mlflow_client.owner_tags(), 1, 2, ready=True).write(home)
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    assert main(["status"]) == 1
    assert capsys.readouterr().out.count("does not answer") == 2


def cli(home: Home, *arguments: str, folder: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pipelines.cli.main", *arguments],
        cwd=folder,
        env=os.environ | {"RLHF_HOME": str(home.root)} | changes,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize("verb", ["up", "resume", "reconcile"])
def test_a_server_of_the_users_that_does_not_answer_is_one_error(home, verb):
    # In a process of its own: Prefect sets up the log of the process that imports it first with such settings.
    done = cli(home, verb, PREFECT_API_URL="http://me:hunter2@127.0.0.1:9/api", RLHF_OWN_SETTINGS="")
    assert done.returncode == 2
    assert done.stderr.startswith("PREFECT_API_URL = http://***@127.0.0.1:9/api: does not answer (ConnectError")
    assert done.stderr.count("\n") == 1 and "hunter2" not in done.stderr + done.stdout
    assert running(home) is None and not (home.prefect / "prefect.db").exists()


def test_a_tracking_server_that_does_not_answer_is_one_error(home, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert main(["up"]) == 2
    assert capsys.readouterr().err.startswith("MLFLOW_TRACKING_URI = http://***@127.0.0.1:9: does not answer; start it")


LISTENER = cast(socket.socket, SimpleNamespace(fileno=lambda: 3, getsockname=lambda: ("127.0.0.1", 5000)))


class Replaced(Exception):
    """Stands for the supervisor that takes the place of this process."""


def environment_of_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    given: dict[str, str] = {}

    def execve(_: str, command: list[str], environment: dict[str, str]) -> None:
        assert "hunter2" not in " ".join(command)
        given.update(environment)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced):
        servers.start_services(home, foreground=True)
    return given


def test_the_auth_string_ends_with_the_servers_it_was_for(home):
    first = home.prefect_auth_string
    assert first == home.prefect_auth_string and home.prefect_auth.stat().st_mode & 0o077 == 0
    servers.stop_services(home)
    assert home.prefect_auth_string != first


@pytest.mark.parametrize("uri", ["postgresql://me:hunter2@db:5432/mlflow", "sqlite:///mine.db"])
def test_a_tracking_database_of_the_users_is_what_our_mlflow_server_shows_and_no_password_is_on_its_command_line(
    home, monkeypatch, uri
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "sqlite:///stale.db")
    monkeypatch.setattr(servers, "check_databases", lambda: None)  # the driver may not be installed here
    command = servers.mlflow_command(home, LISTENER)
    assert "--backend-store-uri" not in command and "hunter2" not in " ".join(command)
    assert environment_of_up(home, monkeypatch)["MLFLOW_BACKEND_STORE_URI"] == uri
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    command = servers.mlflow_command(home, LISTENER)
    assert command[command.index("--backend-store-uri") + 1] == home.mlflow_uri


def test_the_installed_mlflow_server_takes_its_store_from_the_environment(home, monkeypatch):
    import mlflow.cli
    import mlflow.server
    import mlflow.server.handlers
    from click.testing import CliRunner

    stores: list[str] = []
    monkeypatch.setattr(mlflow.server.handlers, "initialize_backend_stores", lambda *_, **__: None)
    monkeypatch.setattr(mlflow.server, "_run_server", lambda **given: stores.append(given["file_store_path"]))
    theirs = "postgresql://me:hunter2@db:5432/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", theirs)
    command = servers.mlflow_command(home, LISTENER)
    done = CliRunner().invoke(mlflow.cli.cli, command[command.index("server") :], env=servers.mlflow_environment())
    assert (done.exit_code, stores) == (0, [theirs]), done.output
    assert "hunter2" not in done.output, "it goes to the log"


@pytest.mark.slow
def test_up_serves_both_pages_and_the_deployments_restarts_what_dies_and_down_leaves_nothing(home, tmp_path):
    trap = tmp_path / "somebody's folder"
    for name in ("pipelines", "prefect", "mlflow", "uvicorn", "psutil"):
        (trap / name).mkdir(parents=True)
        (trap / name / "__init__.py").write_text(
            f"open({str(trap / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)"
        )
    try:
        up = cli(home, "up", folder=trap)
        assert up.returncode == 0, up.stderr
        assert not (trap / "ran").exists(), "what lies in the working folder is not part of the program"
        found = running(home)
        assert found is not None and found.ready
        assert found.prefect_url in up.stdout and found.mlflow_url in up.stdout
        assert found.well(home)
        assert "answers" in cli(home, "status").stdout
        for page in (up.stdout, cli(home, "status").stdout, (home.logs / "supervisor.log").read_text()):
            assert home.prefect_auth_string not in page and "/sign-in" not in page, (
                "it is not a terminal: a log keeps it"
            )

        deployments = _post(f"{found.prefect_url}/api/deployments/filter", home.prefect_auth_string)
        assert {"full", "rlvr", "sft", "reward-model", "iterative-dpo", "ppo", "evaluate"} <= {
            deployment["name"] for deployment in deployments
        }

        group = _children(found.pid)
        assert len(group) == 3
        os.kill(group[0], signal.SIGTERM)
        assert not is_free(found.prefect_port) and not is_free(found.mlflow_port), "a port is kept for its next server"
        assert wait_for(lambda: len(set(_children(found.pid)) - {group[0]}) == 3, 60)
    finally:
        down = cli(home, "down")
    assert not (trap / "ran").exists()
    assert down.stdout.strip() == "stopped"
    assert running(home) is None
    assert wait_for(lambda: _processes_of(home) == [], 20)
    assert cli(home, "status").returncode == 1


@pytest.mark.slow
def test_with_a_server_of_the_users_up_serves_there_and_starts_none_of_ours(home, prefect_home):
    theirs = {"PREFECT_API_URL": os.environ["PREFECT_API_URL"], "RLHF_OWN_SETTINGS": ""}
    try:
        up = cli(home, "up", **theirs)
        assert up.returncode == 0, up.stderr
        found = running(home)
        assert found is not None and found.ready and found.prefect_api == theirs["PREFECT_API_URL"]
        assert f"Prefect  {found.prefect_url}\n" in up.stdout and "PREFECT_API_URL=" not in up.stdout
        assert len(_children(found.pid)) == 2, "MLflow and the deployments"
        tag = f"rlhf-home-{home.identity}"
        found_there = _post(f"{theirs['PREFECT_API_URL']}/deployments/filter", prefect_home.prefect_auth_string)
        served = {one["name"] for one in found_there if tag in one["tags"]}
        assert {"full", "rlvr", "sft", "process-reward-model", "publish"} <= served
        status = cli(home, "status", **theirs)
        assert status.returncode == 0 and status.stdout.count("answers") == 2
        other = Home(home.root.parent / "other").make()
        refused = cli(other, "up", **theirs)
        assert refused.returncode == 2 and "is served by another state folder on this Prefect server" in refused.stderr
    finally:
        down = cli(home, "down", **theirs)
    assert down.stdout.strip() == "stopped"
    assert wait_for(lambda: _processes_of(home) == [], 20)
    assert healthy(theirs["PREFECT_API_URL"] + "/health"), "it is not ours to stop"
    assert not (home.prefect / "prefect.db").exists()


def _post(url: str, auth: str) -> list[dict[str, Any]]:
    import urllib.request

    headers = {"content-type": "application/json", "authorization": f"Basic {basic(auth)}"}
    request = urllib.request.Request(url, b"{}", headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return list(json.load(response))


def _children(pid: int) -> list[int]:
    import psutil

    living = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between the listing and the look
            if child.status() != psutil.STATUS_ZOMBIE:
                living.append(child.pid)
    return living


def _processes_of(home: Home) -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLHF_HOME") == str(home.root):
                found.append(" ".join(process.cmdline()))
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
