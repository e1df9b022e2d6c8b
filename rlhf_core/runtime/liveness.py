"""Detect the loss of Ray's own servers: its head (gcs_server) and the raylet of this machine.

Ray does not report their loss in time. If the raylet is killed, the driver keeps waiting. If the head is killed, Ray
ends the driver after a minute, without an error in its code. A head that hangs is not noticed at all.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import psutil

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_TIMEOUT_S = 5.0  # long for one frame, even on a loaded machine
WATCH_EVERY_S = 2.0  # so a server that has stopped is noticed after about 4 s
REFUSALS, SILENCES = 2, 5
"""Refused connections in a row after which a process counts as gone, and time-outs after which it counts as hung."""
KILL_WAIT_S = 10.0  # a process in a system call ends after it
HTTP2_SETTINGS = 4  # frame type, RFC 9113, 6.5
HTTP2_FRAME_HEADER = 9  # bytes: length 3, type 1, flags 1, stream 4
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0))
"""First bytes that an HTTP/2 client sends (RFC 9113, 3.4); the server answers with its settings frame."""


def greet(address: str) -> None:
    """Check that a gRPC server answers at `address` (host:port); raise OSError or ValueError if not.

    TimeoutError means that something listens there but does not answer: the kernel accepts connections for a hung
    process.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(HTTP2_FRAME_HEADER)
    except OverflowError as error:  # a port beyond 65535
        raise ValueError(str(error)) from error
    if len(answer) < HTTP2_FRAME_HEADER or answer[3] != HTTP2_SETTINGS:
        raise ConnectionResetError(f"{address} does not answer in HTTP/2")


class CallHangs(TimeoutError):
    """A call timed out; its thread is still blocked."""


def within(seconds: float, call: Callable[[], T], *, lasting: bool = False) -> T:
    """Call `call()` in another thread; raise CallHangs after `seconds`, as calls into a Ray may never return.

    A `lasting` thread outlives the call: Linux kills Ray's processes with the *thread* that started them.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        if lasting:
            threading.Event().wait()

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():
            raise  # `call` itself raised the TimeoutError
        raise CallHangs(f"nothing for {seconds:g} s") from error


class RayWatch:
    """A watch over Ray's servers, kept by a thread. `lost` describes a lost server, "" while all answer.

    With `own`, the servers are children of this process. Once a server is lost, all processes below them are killed,
    so that none keeps computing or hangs; `kill_family` does the same at the end.

    >>> watch = RayWatch({"the Ray head": "127.0.0.1:6379"}, own=False)   # doctest: +SKIP
    """

    def __init__(self, servers: Mapping[str, str], *, own: bool) -> None:
        self.lost = ""
        self._servers = dict(servers)
        self._own = own
        self._refusals = dict.fromkeys(servers, 0)
        self._silences = dict.fromkeys(servers, 0)
        self._family: set[psutil.Process] = set()
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def settle(self) -> str:
        """Ping all servers until each has responded or one is lost; return `lost`.

        A worker dies before the death of its raylet is certain, and a new worker must not be started on that raylet.
        """
        while not self._look() and not self.lost and not self._stop.is_set():
            self._stop.wait(WATCH_EVERY_S)
        return self.lost

    def stop(self) -> None:
        """Stop watching; `lost` keeps its value."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(len(self._servers) * PROBE_TIMEOUT_S + 1)
        self._note_family()

    def kill_family(self) -> None:
        """Kill the remaining processes of our own Ray, stopped and orphaned ones too; do nothing to a joined Ray."""
        if not self._own:
            return
        self._note_family()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(self._family), timeout=KILL_WAIT_S)

    def _run(self) -> None:
        while not self.lost and not self._stop.wait(WATCH_EVERY_S):
            self._note_family()
            self._look()

    def _look(self) -> bool:
        """Ping every server; return whether all responded, and record the first that is lost."""
        with self._looking:
            well = True
            for name, address in self._servers.items():
                problem = self._problem(name, address)
                well = well and self._refusals[name] == self._silences[name] == 0
                if problem and not self.lost and not self._stop.is_set():
                    self.lost = f"{name} at {address} {problem}"
                    logger.warning("%s", self.lost)
                    self.kill_family()
            return well

    def _problem(self, name: str, address: str) -> str:
        """The reason why a server is lost, or "" if it is not or may still recover."""
        try:
            greet(address)
        except TimeoutError:
            self._silences[name] += 1
            return f"did not answer {SILENCES} times in a row" if self._silences[name] >= SILENCES else ""
        except (OSError, ValueError):
            self._refusals[name] += 1
            return "has stopped" if self._refusals[name] >= REFUSALS else ""
        self._refusals[name] = self._silences[name] = 0
        return ""

    def _note_family(self) -> None:
        """Record our Ray's processes while their parents live; afterwards they can no longer be attributed."""
        if not self._own:
            return
        names = {"gcs_server", "raylet"}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(os.getpid()).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() in names:
                        self._family = self._family | {child, *child.children(recursive=True)}
        self._family = {process for process in self._family if process.is_running()}
