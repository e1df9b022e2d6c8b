import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.services import run_notes
from pipelines.services.home import Home
from pipelines.services.running import Services
from pipelines.services.servers import private_server
from tests.support.served import served
from tests.support.sharing import share

SERVERS = ("PREFECT", "MLFLOW_TRACKING", "MLFLOW_BACKEND", "MLFLOW_REGISTRY", "RLHF_OWN")
"""How the variables begin that may lead to servers or databases; tests end all runs that they find there."""


@contextmanager
def servers_forgotten(folder: Path) -> Iterator[None]:
    """Take from the environment all that may lead to a server or database of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(SERVERS)]:
            patch.delenv(name)
        patch.setenv("PREFECT_PROFILES_PATH", str(folder / "profiles.toml"))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_servers_of_the_user(tmp_path_factory) -> Iterator[None]:
    """Let no test talk to a Prefect or MLflow that whoever runs the tests has set, least of all in a profile of Prefect."""
    with servers_forgotten(tmp_path_factory.mktemp("profiles")):
        yield


@pytest.fixture
def services(migrated_home: Home) -> Iterator[Services]:
    """Start what `rlhf up` starts, for one test."""
    with served(migrated_home) as found:
        yield found


@contextmanager
def _start_prefect(root: Path) -> Iterator[Home]:
    home = Home(root)
    with private_server(home) as server:
        before = dict(os.environ)
        os.environ.update(server.environment)
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        server.wait()
        # SQLite's own copy: the server may be writing.
        with (
            closing(sqlite3.connect(home.prefect / "prefect.db")) as live,
            closing(sqlite3.connect(_empty_database(home))) as copy,
        ):
            live.backup(copy)
        yield home
        os.environ.clear()
        os.environ.update(before)
        refresh_global_settings_context()


@pytest.fixture(scope="module")
def prefect_home(request: pytest.FixtureRequest, tmp_path_factory) -> Home:
    """One Prefect server for all tests, empty for each file; the client of this process talks to it."""
    home = share(request.session, "prefect_home", lambda: _start_prefect(tmp_path_factory.mktemp("home")))
    _forget_runs(home)
    return home


def _forget_runs(home: Home) -> None:
    """Take runs, deployments and pools that another file has left from the server, and the records of its runs."""
    with (
        closing(sqlite3.connect(_empty_database(home))) as empty,
        closing(sqlite3.connect(home.prefect / "prefect.db", timeout=60)) as live,
    ):
        empty.backup(live)
    shutil.rmtree(run_notes.folder(home), ignore_errors=True)


def _empty_database(home: Home) -> Path:
    return home.root / "empty.db"


@pytest.fixture
def migrated_home(home: Home, prefect_home: Home) -> Home:
    """A state folder with an empty database of Prefect, which takes 5 CPU seconds to make."""
    shutil.copy(_empty_database(prefect_home), home.prefect / "prefect.db")
    return home


@pytest.fixture
def client(prefect_home: Home) -> Iterator[Any]:
    """A client of that server; deployments that the test makes there do not outlive it."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client
        for deployment in client.read_deployments():
            client.delete_deployment(deployment.id)


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "home").make()
