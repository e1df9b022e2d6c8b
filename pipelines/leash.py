"""Runs a command that lives no longer than whoever started it: `python -m pipelines.leash COMMAND...`.

The starter holds the other end of standard input. When the starter ends, however it ends, that end closes and the
command is stopped with all its children. So a killed `rlhf run` or `rlhf up` leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

PATIENCE_S = 8.0


def leash(command: list[str]) -> int:
    """Run `command` until it ends or standard input closes; return its status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(*_: object) -> None:
        threading.Thread(target=_stop, args=(child,), daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_stop_when_orphaned, args=(child,), daemon=True).start()
    status = child.wait()
    _signal_group(child, signal.SIGKILL)
    return status


def _stop_when_orphaned(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        continue
    _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child, signal.SIGTERM)
    try:
        child.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        _signal_group(child, signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(leash(sys.argv[1:]))
