"""Keep the hundreds of thousands of objects that large libraries leave in memory out of Python's collections.

Python's collector of cycles visits every object that may be part of one, while a library makes them, in each collection
of everything, and when the process ends. The objects of torch, transformers or vLLM live as long as the process.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn",)
"""Packages that transformers imports if they are installed, for assisted generation. They cost 1 CPU second and 100 MiB."""


@contextmanager
def large_imports() -> Iterator[None]:
    """Import large libraries inside, without collections and without the packages that they use but we do not.

    Later collections skip the existing objects, and later imports find the packages.

    Use it before the process has made anything that must be freed: cycles that exist now are never collected.
    """
    collecting = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python finds no such module
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name)
        gc.freeze()
        if collecting:
            gc.enable()


def skip_last_collections() -> None:
    """Have this process end without the last collections, which take seconds after large imports."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
