"""Exchange messages with a child process over its standard input and output.

One thread writes and another reads, so a child that answers late or reads nothing does not block its caller.
"""

import contextlib
import json
import pickle
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rlhf_core.processes.guard import kill_group


class Codec(Protocol):
    """How messages are written to a stream and read from it; `load` raises EOFError at the end. The module `pickle` is one."""

    def load(self, stream: IO[bytes], /) -> Any: ...

    def dump(self, message: Any, stream: IO[bytes], /) -> None: ...


class JsonLines:
    """One JSON value per line, for a child that cannot import this project."""

    def load(self, stream: IO[bytes], /) -> Any:
        """Read the next value. Raises EOFError at the end, or at a line that was cut off."""
        line = stream.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def dump(self, message: Any, stream: IO[bytes], /) -> None:
        """Write a value."""
        stream.write(f"{json.dumps(message)}\n".encode())


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message from a child. `problem` is the error if its output could not be read, "" if the output ended."""

    problem: str = ""


class PipedProcess(Protocol):
    """A child process with pipes for its input and output, such as a `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Host:
    """A child process in a separate session.

    `received` is called in the reading thread with each message, and at last with `Ended`.
    """

    def __init__(self, process: PipedProcess, *, received: Callable[[Any], None], codec: Codec = pickle) -> None:
        self.process = process
        self._received = received
        self._codec = codec
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Queue a message, which must not be None; it is dropped if the child has ended."""
        self._outbox.put(message)

    def close(self) -> int:
        """Kill the child with all processes that it started; return its exit status, its own one if it had ended."""
        kill_group(self.process)
        status = self.process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # `received` may close its own host
                thread.join()
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            while True:
                try:
                    message = self._codec.load(pipe)
                except (EOFError, pickle.UnpicklingError):
                    message = Ended()
                except Exception as error:  # any error of loading a class that only the child can import
                    message = Ended(repr(error))
                self._received(message)
                if isinstance(message, Ended):
                    return

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            while (message := self._outbox.get()) is not None:
                self._codec.dump(message, pipe)
                pipe.flush()


def start_command(
    command: Sequence[str], *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command for a `Host`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def send_message(stream: IO[bytes], message: Any) -> None:
    """Send a message from the child to its host, which reads pickles."""
    pickle.dump(message, stream)
    stream.flush()
