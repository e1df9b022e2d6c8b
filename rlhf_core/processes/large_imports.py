"""Keep the hundreds of thousands of objects that large libraries leave in memory out of Python's collections.

Python's collector of cycles visits every object that may be part of one, while a library makes them, in each collection
of everything, and when the process ends. Those of torch, transformers or vLLM live as long as the process.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import large libraries inside, without collections; later collections skip the existing objects.

    Use it before the process has made anything that must be freed: cycles that exist now are never collected.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def skip_last_collections() -> None:
    """Have this process end without the last collections, which take seconds after large imports."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
