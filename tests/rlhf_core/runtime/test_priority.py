from __future__ import annotations

import os
import sys
import threading

import pytest

from rlhf_core.runtime.sample_worker import LOW, at_low_priority


@pytest.mark.skipif(sys.platform != "linux", reason="priorities per thread are Linux's")
def test_the_work_gives_way_and_its_caller_does_not() -> None:
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    assert at_low_priority(own) == max(LOW, before)
    assert own() == before


def test_an_error_of_the_work_reaches_the_caller() -> None:
    with pytest.raises(ImportError, match="no engine"):
        at_low_priority(_fail)


def _fail() -> None:
    raise ImportError("no engine")
