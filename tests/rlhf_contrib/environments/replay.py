"""Servers that say what real ones said: each replays a recorded exchange and finds fault with another request."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

WIRE = Path(__file__).with_name("wire")
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
NOTHING = {"path": "", "sent": None, "cookie": None, "status": 500, "received": "nothing is left"}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((WIRE / f"{name}.json").read_text())
    return found


@contextlib.contextmanager
def openenv_server(http: dict[str, Any], exchanges: list[dict[str, Any]], faults: list[Any]) -> Iterator[str]:
    """Serve `http` (path -> body) and one session on `/ws`; requests that were not recorded go to `faults`.

    An exchange that has no `received` breaks the connection, unless it closes the session.
    """

    def answer(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        known = request.path in http
        return connection.respond(200 if known else 404, json.dumps(http.get(request.path)))

    sessions: list[threading.Thread] = []

    def play(connection: ServerConnection) -> None:
        sessions.append(threading.current_thread())
        for exchange in exchanges:
            given = json.loads(connection.recv())
            if given != exchange["sent"]:
                faults.append(given)
            if "received" not in exchange:
                return
            connection.send(json.dumps(exchange["received"]))

    with serve(play, "127.0.0.1", 0, process_request=answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
            for session in sessions:  # the last words of one may still be on their way to `faults`
                session.join()


def without_tokens(body: Any) -> Any:
    """Return `body` less what differs from tokenizer to tokenizer."""
    if isinstance(body, dict):
        return {name: without_tokens(value) for name, value in body.items() if name not in TOKENS}
    return [without_tokens(value) for value in body] if isinstance(body, list) else body


@contextlib.contextmanager
def http_server(
    paths: dict[str, Any], exchanges: list[dict[str, Any]], heard: list[Any], faults: list[Any]
) -> Iterator[str]:
    """Serve `/openapi.json` with `paths`, then the exchanges in their order; a session has a cookie.

    All requests go to `heard`, those that were not recorded also to `faults`.
    """
    left = list(exchanges)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"paths": paths})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            exchange = left.pop(0) if left else NOTHING
            given = {"path": self.path, "sent": body, "cookie": "session=1" in (self.headers["Cookie"] or "")}
            heard.append(given)
            if any(without_tokens(given[name]) != without_tokens(exchange[name]) for name in given):
                faults.append(given)
            self._send(exchange["status"], exchange["received"])

        def _send(self, status: int, body: Any) -> None:
            content = json.dumps(body, separators=(",", ":")).encode()  # as they were: a policy reads these bytes
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Set-Cookie", "session=1; Path=/")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
