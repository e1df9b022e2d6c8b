"""Pass the first requests of a rehearsal on to the judges and reward servers of a profile, and repeat their replies.

A judge costs money, and a rehearsal asks each at most five times. If a server does not respond, the rehearsal continues
with a made-up reply.
"""

import json
import os
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.config.rewards import ChatServer, RemoteReward
from rlhf_core.errors import explain
from rlhf_core.schema.secrets import resolved
from rlhf_core.secrets.redaction import without_secrets

MOST_REQUESTS = 5
TIMEOUT_S = 30.0
"""Deadline of a request that is passed on, if the profile allows more."""
CONNECT_S = 5.0


@dataclass
class Route:
    """A server of the profile, with the replies that it gave so far."""

    key: str
    """Key of the address in the profile."""
    url: str
    token_env: str
    timeout_s: float
    chat: bool
    replies: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0
    problem: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, body: bytes) -> dict[str, Any]:
        """The reply of the server, an earlier one, or a made-up one."""
        with self.lock:
            self.asked += 1
            if self.asked <= MOST_REQUESTS and not self.problem:
                try:
                    self.replies.append(self._ask(path, body))
                except (OSError, ValueError) as error:
                    self.problem = str(without_secrets(f"{type(error).__name__}: {error}"))
            found = self.replies[(self.asked - 1) % len(self.replies)] if self.replies else made_up(self.asked)
        return found if self.chat else fit_rewards(found, len(json.loads(body)["query"]))

    def _ask(self, path: str, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.token_env, '')}"
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=body,
            headers=headers,
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=min(self.timeout_s, TIMEOUT_S)) as response:
            found = json.loads(response.read())
        if ("choices" if self.chat else "rewards") not in found:
            raise ValueError(f"the reply has only the fields {sorted(found)}")
        return dict(found)


def made_up(number: int) -> dict[str, Any]:
    """A reply in the forms that judges and reward servers have."""
    score = number % 3
    text = f'{{"score": {score}}}\nScore: {score}\nBetter: {"AB"[number % 2]}'
    message = {"role": "assistant", "content": text}
    return {
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "stop",
            }
        ],
        "rewards": [float(score)],
    }


def fit_rewards(reply: dict[str, Any], count: int) -> dict[str, Any]:
    """A reply of a reward server with `count` rewards, repeated in order."""
    rewards = reply["rewards"] or [0.0]
    return {"rewards": [rewards[at % len(rewards)] for at in range(count)]}


def silent_engines(urls: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each server of a sampler that accepts no connection. The rehearsal samples here instead."""
    remedy = "start vLLM there, or fix the address"
    for at, url in enumerate(urls):
        key = f"runtime.sampler.urls[{at}]"
        address = urlsplit(str(resolved(url, key)))
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), timeout=CONNECT_S).close()
        except OSError as error:
            rule = f"does not respond ({error})"
            yield explain(key, without_secrets(url), rule, remedy)


class Servers:
    """A server on 127.0.0.1 with a route for each server of the profile."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.address = ""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Serve until the end of the block."""
        routes = self.routes

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                _, number, *rest = self.path.split("/", 2)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                path = f"/{rest[0]}" if rest else ""
                content = json.dumps(routes[int(number)].reply(path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Write nothing: requests are counted by their route."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def in_place(self, config: Any, key: str) -> Any:
        """The options of a judge or reward server with the address of its route; other options unchanged."""
        if isinstance(config, ChatServer):
            url = self._route(
                config,
                key,
                "url",
                config.url,
                chat=True,
            )
            return config.model_copy(
                update={
                    "url": url,
                    "token_env": "",
                    "retries": 0,
                }
            )
        if isinstance(config, RemoteReward):
            urls = tuple(
                self._route(
                    config,
                    key,
                    f"urls[{at}]",
                    url,
                    chat=False,
                )
                for at, url in enumerate(config.urls)
            )
            return config.model_copy(
                update={
                    "urls": urls,
                    "token_env": "",
                    "retries": 0,
                }
            )
        return config

    def _route(self, config: Any, key: str, name: str, url: str, *, chat: bool) -> str:
        address = str(resolved(url, f"{key}.{name}")).rstrip("/")
        self.routes.append(
            Route(
                f"{key}.{name}",
                address,
                config.token_env,
                config.timeout_s,
                chat,
            )
        )
        return f"{self.address}/{len(self.routes) - 1}"

    def problems(self) -> list[str]:
        """A line for each server that did not respond as expected."""
        remedy = "start the server, or fix its address and token"
        return [
            explain(
                one.key,
                without_secrets(one.url),
                f"does not respond ({one.problem})",
                remedy,
            )
            for one in self.routes
            if one.problem
        ]
