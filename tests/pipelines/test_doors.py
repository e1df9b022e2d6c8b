"""Every route of every server of ours, those of mounted applications and WebSockets included, against strangers.

The routes come from the routers, so a route that a new version of Prefect, MLflow or vLLM brings is walked, too. No
engine, no database and no handler runs: what a request would reach is replaced by a recorder behind the door.
"""

import asyncio
import base64
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pipelines.services import servers
from pipelines.services.home import SERVER_AUTH, Home, basic, quiet_environment, sign_in_link
from pipelines.services.running import MLFLOW_PORT, await_health, bound_port, port_of
from pipelines.services.servers import start_guarded, stop_process
from rlhf_contrib.serve.reward_server import create_app
from rlhf_core.agents.endpoint import Endpoint
from rlhf_core.http import door
from rlhf_core.http.door import CONNECTIONS, Door
from tests.rlhf_core.http.test_door import NOBODY, asked_as

SECRET = "s3cret"
OWN = "127.0.0.1:4200"
Call = tuple[str, str]
"""Method, or `websocket`, and path."""


def reward_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return create_app(lambda queries: pytest.fail("scored"), name="n", token=SECRET)


def agent_endpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("rlhf_core.agents.endpoint.secrets.token_urlsafe", lambda size: SECRET)
    return Endpoint(None, request_timeout_s=1.0).app()


def policy_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rlhf_contrib.serve.policy_server import ServedModel, ServeOptions, serve_command

    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # the routes that load weights and call workers
    command = serve_command(ServedModel("n", "d", folder), ServeOptions(), 3)
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("3") + 1 :])
    return build_app(options, ("generate", "transcription", "realtime", "render"))


def prefect_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from pipelines.services.prefect_server import prefect_app

    monkeypatch.setenv(SERVER_AUTH, SECRET)
    return prefect_app()


def mlflow_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from pipelines.services.mlflow_server import mlflow_app

    return mlflow_app()


def walked(app: Any, above: str = "") -> Iterator[Call]:
    """Yield all that a router knows, with names in place of parameters."""
    if isinstance(app, Door):
        (inner,) = [cell for cell in (app._app, *_captured(app._app)) if hasattr(cell, "routes")]
        yield from walked(inner, above)
    elif hasattr(app, "url_map"):  # Flask
        for rule in app.url_map.iter_rules():
            path = above + re.sub(r"<[^>]*>", "1", str(rule))
            yield from ((method, path) for method in rule.methods or ())
    elif hasattr(app, "routes"):
        for route in app.routes:
            path = above + re.sub(r"{[^}]*}", "1", getattr(route, "path", ""))
            if hasattr(route, "app") and not hasattr(route, "endpoint"):
                yield from walked(route.app, path)
                yield from ((method, f"{path}/anything") for method in ("GET", "POST"))
            elif "WebSocket" in type(route).__name__:
                yield "websocket", path
            else:
                yield from ((method, path) for method in route.methods or ("GET", "POST"))
    elif hasattr(app, "app"):  # a middleware, or what makes a Flask application one of ASGI
        yield from walked(app.app, above)


