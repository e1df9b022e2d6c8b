"""Run a service that ends with the process that started it: `python -m ...parent_death_guard PATIENCE COMMAND...`.

The starter holds the other end of standard input. When the starter ends, however it ends, that end closes and the
command is stopped with all its children: with SIGTERM, and after PATIENCE seconds with SIGKILL. So a killed `rlhf run`
or `rlhf up` leaves no process behind. If this guard itself is killed, the kernel kills the command.

This differs from `rlhf_core.processes.guard`, which kills at once. SIGTERM to this guard leaves the service time to end,
and after a crash it kills the rest of the service's process group, which would still hold the port, before a restart.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from rlhf_core.stage.stopping import terminations

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
REST_S = 2.0


def run_guarded(command: list[str], patience_s: float) -> int:
    """Run `command` until it ends or standard input closes; return its status, 128 + the signal that ended it."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # a bound socket, which the starter hands over
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )

    def stop(*_: object) -> None:
        threading.Thread(target=_stop, args=(child, patience_s), daemon=True).start()

    for number in (*terminations(), signal.SIGINT):
        signal.signal(number, stop)
    threading.Thread(target=_stop_when_orphaned, args=(child, patience_s), daemon=True).start()
    status = child.wait()
    _await_rest(child)
    _signal_group(child, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop_when_orphaned(child: subprocess.Popen[bytes], patience_s: float) -> None:
    while os.read(0, 4096):
        continue
    _stop(child, patience_s)


def _stop(child: subprocess.Popen[bytes], patience_s: float) -> None:
    _signal_group(child, signal.SIGTERM)
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        _signal_group(child, signal.SIGKILL)


def _await_rest(child: subprocess.Popen[bytes]) -> None:
    """Wait REST_S for the children of the command to end: Python's tracker of shared memory removes it only then."""
    deadline = time.monotonic() + REST_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(child.pid, 0)
            time.sleep(0.05)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[2:], float(sys.argv[1])))
