"""Who may talk to the Prefect server: programs of this machine and the server's own pages."""

from __future__ import annotations

import base64
import os
import stat

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from pipelines.services.home import Home
from pipelines.services.own_pages import OwnPages
from pipelines.services.sign_in import basic, sign_in_link

OWN = "127.0.0.1:4200"
FOREIGN_PAGES = [
    "https://foreign.example",
    "http://127.0.0.1:8888",
    "http://localhost",
    "null",
    "file://",
    "https://127.0.0.1:4200",
]
FOREIGN_NAMES = [
    "foreign.example",
    "foreign.example:4200",
    "127.0.0.1.foreign.example:4200",
    "localhost.:4200",
    "",
    "me@127.0.0.1:4200",
]


class Server:
    """A server that counts what reaches it."""

    def __init__(self) -> None:
        self.reached = 0

        async def run(request: Request) -> PlainTextResponse:
            self.reached += 1
            return PlainTextResponse("ran")

        async def events(socket: WebSocket) -> None:
            self.reached += 1
            await socket.accept()
            await socket.send_text("events")

        routes = [Route("/run", run, methods=["GET", "POST", "OPTIONS"]), WebSocketRoute("/events", events)]
        self.client = TestClient(OwnPages(Starlette(routes=routes)), base_url=f"http://{OWN}")


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", FOREIGN_PAGES)
def test_a_foreign_page_reaches_nothing(method: str, origin: str) -> None:
    server = Server()
    answer = server.client.request(method, "/run", headers={"Origin": origin})
    assert answer.status_code == 403 and server.reached == 0
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("host", FOREIGN_NAMES)
def test_a_name_that_a_page_has_bound_to_this_machine_reaches_nothing(host: str) -> None:
    server = Server()
    assert server.client.post("/run", headers={"Host": host}).status_code == 403
    assert server.client.post("/run", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 403
    assert server.reached == 0


def test_a_websocket_of_a_foreign_page_is_closed() -> None:
    server = Server()
    for headers in ({"Origin": "https://foreign.example"}, {"Host": "foreign.example:4200"}):
        with pytest.raises(WebSocketDisconnect), server.client.websocket_connect("/events", headers=headers):
            pass
    assert server.reached == 0


@pytest.mark.parametrize("host", [OWN, "localhost:4200", "[::1]:4200"])
@pytest.mark.parametrize("origin", [None, f"http://{OWN}", "http://localhost:4200"])
def test_programs_and_own_pages_are_served(host: str, origin: str | None) -> None:
    server = Server()
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    assert server.client.post("/run", headers=headers).text == "ran"
    with server.client.websocket_connect("/events", headers=headers) as socket:
        assert socket.receive_text() == "events"
    assert server.reached == 2


def test_a_link_signs_the_browser_in_and_tells_the_server_nothing() -> None:
    server = Server()
    link = sign_in_link(f"http://{OWN}", "rlhf:word")
    page = server.client.get(link)
    path, _, stays = link.removeprefix(f"http://{OWN}").partition("#")
    assert path == "/sign-in" and base64.b64decode(stays) == b"rlhf:word"
    assert page.headers["content-type"].startswith("text/html") and "location.hash" in page.text and server.reached == 0


def test_the_api_answers_nobody_without_its_auth_string(prefect_home: Home) -> None:
    """What another user of the machine can send: everything but the file that only its owner can read."""
    url = os.environ["PREFECT_API_URL"]
    assert stat.S_IMODE(prefect_home.prefect_auth.stat().st_mode) == 0o600
    right = {"Authorization": f"Basic {basic(prefect_home.prefect_auth_string)}"}
    wrong = [{}, {"Authorization": f"Basic {basic('rlhf:guess')}"}, {"Authorization": f"Bearer {basic('rlhf:guess')}"}]
    asked = [
        ("GET", "/admin/version"),
        ("POST", "/deployments/filter"),
        ("POST", "/flow_runs/"),
        ("GET", "/admin/settings"),
    ]
    for method, path in asked:
        assert [httpx.request(method, url + path, headers=headers, json={}).status_code for headers in wrong] == [
            401
        ] * 3
    assert httpx.post(f"{url}/deployments/filter", headers=right, json={}).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200
