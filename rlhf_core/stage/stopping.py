"""Request the running stage to save and end, after a signal or at the end of the time allocation.

A signal belongs to the whole process, and so does the request. A loop calls `reason()` after every step; if it is not
empty, the loop saves a checkpoint and raises `StageStopped`. A second signal, or `grace_s()` seconds without reaching
such a point, interrupts at once: the next run then resumes from the previous checkpoint.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any

from rlhf_core.errors import ConfigError

logger = logging.getLogger(__name__)

GRACE_S = 20.0
"""Grace period after the first signal without `RLHF_GRACE_S`: most batch systems and containers send SIGKILL 30 s after
SIGTERM."""
ALLOCATION_START = "SLURM_JOB_START_TIME"
"""Environment variable with the start of the allocation, in seconds of the wall clock."""

_TERMINALS = tuple(number for number in (1, 2) if os.isatty(number))
"""File descriptors of the output that goes to a terminal."""
_asked = threading.Event()
_reason = ""
_deadlines: list[tuple[float, str]] = []
"""Times after which the stage must save and end, and why."""


class StageStopped(KeyboardInterrupt):
    """Raised by a stage that has saved its work and ended on request; the same command resumes it."""


class RunHalted(StageStopped):
    """Raised to end a run in a separate state, which pages show under the name `state`; finished work is kept."""

    state = "Halted"


class StageWaiting(RunHalted):
    """Raised by a stage that waits for people; the same command resumes it when they are done.

    `condition` is the event to wait for, as JSON values: see `rlhf_core.annotation.people.is_met`, or under
    `question` a question to a person (`rlhf_core.stage.gate_decisions.Question`).
    """

    def __init__(self, message: str, condition: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.condition = dict(condition)

    state = "Waiting"


class RunBlocked(RunHalted):
    """Raised at the end of a run in which a gate blocked the stages after an artifact."""

    state = "Blocked"


class RunOverBudget(RunHalted):
    """Raised when the budget of a run is spent; the same command resumes it with a larger budget."""

    state = "OverBudget"


def grace_s() -> float:
    """Grace period after the first signal, in seconds: `RLHF_GRACE_S`, else `GRACE_S`."""
    given = os.environ.get("RLHF_GRACE_S") or str(GRACE_S)
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ConfigError("RLHF_GRACE_S", given, "is not a number of seconds", f"unset it for {GRACE_S:g}")
    return seconds


def reason() -> str:
    """The reason why the stage must save and end now, or "" if it may continue."""
    if _asked.is_set():
        return _reason
    now = time.time()
    return next((why for at, why in _deadlines if now > at), "")


def goes_on(error: BaseException) -> bool:
    """Whether a stage that has ended with `error` is to be resumed: it waits, or its time or budget was spent.

    Not after a signal, because its sender may not want the stage to continue.
    """
    return isinstance(error, StageStopped) and not _asked.is_set()


def ask(why: str) -> None:
    """Request that the running stage, and all stages after it, save and end."""
    global _reason
    _reason = why
    _asked.set()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the stages inside the block `seconds` after the start of the allocation, or after now; 0 sets no limit."""
    if not seconds:
        yield
        return
    began = float(os.environ.get(ALLOCATION_START) or time.time())
    with deadline(began + seconds - time.time(), "the time limit is reached"):
        yield


@contextmanager
def deadline(seconds: float, why: str) -> Iterator[None]:
    """End the stages inside the block `seconds` from now, with `why` as the reason."""
    limit = (time.time() + seconds, why)
    _deadlines.append(limit)
    try:
        yield
    finally:
        _deadlines.remove(limit)


def terminations() -> tuple[signal.Signals, ...]:
    """Signals that end a process: SIGTERM, and SIGHUP unless it is ignored, as under nohup.

    SIGHUP comes when the terminal, or the connection to it, has gone.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


def leave_lost_terminal() -> None:
    """Redirect the output to nowhere if its terminal is gone; otherwise the next write would end the stage."""
    for number in _TERMINALS:
        if not os.isatty(number):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _deliver(number: int) -> None:
    unhandled = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM if unhandled else number)


@contextmanager
def on_signals() -> Iterator[None]:
    """Let the first SIGTERM, SIGHUP or Ctrl-C end the stage after saving, and the second interrupt it; only in the main thread.

    A SIGHUP is never the second: it is not repeated by users, but systemd sends one after its SIGTERM, and a shell may send another.
    The previous handler gets the signal in the end: after the stage has saved, or at once for the second signal. If
    SIGHUP has no handler, the handler of SIGTERM gets it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener()
    try:
        yield
    except StageStopped:
        listener.close()
        listener.pass_on()
        raise
    finally:
        listener.close()


class _Listener:
    """A signal handler that is active from its creation until `close`."""

    def __init__(self) -> None:
        self._arrived: signal.Signals | None = None
        self._grace_s = grace_s()
        self._watchdog: threading.Timer | None = None
        self._before = {number: signal.signal(number, self._handle) for number in (*terminations(), signal.SIGINT)}

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        _asked.clear()

    def pass_on(self) -> None:
        """Send the signal that arrived to its current handler."""
        if self._arrived is not None:
            _deliver(self._arrived)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        if self._arrived is not None:
            if number == signal.SIGHUP:
                return
            self.close()
            _deliver(number)
            return
        self._arrived = signal.Signals(number)
        signal.alarm(0)  # a library's earlier handler may have set an alarm that aborts the process soon
        ask(f"{self._arrived.name} arrived")
        # The timer sends the second signal. Both run in threads, because the interrupted code may hold the log's lock.
        second = signal.SIGTERM if number == signal.SIGHUP else number
        self._watchdog = threading.Timer(self._grace_s, os.kill, (os.getpid(), second))
        self._watchdog.daemon = True
        self._watchdog.start()
        message = "saving, then stopping; repeat to stop immediately"
        threading.Thread(target=logger.warning, args=(message,), daemon=True).start()
