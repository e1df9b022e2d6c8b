from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.home import Home, client_environment
from pipelines.services import private_server


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """One Prefect server for all tests; the client of this process talks to it."""
    home = Home(tmp_path_factory.mktemp("home"))
    with private_server(home) as server:
        before = dict(os.environ)
        os.environ.update(client_environment(home, prefect_port=server.port))
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        server.wait()
        yield home
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").make()
