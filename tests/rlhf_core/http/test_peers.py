"""Who is at the other end of a connection, with real connections and, where we are root, another user."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rlhf_core.http.door import CONNECTIONS, Door, user_at
from tests.support.reward_servers import serving

pytestmark = pytest.mark.skipif(not CONNECTIONS[0].exists(), reason="needs Linux")
NOBODY = 65534


def status_of(path_url: str, user: int, said: Connection, family: socket.AddressFamily) -> None:
    """Say what status a process of another user gets."""
    os.setuid(user)
    parts = urlsplit(path_url)
    with socket.socket(family) as mine:
        mine.connect((f"::ffff:{parts.hostname}" if family == socket.AF_INET6 else parts.hostname, parts.port))
        client = http.client.HTTPConnection(str(parts.hostname), parts.port)
        client.sock = mine
        client.request("GET", parts.path)
        said.send(client.getresponse().status)


def asked_as(url: str, user: int, family: socket.AddressFamily = socket.AF_INET) -> int:
    if os.getuid() != 0 and user != os.getuid():
        pytest.skip("only root can be another user")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=status_of, args=(url, user, theirs, family))
    process.start()
    assert ours.poll(60)
    status: int = ours.recv()
    process.join()
    return status


@pytest.fixture
def url() -> Iterator[str]:
    inner = Starlette(routes=[Route("/runs", lambda request: PlainTextResponse("all of them"))])
    with serving(Door(inner)) as address:
        yield f"{address}/runs"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_who_started_it_is_answered_and_nobody_else(url: str, family: socket.AddressFamily) -> None:
    assert asked_as(url, os.getuid(), family) == 200
    assert asked_as(url, NOBODY, family) == 403


def test_who_says_to_come_from_elsewhere_is_not_believed(url: str) -> None:
    assert httpx.get(url, headers={"X-Forwarded-For": "10.1.2.3"}).status_code == 200


def test_a_connection_that_its_maker_has_closed_is_nobodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        ends = client.getsockname(), server.getsockname()
        assert user_at(*ends) == os.getuid() and user_at(ends[1], ("127.0.0.1", 1)) is None
        client.close()  # what is left of it reads as root's
        assert here.recv(1) == b"" and user_at(*ends) is None
        here.close()
