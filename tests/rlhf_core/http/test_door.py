"""Who may enter a server: its own user or programs that have its token, and the server's own pages."""

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
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from rlhf_core.http.door import CONNECTIONS, NONCE, PROOF, Door, proof, refused, user_at
from tests.support.reward_servers import serving

# ---------------------------------------------------------------- door

OWN = "127.0.0.1:4200"
FOREIGN_PAGES = [
    *("https://foreign.example", "http://127.0.0.1:8888", "http://localhost"),
    *("null", "file://", "https://127.0.0.1:4200"),
]
FOREIGN_NAMES = [
    *("foreign.example", "foreign.example:4200", "127.0.0.1.foreign.example:4200"),
    *("localhost.:4200", "", "me@127.0.0.1:4200"),
]


class Server:
    """A server with pages that counts what reaches it; all of it is open to whoever the door lets in."""

    def __init__(self, address: str = OWN) -> None:
        self.reached = 0

        async def run(request: Request) -> PlainTextResponse:
            self.reached += 1
            return PlainTextResponse("ran")

        async def events(socket: WebSocket) -> None:
            self.reached += 1
            await socket.accept()
            await socket.send_text("events")

        routes = [Route("/run", run, methods=["GET", "POST", "OPTIONS"]), WebSocketRoute("/events", events)]
        door = Door(Starlette(routes=routes), authorization="Basic x", pages=True, open_to=lambda scope: True, key="k")
        self.client = TestClient(door, base_url=f"http://{address}")


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", FOREIGN_PAGES)
def test_a_foreign_page_reaches_nothing(method, origin):
    server = Server()
    answer = server.client.request(method, "/run", headers={"Origin": origin})
    assert answer.status_code == 403 and server.reached == 0
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("hosts", [[], [OWN, OWN], [OWN, "foreign.example"], ["foreign.example", OWN]])
def test_a_request_has_exactly_one_name_of_its_server(hosts):
    """A proxy may read another one of two than the server does (RFC 9112, 3.2)."""
    assert refused(hosts, []) == "this server answers only requests to 127.0.0.1 and localhost"
    server = Server()
    if hosts:
        answer = server.client.post("/run", headers=[("Host", host) for host in hosts])
        assert answer.status_code == 403 and server.reached == 0


@pytest.mark.parametrize("host", FOREIGN_NAMES)
def test_a_name_that_a_page_has_bound_to_this_machine_reaches_nothing(host):
    server = Server()
    assert server.client.post("/run", headers={"Host": host}).status_code == 403
    assert server.client.post("/run", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 403
    assert server.reached == 0


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *(([one], 200) for one in ("Bearer x y", "bearer x y", "BEARER  x y ")),
        *(([one], 401) for one in ("Bearer X y", "Bearer", "x y", "Basic x y")),
        *((given, 401) for given in (["Bearer x y", "Bearer x y"], ["Bearer x y", "Bearer z"], [])),
    ],
)
def test_the_token_enters_once_and_its_scheme_in_any_case(given, status):
    door = Door(PlainTextResponse("in"), authorization="Bearer x y")
    client = TestClient(door, base_url=f"http://{OWN}")
    assert client.get("/", headers=[("Authorization", value) for value in given]).status_code == status


@pytest.mark.parametrize(
    ("site", "mode", "dest", "status"),
    [
        ("cross-site", "no-cors", "image", 403),
        ("same-site", "no-cors", "script", 403),  # another port of this machine
        ("cross-site", "navigate", "iframe", 403),
        ("cross-site", "navigate", "document", 200),  # a link
        ("same-origin", "no-cors", "image", 200),
        ("none", "navigate", "document", 200),  # typed by a person
    ],
)
def test_a_foreign_page_may_link_to_ours_and_not_load_or_embed_them(site, mode, dest, status):
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    assert Server().client.get("/run", headers=headers).status_code == status


def test_a_websocket_of_a_foreign_page_is_closed():
    server = Server()
    for headers in ({"Origin": "https://foreign.example"}, {"Host": "foreign.example:4200"}):
        with pytest.raises(WebSocketDisconnect), server.client.websocket_connect("/events", headers=headers):
            pass
    assert server.reached == 0


@pytest.mark.parametrize("host", [OWN, "localhost:4200", "[::1]:4200", f"{socket.gethostname()}:4200"])
@pytest.mark.parametrize("origin", [None, f"http://{OWN}", "http://localhost:4200"])
def test_programs_and_own_pages_are_served(host, origin):
    server = Server()
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    assert server.client.post("/run", headers=headers).text == "ran"
    with server.client.websocket_connect("/events", headers=headers) as socket:
        assert socket.receive_text() == "events"
    assert server.reached == 2


def test_a_server_of_other_machines_has_any_name_and_none_of_its_pages_may_be_framed():
    server = Server("10.1.2.3:4200")
    answer = server.client.post("/run", headers={"Host": "rewards.example"})
    assert answer.text == "ran" and answer.headers["x-frame-options"] == "SAMEORIGIN"
    refused = server.client.post("/run", headers={"Host": "rewards.example", "Origin": "http://rewards.example"})
    for one in (answer, refused):
        assert one.headers["content-security-policy"] == "frame-ancestors 'self'"
    assert refused.status_code == 403 and server.reached == 1


def test_a_server_proves_that_it_knows_the_key_for_its_port_alone():
    answer = Server().client.get("/run", headers={NONCE: "n1"})
    assert answer.headers[PROOF] == proof("k", "n1", 4200)
    assert len({proof(key, nonce, port) for key in "kl" for nonce in "nm" for port in (4200, 4201)}) == 8


# ---------------------------------------------------------------- peers

linux = pytest.mark.skipif(not CONNECTIONS[0].exists(), reason="needs Linux")
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


@linux
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_who_started_it_is_answered_and_nobody_else(url, family):
    assert asked_as(url, os.getuid(), family) == 200
    assert asked_as(url, NOBODY, family) == 403


@linux
def test_who_says_to_come_from_elsewhere_is_not_believed(url):
    assert httpx.get(url, headers={"X-Forwarded-For": "10.1.2.3"}).status_code == 200


@linux
def test_a_connection_that_its_maker_has_closed_is_nobodys():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        ends = client.getsockname(), server.getsockname()
        assert user_at(*ends) == os.getuid() and user_at(ends[1], ("127.0.0.1", 1)) is None
        client.close()  # what is left of it reads as root's
        assert here.recv(1) == b"" and user_at(*ends) is None
        here.close()
