"""Repeat a request that failed, after pauses that double: the one policy of rewards, judges and samplers.

The pauses have no jitter, so that they are the same in every run.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def pause_before(retry: int, *, first_s: float, longest_s: float) -> float:
    """The seconds to wait before a retry; the first has number 1.

    >>> [pause_before(retry, first_s=0.25, longest_s=8.0) for retry in (1, 2, 3, 9)]
    [0.25, 0.5, 1.0, 8.0]
    """
    return min(first_s * 2 ** (retry - 1), longest_s)  # first, 2 first, 4 first, ...


def retried(
    call: Callable[[], T],
    *,
    retries: int,
    again: Callable[[Exception], bool],
    first_s: float,
    longest_s: float,
    pause: Callable[[float], Any] = time.sleep,
    least: Callable[[Exception], float] = lambda error: 0.0,
) -> T:
    """Call `call`, repeated up to `retries` times while it raises an error that `again` accepts.

    `least` is the shortest pause after an error, in seconds, if the server asks for one. Raises the last error.
    """
    for retry in itertools.count(1):
        try:
            return call()
        except Exception as error:
            if retry > retries or not again(error):
                raise
            asked_s = least(error)
        pause(max(asked_s, pause_before(retry, first_s=first_s, longest_s=longest_s)))
    raise AssertionError("the last try returns or raises")