def _captured(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def door_of(app: Any) -> Door:
    """Return the door, which is before everything but the server's own handler of errors."""
    if isinstance(app, Door):
        return app
    app.middleware_stack = app.build_middleware_stack()
    found = app.middleware_stack.app
    assert isinstance(found, Door)
    return found


def asked(app: Any, call: Call, **headers: str) -> int:
    """Return the status of a request, 101 for an open WebSocket, 403 for a closed one."""
    method, path = call
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if method == "websocket" else "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in ({"host": OWN} | headers).items()]
    scope = {
        "type": "websocket" if method == "websocket" else "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": pairs,
        "server": ("127.0.0.1", 4200),
        "client": ("127.0.0.1", 1),
        "subprotocols": [],
        "app": None,
    }
    asyncio.run(app(scope, receive, send))
    first = answers[0]
    return {"websocket.accept": 101, "websocket.close": 403}.get(first["type"]) or int(first["status"])


async def recorder(scope: Any, receive: Any, send: Any) -> None:
    """Stand for all that is behind the door."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b""})


HEALTH = {("GET", "/health"), ("HEAD", "/health")}


@pytest.mark.parametrize(
    ("build", "right", "least"),
    [
        (reward_server, f"Bearer {SECRET}", 4),
        (agent_endpoint, f"Bearer {SECRET}", 3),
        pytest.param(policy_server, f"Bearer {SECRET}", 50, marks=pytest.mark.slow),
        (prefect_server, f"Basic {basic(SECRET)}", 200),
        (mlflow_server, "", 100),
    ],
    ids=["reward server", "agent endpoint", "policy server", "Prefect", "MLflow"],
)
def test_no_route_of_any_server_answers_a_stranger(build, right, least, tmp_path, monkeypatch):
    app = build(tmp_path, monkeypatch)
    calls = {*walked(app), ("GET", "/no such route"), ("DELETE", "/")}
    entrance = door_of(app)
    monkeypatch.setattr(entrance, "_app", recorder)
    assert len(calls) >= least, "the walk has missed routes"
    given = {"authorization": right} if right else {}
    monkeypatch.setattr(door, "is_own", lambda client, server: not right)
    for call in calls:
        served = 101 if call[0] == "websocket" else 299
        assert asked(app, call, **given) == served, call
        for stranger in (
            {"host": "foreign.example:4200"},
            {"origin": "https://foreign.example"},
            {"origin": "null"},
            {"host": "foreign.example:4200", "origin": "http://foreign.example:4200"},
            {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"},
            {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
        ):
            assert asked(app, call, **(given | stranger)) == 403, (call, stranger)
    monkeypatch.setattr(door, "is_own", lambda client, server: False)
    open_to_all = {call for call in calls if asked(app, call) in (101, 299)}
    wrong = {call for call in calls if asked(app, call, authorization="Bearer guess") in (101, 299)}
    assert open_to_all == wrong
    if build is prefect_server:  # the files of its pages; its WebSockets: see below
        under_api = {call for call in open_to_all if call[1].startswith("/api") and call[0] != "websocket"}
        assert {path for _, path in under_api} == {"/api/health", "/api/ready"}
        assert {method for method, _ in open_to_all} == {"GET", "HEAD", "websocket"}
    else:
        assert open_to_all <= HEALTH


def test_prefects_websockets_ask_for_the_auth_string_themselves(tmp_path, monkeypatch):
    app = prefect_server(tmp_path, monkeypatch)
    monkeypatch.setattr("pipelines.services.prefect_server.FIRST_MESSAGE_S", 0.1)
    sockets = [path for method, path in walked(app) if method == "websocket"]
    assert len(sockets) >= 4
    from prefect.settings import PREFECT_SERVER_API_AUTH_STRING, temporary_settings

    client = TestClient(app, base_url=f"http://{OWN}")  # without its lifespan: no database
    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: SECRET}):
        for path in sockets:
            guess = {"type": "auth", "token": "guess"}
            for protocols, first in (([], {}), (["prefect"], guess), (["prefect"], {}), (["prefect"], None)):
                with (
                    pytest.raises(WebSocketDisconnect),
                    client.websocket_connect(path, subprotocols=protocols) as socket,
                ):
                    if first is not None:
                        socket.send_json(first)
                    socket.receive_json()


def test_a_link_signs_the_browser_in_and_tells_the_server_nothing(prefect_home):
    url = os.environ["PREFECT_API_URL"].removesuffix("/api")
    link = sign_in_link(url, "rlhf:word")
    page = httpx.get(link)
    path, _, stays = link.removeprefix(url).partition("#")
    assert path == "/sign-in" and base64.b64decode(stays) == b"rlhf:word"
    assert page.headers["content-type"].startswith("text/html") and "location.hash" in page.text
    assert page.headers["content-security-policy"] == "frame-ancestors 'self'"


def test_the_api_answers_nobody_without_its_auth_string(prefect_home):
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


@pytest.mark.skipif(not CONNECTIONS[0].exists(), reason="needs Linux")
def test_mlflow_answers_this_user_alone(tmp_path):
    home = Home(tmp_path).make()
    listener = bound_port(MLFLOW_PORT)
    address = f"http://127.0.0.1:{port_of(listener)}"
    environment = os.environ | quiet_environment(home) | servers.proof_environment(home)
    with (tmp_path / "log").open("wb") as log:
        process = start_guarded(
            servers.mlflow_command(home, listener), environment, log, patience_s=8.0, listener=listener
        )
    try:
        await_health(f"{address}/health", home.prefect_auth_string, process, 240.0, tmp_path / "log")
        search = f"{address}/api/2.0/mlflow/experiments/search?max_results=5"
        assert httpx.get(search).json()["experiments"][0]["name"] == "Default"
        assert httpx.get(search, headers={"Origin": "http://127.0.0.1:1"}).status_code == 403
        assert httpx.get(search, headers={"Host": "foreign.example"}).status_code == 403
        assert asked_as(f"{address}/version", NOBODY) == 403
    finally:
        stop_process(process, patience_s=60.0)
        listener.close()
