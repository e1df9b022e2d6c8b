import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.services.home import Home
from pipelines.services.running import Services
from pipelines.services.servers import private_server
from tests.support.served import served

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
def services(home: Home) -> Iterator[Services]:
    """Start what `rlhf up` starts, for one test."""
    with served(home) as found:
        yield found


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory) -> Iterator[Home]:
    """One Prefect server for all tests; the client of this process talks to it."""
    home = Home(tmp_path_factory.mktemp("home"))
    with private_server(home) as server:
        before = dict(os.environ)
        os.environ.update(server.environment)
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        server.wait()
        yield home
        os.environ.clear()
        os.environ.update(before)


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
