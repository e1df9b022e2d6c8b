"""Work that must not take the cores from anybody."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")

LOW = 10
"""The nice value of such work: a tenth of the share of a busy thread at 0. With 19, a seventieth, an import of vLLM took
longer than `runtime.worker_timeout_s` on a machine whose cores were all taken by others."""


def at_low_priority(work: Callable[[], R]) -> R:
    """Return `work()`, called in a thread of low priority; only Linux has priorities per thread.

    A trainer whose threads wait for each other thousands of times a second becomes several times slower when one of
    them has to share its core with an import as heavy as vLLM's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="low-priority", initializer=_give_way) as pool:
        return pool.submit(work).result()


def _give_way() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Only a superuser may take a nice value back that is higher already.
        os.setpriority(os.PRIO_PROCESS, thread, max(LOW, os.getpriority(os.PRIO_PROCESS, thread)))
