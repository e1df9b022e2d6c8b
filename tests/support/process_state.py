"""Tests that share a process leave nothing to each other, except a variable whose value Ray keeps."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core.processes.identity import process_stat
from rlhf_core.secrets import redaction

# Ray sets it in the first process that starts one, and its C++ part keeps the value: without the variable, a cluster
# started next asks for no tokens while this process does, so that the cluster cannot call it and drops its actors.
KEPT = {"RAY_AUTH_MODE"}


@contextmanager
def process_taken_back() -> Iterator[None]:
    """Undo the block's changes of this process: the program sets variables, and learns secrets, for good."""
    environment, factory = _environment(), logging.getLogRecordFactory()
    hooks, known = (sys.excepthook, threading.excepthook), (redaction._Known.values, redaction._Known.pattern)
    yield
    logging.disable(logging.NOTSET)  # benchmarks silence their whole process
    logging.setLogRecordFactory(factory)
    sys.excepthook, threading.excepthook = hooks
    redaction._Known.values, redaction._Known.pattern = known
    environment |= {name: os.environ[name] for name in KEPT & os.environ.keys()}
    if (now := _environment()) != environment:
        for name in now.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if "prefect.context" in sys.modules:  # 30 ms
            sys.modules["prefect.context"].refresh_global_settings_context()


def _environment() -> dict[str, str]:
    """The variables of this process but the name of the running test, which pytest changes with each of its phases."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def assert_gone(pids: list[int]) -> None:
    """Wait a little for processes to be gone, or dead and not yet collected by the process that adopted them."""
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if (stat := process_stat(pid)) is not None and stat[0] not in "ZX"]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.02)
