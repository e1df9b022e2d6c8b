"""Cause faults of reward servers: a real server in a separate process misbehaves as the scored answer instructs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.leftovers import watched
from campaigns.faults.scored import GROUP, TERM, groups, left_out, one_error, opened, recovered, right
from rlhf_core.config.rewards import OnFailure, RemoteReward
from rlhf_core.errors import RewardError

TIMEOUT_S = 2.0
RETRIES = 1
DEADLINE_S = 2 * (RETRIES + 1) * (2 * TIMEOUT_S + 13)
"""The client's deadline for a batch, and again for the answer that is requested alone."""
TOKEN_ENV = "FAULTS_REWARD_TOKEN"

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

seen = set()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [float(len(text)) for text in body["query"]]
        asked = " ".join(body["query"]) if sys.argv[2] == "unruly" else ""
        status = 401 if "wants a token" in asked and self.headers["Authorization"] != "Bearer right" else 200
        if "hangs" in asked:
            time.sleep(600)
        if "is slow within its deadline" in asked:
            time.sleep(1)
        if "answers 500 once" in asked and "500" not in seen:
            seen.add("500")
            status = 500
        if "answers NaN" in asked:
            rewards[0] = float("nan")
        if "answers too many numbers" in asked:
            rewards.append(0.0)
        content = b"<html>busy</html>" if "answers no JSON" in asked else json.dumps({"rewards": rewards}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if "disconnects" in asked or "dies" in asked:
            self.wfile.write(content[:5])
            self.wfile.flush()
            self.close_connection = True
            if "dies" in asked:
                os._exit(3)
            return
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
"""

LEFT_OUT = {
    "disconnects in the middle": "RemoteProtocolError",
    "hangs": "took longer than 2 s",
    "answers NaN": "is not a finite number",
    "answers too many numbers": "rewards for 1 answers",
    "answers no JSON": "invalid JSON",
}
"""Fault of one answer -> text that its failure reason must contain."""
RECOVERED = {
    "answers 500 once": "asked again after 0.25 s, then scored right",
    "is slow within its deadline": "waited for, and scored right",
}


@contextmanager
def _server(port: int = 0, *, temper: Literal["sound", "unruly"] = "unruly") -> Iterator[str]:
    """Yield the URL of a server; port 0 picks a free one. A "sound" server never misbehaves."""
    command = [sys.executable, "-c", SERVER, str(port), temper]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/get_reward"
        finally:
            process.kill()


def _nowhere() -> str:
    """A URL without a listening server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/get_reward"


def _spec(*urls: str, on_failure: OnFailure = "fail", retries: int = RETRIES, token_env: str = "") -> RemoteReward:
    return RemoteReward(
        urls=urls, timeout_s=TIMEOUT_S, retries=retries, batch_size=GROUP, on_failure=on_failure, token_env=token_env
    )


def _query_length(text: str) -> float:
    return float(len("hi" + text))


def _left_out(mood: str, folder: Path) -> Outcome:
    with _server() as url:
        answers = groups(mood, "x", "xx", "xxx")
        return left_out(_spec(url, on_failure="invalid"), folder, answers, _query_length, named=LEFT_OUT[mood])


def _recovered(mood: str, folder: Path) -> Outcome:
    with _server() as url:
        return recovered(_spec(url), folder, groups(mood, "x", "xx", "xxx"), _query_length, RECOVERED[mood])


def _refuses(folder: Path) -> Outcome:
    return one_error(_spec(_nowhere()), folder, groups("x", "xx"), named="ConnectError")


def _dies(folder: Path) -> Outcome:
    """The only server dies while it sends a response: one error, and once it is back the same term scores."""
    with watched() as watch:
        with ExitStack() as closing:
            url = closing.enter_context(_server())
            scorer = closing.enter_context(opened(_spec(url), folder))
            began, said = time.monotonic(), "it was scored"
            try:
                scorer(groups("dies", "x"))
            except RewardError as error:
                said = str(error)
            noticed = time.monotonic() - began
            closing.enter_context(_server(int(url.rpartition(":")[2].partition("/")[0])))
            began = time.monotonic()
            again = right(scorer(groups("x", "xx")), _query_length)
            took = time.monotonic() - began
        left = watch.left()
    if all(part in said for part in (f"rewards.{TERM}", "p0", url, "fix the server")) and again and not left:
        return Outcome("one error", noticed, took, said)
    return Outcome("not handled", noticed, None, f"{said}; scored again: {again}; {len(left)} processes are left")


def _wrong_token(folder: Path) -> Outcome:
    with _server() as url, _variables({TOKEN_ENV: "wrong"}):
        spec = _spec(url, retries=5, token_env=TOKEN_ENV)
        outcome = one_error(spec, folder, groups("wants a token", "x"), named="returned status 401")
    if "wrong" in outcome.said:
        return Outcome("not handled", None, None, "the token stands in the message")
    return outcome


def _one_of_two_refuses(folder: Path) -> Outcome:
    with _server() as url:
        said = "the other one was asked"
        return recovered(_spec(_nowhere(), url), folder, groups("x", "xx", "xxx", "xxxx"), _query_length, said)


def _one_of_two_dies(folder: Path) -> Outcome:
    """One of two servers dies while it sends a response; the other one must answer this and all later requests."""
    with _server() as dies, _server(temper="sound") as sound:
        said = "the other one was asked"
        return recovered(_spec(dies, sound), folder, groups("dies", "xx", "xxx", "xxxx"), _query_length, said)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


FAULTS: list[Fault] = [
    Fault("remote server refuses the connection", DEADLINE_S, _refuses),
    Fault("remote server dies in the middle of an answer", DEADLINE_S, _dies),
    Fault("remote server is given a wrong token", DEADLINE_S, _wrong_token),
    *(
        Fault(f'remote server {mood}, on_failure = "invalid"', DEADLINE_S, partial(_left_out, mood))
        for mood in LEFT_OUT
    ),
    *(Fault(f"remote server {mood}", DEADLINE_S, partial(_recovered, mood)) for mood in RECOVERED),
    Fault("one of two remote servers refuses the connection", DEADLINE_S, _one_of_two_refuses),
    Fault("one of two remote servers dies in the middle of an answer", DEADLINE_S, _one_of_two_dies),
]
