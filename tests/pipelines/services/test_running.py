"""The record of running services, their ports, and whether they answer and are ours."""

import os
import re
import socket
import subprocess
import sys

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pipelines.services.home import basic
from pipelines.services.running import (
    LAST_PORT,
    ServiceError,
    Services,
    await_health,
    bound_port,
    database_problem,
    healthy,
    is_free,
    port_of,
    proven,
    reason_in,
    running,
    status_and_proof,
)
from rlhf_core.http.door import PROOF, Door
from rlhf_core.tracking import mlflow_client
from tests.support.reward_servers import serving


def test_services_of_a_dead_supervisor_are_not_running(home):
    assert running(home) is None
    alive = Services(mlflow_client.owner_tags(), 4200, 5000, ready=True)
    alive.write(home)
    assert running(home) == alive
    Services(mlflow_client.owner_tags() | {"owner.pid_started": "1"}, 4200, 5000, ready=True).write(home)
    assert running(home) is None


def test_servers_of_the_user_take_the_place_of_ours_and_secrets_are_not_printed(home):
    found = Services(
        mlflow_client.owner_tags(),
        0,
        0,
        ready=True,
        prefect_api="http://me:hunter2@p:4200/api",
        mlflow_uri="https://me:hunter2@m",
    )
    found.write(home)
    assert home.services.stat().st_mode & 0o777 == 0o600
    assert running(home) == found and found.health == {} and found.well(home)
    assert (found.prefect_url, found.mlflow_url) == ("http://***@p:4200", "https://***@m")
    assert found.environment(home)["PREFECT_API_URL"] == "http://me:hunter2@p:4200/api"
    assert found.tracking_uri == "https://me:hunter2@m"
    assert not (home.root / "prefect_address").exists()


def test_no_port_after_the_last_one_is_tried():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", LAST_PORT))
        taken.listen()
        with pytest.raises(ServiceError, match=f"port = {LAST_PORT}: "):
            bound_port(LAST_PORT)


@pytest.mark.parametrize("port", [-1, LAST_PORT + 1])
def test_what_is_no_port_is_refused(port):
    with pytest.raises(ServiceError, match=f"port = {port}: must be from 0 to 65535"):
        bound_port(port)


def test_a_port_is_given_once_whatever_the_temporary_folder_and_again_when_it_is_free(monkeypatch, tmp_path):
    with bound_port(43210) as first:
        port = port_of(first)
        assert not is_free(port)
        code = f"from pipelines.services.running import *; print(port_of(bound_port({port})))"
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # as another Slurm job has it
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(other.stdout) > port
    assert is_free(port)
    with bound_port(port) as again:
        assert port_of(again) == port


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(ServiceError, match=r"ended with status 3; read .*server\.log"):
        await_health("http://127.0.0.1:9/", "key", process, 5.0, tmp_path / "server.log")


def test_a_server_that_could_not_start_is_reported_with_the_reason_in_its_log(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    said = "sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) file is not a database"
    (tmp_path / "server.log").write_text(
        f"Traceback\n  File x\nKeyError: 1\n  result = f()\n{said}\n(Background on this)\n"
    )
    with pytest.raises(ServiceError, match=rf"status 3 \({re.escape(said)}\); read "):
        await_health("http://127.0.0.1:9/", "key", process, 5.0, tmp_path / "server.log")


@pytest.mark.parametrize(
    ("failure", "rule"),
    [
        (
            "alembic.util.exc.CommandError: Can't locate revision identified by 'f00d'",
            "a newer version of Prefect has changed it",
        ),
        ("sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) file is not a database", "it is damaged"),
        ("sqlalchemy.exc.DatabaseError: database disk image is malformed", "it is damaged"),
    ],
)
def test_a_database_that_prefect_cannot_use_is_named_with_a_remedy(tmp_path, failure, rule):
    database, log = tmp_path / "prefect.db", tmp_path / "server.log"
    old = "OldError: of an earlier start\n"
    text = f"Traceback\n{failure}\n(Background)\n"
    log.write_text(f"{old}{text}{database_problem(text, f'sqlite+aiosqlite:///{database}')}")
    said = reason_in(log, after=len(old))
    assert said.startswith(f" (DatabaseError: {database}: {rule} (") and "move prefect.db* away" in said
    assert reason_in(log, after=log.stat().st_size) == "" == database_problem("OSError: disk full", "sqlite:///x")


def test_a_stranger_who_passes_our_questions_on_to_a_server_of_ours_proves_nothing():
    well = PlainTextResponse("well")
    with serving(Door(well, authorization="Basic x", open_to=lambda scope: True, key="key")) as ours:

        async def passing_on(scope: Scope, receive: Receive, send: Send) -> None:
            nonce = next(value.decode() for name, value in scope["headers"] if name == b"x-rlhf-nonce")
            await PlainTextResponse("well", headers={PROOF: status_and_proof(ours, nonce)[1]})(scope, receive, send)

        assert proven(ours, "key") and not proven(ours, "another")
        for stranger in (passing_on, well):
            with serving(stranger) as theirs:
                assert healthy(theirs) and not proven(theirs, "key")


def test_our_prefect_server_proves_that_it_has_the_auth_string(prefect_home):
    url = f"{os.environ['PREFECT_API_URL']}/health"
    assert proven(url, prefect_home.prefect_auth_string) and not proven(url, basic("guess"))
