"""Work that must not take the cores from anybody."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")

LOWEST = 19
"""The nice value that gives way to every other."""


def at_low_priority(work: Callable[[], R]) -> R:
    """Return `work()`, called in a thread of the lowest priority; only Linux has priorities per thread.

    A trainer whose threads wait for each other thousands of times a second becomes several times slower when one of
    them has to share its core with an import as heavy as vLLM's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="low-priority", initializer=_give_way) as pool:
        return pool.submit(work).result()


def _give_way() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
