"""Let a run keep its Prefect server when `rlhf up` ends.

The run gets a copy of the server's listening socket from `rlhf up`. While a process has that socket, no other program
can listen at the port, so a run sends its auth string and its content to a server of ours only. When `rlhf up` has
ended, a run starts a server at the socket, with the same auth string and database, which lasts as long as the run.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.services.home import Home
from pipelines.services.running import ANSWER_TIMEOUT_S, Services, alive, port_of
from pipelines.services.servers import LOOK_EVERY_S, PrivateServer, keep_alive, server_at

logger = logging.getLogger(__name__)


@contextmanager
def offered(listener: socket.socket) -> Iterator[str]:
    """Give a copy of `listener` to each process of this user that connects to the socket file whose path is yielded."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-", dir="/tmp"))  # paths of sockets are limited to 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / "prefect"))
            door.listen()
            threading.Thread(target=_hand_out, args=(door, listener), daemon=True, name="hand-over").start()
            yield str(folder / "prefect")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hand_out(door: socket.socket, listener: socket.socket) -> None:
    """Send a copy of `listener` over each connection, until `door` is closed."""
    while True:
        try:
            with door.accept()[0] as connection:
                socket.send_fds(connection, [b"\0"], [listener.fileno()])
        except OSError:
            if door.fileno() < 0:
                return


def received(services: Services) -> socket.socket | None:
    """The socket of the Prefect server; None if `rlhf up` ends or is of an earlier version."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(services.handover)
            descriptors = socket.recv_fds(connection, 1, 1)[1]
    except OSError:
        return None
    found = socket.socket(fileno=descriptors[0]) if descriptors else None
    if found is not None and port_of(found) != services.prefect_port:
        found.close()
        return None
    return found


@contextmanager
def kept_prefect(home: Home, services: Services) -> Iterator[None]:
    """Connect Prefect's client to the server of `rlhf up`, and keep a server at its address until the block ends."""
    environment = services.environment(home)
    listener = received(services)
    os.environ.update(environment)
    if listener is None:
        yield
        return
    server = server_at(home, listener, environment)
    keeper = threading.Thread(target=_succeed, args=(server, services, home), daemon=True, name="keep-prefect")
    keeper.start()
    try:
        yield
    finally:
        server.stopped.set()
        keeper.join()
        server.stop()


def _succeed(server: PrivateServer, services: Services, home: Home) -> None:
    """Start the server when `rlhf up` has ended. One process does so; the next one takes its turn when that ends."""
    turn = os.open(home.root / "prefect_keeper.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while not server.stopped.wait(LOOK_EVERY_S):
            if alive(services.owner):
                continue
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.warning("`rlhf up` has ended; this run keeps the Prefect server until it ends")
                server.child.start()
                keep_alive(server.child, server.stopped)
    finally:
        os.close(turn)
