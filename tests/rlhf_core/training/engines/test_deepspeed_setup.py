from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.training.engines.deepspeed_engine import deepspeed_config, one_at_a_time, remove_stale_locks

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


def test_whoever_waits_for_another_process_to_compile_logs_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits, entered = threading.Event(), threading.Event()
    caplog.handler.addFilter(lambda record: waits.set() or True)

    def other() -> None:
        with one_at_a_time(tmp_path / "lock", patience_s=0.0):
            entered.set()

    with one_at_a_time(tmp_path / "lock"):
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(60) and not entered.is_set()
    thread.join(60)
    assert entered.is_set()
    assert f"waiting for process {os.getpid()} (rank 0)" in caplog.text


def test_clipping_is_left_to_the_optimizer_where_deepspeed_would_not_check_the_norm() -> None:
    optimizer = OptimizerConfig(max_grad_norm=0.5)
    assert deepspeed_config(optimizer, TrainerConfig(), stage=0)["gradient_clipping"] == 0.0
    assert deepspeed_config(optimizer, TrainerConfig(), stage=1)["gradient_clipping"] == 0.5


def test_offloading_needs_a_partitioned_optimizer() -> None:
    config = TrainerConfig(offload_optimizer=True)
    with pytest.raises(ConfigError, match="offload_optimizer = True: ZeRO stage 0 keeps the optimizer on its device"):
        deepspeed_config(OptimizerConfig(), config, stage=0)
    assert deepspeed_config(OptimizerConfig(), config, stage=2)["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
    }
