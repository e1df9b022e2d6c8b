"""Servers for tests: the real one, and one that answers what a test says."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rlhf_core.http.serving import limited


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port; yield its URL without a path."""
    server = uvicorn.Server(limited(app, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Scripted:
    """A server whose `answer` gives status and body of each request; it keeps what it was asked."""

    answer: Callable[[dict[str, Any]], tuple[int, bytes]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def scripted(answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Iterator[Scripted]:
    """Serve `answer` on a free port."""
    script = Scripted(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append(body)
            script.headers.append(dict(self.headers))
            status, content = script.answer(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it did not wait for us
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    script.url = f"http://127.0.0.1:{server.server_port}/get_reward"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()


def lengths(body: dict[str, Any]) -> tuple[int, bytes]:
    """Answer as OpenRLHF's server does: the length of each query, thrice."""
    rewards = [float(len(text)) for text in body["query"]]
    return 200, json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}).encode()
