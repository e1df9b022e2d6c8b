from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines import services
from pipelines.cli import main
from pipelines.home import Home
from rlhf_core.tracking import owner


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert services.claim_port(port) > port


def test_a_port_is_given_once_although_nobody_listens_on_it_yet() -> None:
    first = services.claim_port(43210)
    assert services.is_free(first)
    assert services.claim_port(first) > first


def test_services_that_do_not_answer_are_not_well(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    services.Services(owner.tags(), 1, 2, ready=True).write(home)
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    assert main(["status"]) == 1
    assert capsys.readouterr().out.count("does not answer") == 2


def test_services_of_a_dead_supervisor_are_not_running(home: Home) -> None:
    assert services.running(home) is None
    alive = services.Services(owner.tags(), 4200, 5000, ready=True)
    alive.write(home)
    assert services.running(home) == alive
    services.Services(owner.tags() | {"owner.pid_started": "1"}, 4200, 5000, ready=True).write(home)
    assert services.running(home) is None


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(services.ServiceError, match=r"ended with status 3; read .*server\.log"):
        services.await_health("http://127.0.0.1:9/", process, 5.0, tmp_path / "server.log")


def test_a_new_supervisor_waits_until_the_services_of_a_killed_one_are_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.await_end_of_last(home)  # nothing was up before: no wait
    with socket.socket() as still_there:
        still_there.bind(("127.0.0.1", 0))
        still_there.listen()
        port = still_there.getsockname()[1]
        services.Services(owner.tags() | {"owner.pid_started": "1"}, port, 1, ready=True).write(home)
        closing = threading.Timer(0.5, still_there.close)
        closing.start()
        services.await_end_of_last(home)
        assert not closing.is_alive()
    monkeypatch.setattr(services, "LAST_TIMEOUT_S", 0.2)
    with socket.socket() as stays:
        stays.bind(("127.0.0.1", 0))
        stays.listen()
        services.Services(owner.tags(), stays.getsockname()[1], 1, ready=True).write(home)
        services.await_end_of_last(home)  # a stranger's: we take another port in the end


def cli(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        env=os.environ | {"RLHF_HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
def test_up_serves_both_pages_and_the_deployments_restarts_what_dies_and_down_leaves_nothing(home: Home) -> None:
    try:
        up = cli(home, "up")
        assert up.returncode == 0, up.stderr
        found = services.running(home)
        assert found is not None and found.ready
        assert found.prefect_url in up.stdout and found.mlflow_url in up.stdout
        assert services.healthy(f"{found.prefect_url}/api/health") and services.healthy(f"{found.mlflow_url}/health")
        assert "answers" in cli(home, "status").stdout

        deployments = _post(f"{found.prefect_url}/api/deployments/filter")
        assert {"full", "rlvr", "sft", "reward-model", "iterative-dpo", "ppo", "evaluate"} <= {
            deployment["name"] for deployment in deployments
        }

        group = _children(found.pid)
        assert len(group) == 3
        os.kill(group[0], signal.SIGTERM)
        assert services.wait_for(lambda: len(set(_children(found.pid)) - {group[0]}) == 3, 60)
    finally:
        down = cli(home, "down")
    assert down.stdout.strip() == "stopped"
    assert services.running(home) is None
    assert services.wait_for(lambda: _processes_of(home) == [], 20)
    assert cli(home, "status").returncode == 1


def _post(url: str) -> list[dict[str, str]]:
    import urllib.request

    request = urllib.request.Request(url, b"{}", {"content-type": "application/json"})
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
