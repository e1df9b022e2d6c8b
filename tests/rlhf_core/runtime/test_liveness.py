"""Noticing that Ray's own servers are gone or hang, with servers of ours in their place."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from rlhf_core.runtime import liveness
from rlhf_core.runtime.cluster import free_port
from rlhf_core.runtime.connection import asks_for_token
from rlhf_core.runtime.liveness import RayWatch, greet

SETTINGS = bytes((0, 0, 0, liveness.HTTP2_SETTINGS, 0, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(liveness, "WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(liveness, "PROBE_TIMEOUT_S", 0.1)


class Server:
    """Answers like a gRPC server, until it is told to say nothing."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.silent = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self._open.append(connection)  # kept: a closed one would be noticed at once
            if not self.silent.is_set():
                connection.sendall(SETTINGS)

    def end(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.listener.close()


@contextmanager
def watching(server: Server) -> Iterator[RayWatch]:
    watch = RayWatch({"the Ray head": server.address}, own=False)
    yield watch
    watch.stop()


def lost(watch: RayWatch) -> str:
    deadline = time.monotonic() + 10
    while not watch.lost and time.monotonic() < deadline:
        time.sleep(0.02)
    return watch.lost


def test_a_server_that_answers_is_not_lost(server):
    greet(server.address)
    with watching(server) as watch:
        time.sleep(0.5)
        assert watch.lost == ""


def test_a_server_that_ended_is_lost(server):
    with watching(server) as watch:
        server.end()
        assert lost(watch) == f"the Ray head at {server.address} has stopped"


def test_a_server_that_hangs_is_lost(server):
    with watching(server) as watch:
        server.silent.set()
        assert lost(watch) == f"the Ray head at {server.address} did not answer 5 times in a row"


def test_a_server_that_was_slow_for_a_while_is_not_lost(server, monkeypatch):
    monkeypatch.setattr(liveness, "SILENCES", 1000)
    with watching(server) as watch:
        server.silent.set()
        time.sleep(0.5)
        assert watch._silences["the Ray head"] > 0
        server.silent.clear()
        time.sleep(0.5)
        assert watch._silences["the Ray head"] == 0 and watch.lost == ""


def test_who_asks_is_not_told_that_all_is_well_while_that_is_uncertain(server, monkeypatch):
    monkeypatch.setattr(liveness, "REFUSALS", 4)
    with watching(server) as watch:
        assert watch.settle() == ""
        server.end()
        assert watch.settle() == f"the Ray head at {server.address} has stopped"


RAYLET = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(15, b"raylet")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names a process by prctl")
def test_of_a_ray_of_our_own_orphans_and_stopped_processes_are_killed_and_nothing_else(server):
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    worker = psutil.Process(int(raylet.stdout.readline()))
    watch = RayWatch({"the Ray head": server.address}, own=True)
    watch.stop()  # noted whose is what
    raylet.kill()
    raylet.wait()
    worker.suspend()
    watch.kill_family()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    other.kill()
    other.wait()
    raylet.stdout.close()


@pytest.mark.parametrize("refuses", [True, False])
def test_a_head_that_wants_a_token_is_told_from_one_that_does_not(refuses, monkeypatch):
    import grpc

    monkeypatch.setattr(liveness, "PROBE_TIMEOUT_S", 10.0)

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    handlers = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert asks_for_token(f"127.0.0.1:{port}") is refuses
    finally:
        server.stop(None)


def test_no_head_asks_for_nothing():
    assert not asks_for_token("auto")
    assert not asks_for_token(f"127.0.0.1:{free_port()}")
