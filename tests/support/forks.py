"""Forked processes whose exit status is what they did, whatever the tests before them have left behind."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess

FORK = multiprocessing.get_context("fork")


def forked(body: Callable[[], int | None]) -> BaseProcess:
    """Return a process, not yet started, that ends with the status that `body` returns, or with 1 after a traceback.

    It leaves by `os._exit`: `multiprocessing` runs `threading._shutdown` in the child, where a hook that a library of
    the parent registered may raise (Prefect's services join threads that a fork does not copy), and then reports 1 in
    silence, whatever the child had done.
    """
    return FORK.Process(target=_leave_with, args=(body,))


def _leave_with(body: Callable[[], int | None]) -> None:
    try:
        status = body() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def soon(condition: Callable[[], bool], *, within_s: float = 60.0, every_s: float = 0.01) -> None:
    """Wait until `condition` holds; fail after `within_s`, which is long because the machine may be busy."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s in vain"
        time.sleep(every_s)
