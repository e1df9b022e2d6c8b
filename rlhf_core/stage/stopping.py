"""Asking a stage to save and end: by a signal, or because the time that the machine is lent for runs out.

A signal belongs to the whole process, and so does the request. A loop asks `reason()` after every step; where it is not
empty it saves a checkpoint and raises `StageStopped`. The second signal, or the first after `GRACE_S` seconds in which
nobody came to such a point, interrupts at once: then the next run goes on from the checkpoint before.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

GRACE_S = 20.0
"""Batch systems and containers send SIGKILL 30 s after SIGTERM, most of them."""
ALLOCATION_START = "SLURM_JOB_START_TIME"
"""Environment variable with the start of the allocation in seconds of the wall clock."""

_asked = threading.Event()
_reason = ""
_deadline = float("inf")


class StageStopped(KeyboardInterrupt):
    """A stage was asked to end and has saved what it did; the same command goes on from there."""


def reason() -> str:
    """Return why the stage is to save and end now; "" if it may go on."""
    if _asked.is_set():
        return _reason
    return "the time limit is reached" if time.time() > _deadline else ""


def ask(why: str) -> None:
    """Ask the stage that runs, and all after it, to save and end."""
    global _reason
    _reason = why
    _asked.set()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside, stages are asked to end `seconds` after the start of the allocation, or of now; 0 means no limit."""
    global _deadline
    before = _deadline
    if seconds:
        _deadline = float(os.environ.get(ALLOCATION_START) or time.time()) + seconds
    try:
        yield
    finally:
        _deadline = before


@contextmanager
def on_signals() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C ask first and interrupt second. Elsewhere than in the main thread nothing changes.

    What handled the signal before gets it in the end: after the stage has saved, or at once the second time.
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
    """Handles the signals from its creation until `close`."""

    def __init__(self) -> None:
        self._arrived: signal.Signals | None = None
        self._watchdog: threading.Timer | None = None
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        _asked.clear()

    def pass_on(self) -> None:
        """Give the signal that arrived to whoever handles it now."""
        if self._arrived is not None:
            signal.raise_signal(self._arrived)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._arrived is not None:
            self.close()
            signal.raise_signal(number)
            return
        self._arrived = signal.Signals(number)
        signal.alarm(0)  # a library that handled the signal before us may have set one, to abort soon if nobody ends
        ask(f"{self._arrived.name} arrived")
        # The second signal comes by itself. Both in threads: whoever was interrupted here may hold the lock of the log.
        self._watchdog = threading.Timer(GRACE_S, os.kill, (os.getpid(), number))
        self._watchdog.daemon = True
        self._watchdog.start()
        message = "saving, then stopping; once more stops at once"
        threading.Thread(target=logger.warning, args=(message,), daemon=True).start()
