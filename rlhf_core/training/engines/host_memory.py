"""Keep the host memory that one training step frees for the next one.

glibc returns a freed block of more than 32 MiB to the system at once, and smaller ones when the end of its heap is free.
A training step on a CPU then writes gigabytes of fresh pages, each of which the system clears first. Kept, they stay with
the process between its steps, and blocks of many sizes leave gaps between them, so its memory grows. It goes back where
the machine has little left.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import psutil

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of options in `man mallopt`."""
NEVER = -1
OWN_SETTINGS = frozenset({"GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
"""Environment variables by which a user sets them."""
SHORT = 0.25
"""Share of the machine's memory."""


def keep_freed_memory() -> bool:
    """Keep memory that the main thread of this process frees; return whether it does.

    It does not where the C library is no glibc, or where the environment has one of `OWN_SETTINGS`.
    """
    if not OWN_SETTINGS.isdisjoint(os.environ) or (libc := _glibc()) is None:
        return False
    return bool(libc.mallopt(MMAP_MAX, 0) and libc.mallopt(TRIM_THRESHOLD, NEVER))


def release_freed_memory() -> None:
    """Return all freed memory to the system, if the C library is glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def release_if_short() -> None:
    """Return all freed memory to the system if it has less than `SHORT` of its memory left."""
    memory = psutil.virtual_memory()
    if memory.available < SHORT * memory.total:
        release_freed_memory()


def _glibc() -> Any:
    """Return the C library of this process if it is glibc, else None."""
    libc = ctypes.CDLL(None)
    return libc if all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")) else None
