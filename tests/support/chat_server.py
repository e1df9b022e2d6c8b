"""An OpenAI-compatible chat server in this process, for tests of judges."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """A chat server that answers with what `says` makes of the question; a number is a status."""

    def __init__(self) -> None:
        self.says: Callable[[str], str | int | None] = lambda asked: "Score: 5"
        self.ends: Callable[[str], str] = lambda asked: "stop"
        self.headers: dict[str, str] = {}
        self.models = [{"id": "served"}]
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.tokens.append(self.headers["Authorization"])
                content = json.dumps({"data": endpoint.models}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append({"path": self.path} | body)
                endpoint.tokens.append(self.headers["Authorization"])
                said = endpoint.says(body["messages"][-1]["content"])
                ends = endpoint.ends(body["messages"][-1]["content"])
                answer = {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": ends}]}
                content = (
                    said.encode()
                    if isinstance(said, str) and said.startswith("<html>")
                    else json.dumps(answer).encode()
                )
                self.send_response(said if isinstance(said, int) else 200)
                for header, value in endpoint.headers.items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()
