"""A run keeps the Prefect server that it uses: real sockets, and a real server of Prefect's."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pipelines.services import servers
from pipelines.services.handover import kept_prefect, offered, received
from pipelines.services.home import Home
from pipelines.services.running import Services, bound_port, is_free, port_of, proven, running, wait_for
from rlhf_core.processes.identity import process_stat
from rlhf_core.tracking import mlflow_client


@contextmanager
def supervisor(home: Home) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, Services]]:
    """A process that stands for `rlhf up`, and the socket of its Prefect server, which does not answer."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = process_stat(process.pid)
    assert found is not None
    owner = mlflow_client.owner_tags() | {"owner.pid": str(process.pid), "owner.pid_started": str(found[1])}
    try:
        with closing(bound_port(43300)) as listener, offered(listener) as handover:
            services = Services(owner, port_of(listener), 1, ready=True, handover=handover)
            services.write(home)
            yield process, listener, services
    finally:
        process.kill()
        process.wait()


def test_a_run_has_the_socket_of_the_server_and_nobody_else_gets_its_port(home):
    with supervisor(home) as (_, listener, services):
        copy = received(services)
        assert copy is not None and port_of(copy) == services.prefect_port
        folder = Path(services.handover).parent
        assert folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o777 == 0o700
        listener.close()
        assert not is_free(services.prefect_port), "the run still has it"
        copy.close()
        assert is_free(services.prefect_port)
        assert received(replace(services, prefect_port=1)) is None, "the socket of another port"
    assert received(services) is None and not folder.exists()


def test_services_of_an_earlier_version_hand_nothing_over(home):
    assert received(Services(mlflow_client.owner_tags(), 4200, 5000, ready=True)) is None


@pytest.mark.slow
def test_a_server_stays_at_the_address_until_the_run_ends(migrated_home, monkeypatch):
    """As with `rlhf down`: the socket is closed, the process is gone, and its record and auth string are removed."""
    home = migrated_home
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with supervisor(home) as (process, listener, services):
        auth = home.prefect_auth_string
        with kept_prefect(home, services):
            process.kill()
            process.wait()
            listener.close()
            servers.forget(home)
            assert running(home) is None
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="Address already in use"):
                    stranger.bind(("127.0.0.1", services.prefect_port))
            assert wait_for(lambda: proven(services.health["prefect"], auth), 120)
            name, _, word = auth.partition(":")
            url = f"{os.environ['PREFECT_API_URL']}/flows/count"
            assert httpx.post(url, json={}, auth=(name, word), trust_env=False).json() == 0
        assert is_free(services.prefect_port), "the server ends with the run"
