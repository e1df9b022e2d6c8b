"""A server with the wire of `vllm serve` as it was recorded from vLLM 0.32.0, and with faults on demand."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.vllm_worker import read_tensors

Answer = tuple[int, Any]
SETTINGS = {"dtype": "float32", "head_dtype": "float32", "max_model_len": 96, "logprobs_mode": "processed_logprobs"}


class Wire:
    """What one server knows and was asked. `fault` may answer a route instead: (route, body) -> (status, JSON) or None."""

    def __init__(self) -> None:
        self.url = ""
        self.settings: dict[str, Any] = dict(SETTINGS)
        self.label = "default"
        self.digest = ""
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Callable[[str, Any], Answer | None] = lambda route, body: None
        self.together = 0
        """The most completions that were asked for at a time."""
        self.waits_for = 1
        """No completion is answered before so many were asked for at a time."""
        self._now = 0
        self._changed = threading.Condition()

    def routes(self) -> list[str]:
        """Return the routes that were asked, in order."""
        return [route for route, _ in self.asked]

    def answer(self, route: str, body: Any) -> Answer:
        """Answer as vLLM does."""
        self.asked.append((route, body))
        if (answer := self.fault(route, body)) is not None:
            return answer
        match route:
            case "/version":
                return 200, {"version": "0.32.0"}
            case "/pause" | "/resume":
                return 200, {"status": route[1:] + "d"}
            case "/update_weight_version":
                self.label = body["new_version"]
                return 200, {"success": True, "new_version": self.label}
            case "/collective_rpc":
                return 200, {"results": [self._method(body["method"], body["args"])]}
            case "/inference/v1/generate":
                return self._generated(body)
        return 404, {"detail": "Not Found"}

    def _method(self, method: str, arguments: list[str]) -> Any:
        if method == "settings":
            return self.settings
        folder, digest = arguments
        self.digest = weights_digest(read_tensors(Path(folder)))
        return [] if self.digest == digest else [f"the files in {folder} have the digest {self.digest[:12]}"]

    def _generated(self, body: Any) -> Answer:
        if not body:
            return 400, {"error": {"message": "1 validation error", "type": "Bad Request", "code": 400}}
        with self._changed:
            self._now += 1
            self.together = max(self.together, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.together >= self.waits_for, timeout=30.0)
        time.sleep(0.002)
        with self._changed:
            self._now -= 1
        return 200, completion(body, self.digest, self.label)


def completion(body: Any, digest: str, label: str) -> dict[str, Any]:
    """Return the answer to a request: its tokens depend on the weights, the prompt and the seed."""
    params = body["sampling_params"]
    draw = random.Random(f"{digest} {body['token_ids']} {params['seed']}")
    tokens = [draw.randrange(10, 300) for _ in range(params["max_tokens"])]
    entries = []
    for token in tokens:
        entry = {"token_id": token, "logprob": -draw.random(), "rank": 1}
        entries.append({**entry, "top_logprobs": [entry]})
    choice = {
        "index": 0,
        "logprobs": {"content": entries},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
    }
    return {"request_id": "generate-tokens-1", "model": "policy", "choices": [choice], "prompt_token_ids": None}


@contextlib.contextmanager
def served(wire: Wire) -> Iterator[Wire]:
    """Serve `wire` on a port of its own; when it ends, so do its connections."""
    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.request)
            super().setup()

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._reply(json.loads(self.rfile.read(length) or b"null"))

        def _reply(self, body: Any) -> None:
            wire.headers.append(dict(self.headers))
            status, value = wire.answer(urlsplit(self.path).path, body)
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the asker has given up
                self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    wire.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield wire
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in connections:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
