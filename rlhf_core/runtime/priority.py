"""Run work at low priority, so that it does not slow down other threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")

LOW = 10
"""Nice value of such work: a tenth of the CPU share of a busy thread at 0. With 19, a seventieth, an import of vLLM
took longer than `runtime.worker_timeout_s` on a machine whose cores were all busy.
"""


def at_low_priority(work: Callable[[], R]) -> R:
    """Return `work()`, called in a thread of low priority. Only Linux has priorities per thread.

    A trainer whose threads wait for each other thousands of times a second becomes several times slower if one of them
    shares its core with an import as heavy as vLLM's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="low-priority", initializer=_give_way) as pool:
        return pool.submit(work).result()


def _give_way() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Only a superuser may lower a nice value that is already higher.
        os.setpriority(os.PRIO_PROCESS, thread, max(LOW, os.getpriority(os.PRIO_PROCESS, thread)))
