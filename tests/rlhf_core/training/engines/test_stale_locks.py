from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rlhf_core.training.engines.deepspeed_setup import remove_stale_locks

BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("has it", flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_killed_compiler_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "some_extension" / "lock"
    lock.parent.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", BUILDER, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        assert remove_stale_locks(tmp_path) == [] and lock.exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert lock.exists(), "torch waits for it for ever"
        assert remove_stale_locks(tmp_path) == [lock] and not lock.exists()
    finally:
        process.kill()
        process.wait()
    assert remove_stale_locks(tmp_path / "nowhere") == []
