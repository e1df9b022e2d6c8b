"""Memory that a step frees stays for the next step, unless the user has said otherwise, and goes back on request."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlhf_core.training.engines import offload
from rlhf_core.training.engines.offload import SHORT, _glibc, release_if_short

PAGES_OF_A_STEP = 320 * 2**20 // resource.getpagesize()

PROGRAM = """
import resource
import psutil
import torch
from rlhf_core.training.engines.offload import keep_freed_memory, release_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**24) for _ in range(4)] + [torch.ones(2**18) for _ in range(64)]  # 64 MiB and 1 MiB each
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
*_, faults = [faults_of_a_step() for _ in range(4)]  # the heap takes two steps to find its size
held = psutil.Process().memory_info().rss
release_freed_memory()
print(int(kept), faults, (held - psutil.Process().memory_info().rss) // 2**20)
"""

pytestmark = pytest.mark.skipif(_glibc() is None, reason="the C library is no glibc")


def measured(**environment: str) -> tuple[bool, int, int]:
    """Return whether memory is kept, the page faults of a repeated step and the MiB that are released in the end."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=own | environment, capture_output=True, text=True, check=True
    )
    kept, faults, released = map(int, ran.stdout.split())
    return bool(kept), faults, released


def test_a_repeated_step_asks_the_system_for_no_memory():
    kept, faults, released = measured()
    assert kept
    assert faults < PAGES_OF_A_STEP / 50
    assert released > 256


def test_what_the_user_has_set_stays():
    kept, faults, _ = measured(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert faults > PAGES_OF_A_STEP / 8


@pytest.mark.parametrize(("left", "times"), [(SHORT / 2, 1), (2 * SHORT, 0)])
def test_it_goes_back_where_the_machine_has_little_left(monkeypatch, left, times):
    released: list[None] = []
    monkeypatch.setattr(offload, "release_freed_memory", lambda: released.append(None))
    memory = SimpleNamespace(available=left * 2**30, total=2**30)
    monkeypatch.setattr(offload, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    release_if_short()
    assert len(released) == times
