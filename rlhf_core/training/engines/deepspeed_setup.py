"""Prepare DeepSpeed without importing it: its environment, configuration, messages and compiler locks."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError, explain

logger = logging.getLogger(__name__)


def set_environment(device: torch.device) -> None:
    """Set the variables that DeepSpeed reads when it is imported."""
    # Without it, DeepSpeed probes for the accelerator. The launcher's variable is required even without a launcher.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's start-up messages (prints, and its own logger on stdout), but not errors."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def deepspeed_config(optimizer: OptimizerConfig | None, config: TrainerConfig, *, stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration. Raises ConfigError for offloading at stage 0, which partitions nothing."""
    zero: dict[str, Any] = {"stage": stage}
    if config.offload_optimizer:
        if stage == 0:
            key, remedy = "runtime.trainer.offload_optimizer", "set zero_stage to 1, 2 or 3"
            raise ConfigError(explain(key, True, "ZeRO stage 0 keeps the optimizer on its device", remedy))
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        # The trainer sets batch sizes. DeepSpeed only requires consistent numbers.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        # Stage 0 in float32 does not check for a non-finite gradient, so the optimizer clips and checks there.
        "gradient_clipping": 0.0 if stage == 0 or optimizer is None else optimizer.max_grad_norm,
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


@contextmanager
def one_at_a_time(file: Path, *, patience_s: float = 5.0) -> Iterator[None]:
    """Hold the lock of `file`, which names the process that has it. Log whom this process waits for after `patience_s`."""
    with file.open("a+", encoding="utf-8") as lock:
        started = time.monotonic()
        while not _locked(lock):
            if time.monotonic() - started >= patience_s:
                lock.seek(0)
                holder = lock.read() or "another process"
                logger.warning("waiting for %s, which compiles for DeepSpeed: minutes, once per machine", holder)
                fcntl.flock(lock, fcntl.LOCK_EX)
                logger.warning("waited %.0f s for %s", time.monotonic() - started, holder)
                break
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} (rank {os.environ.get('RANK', '0')}) on {socket.gethostname()}")
        lock.flush()
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_stale_locks(root: Path) -> list[Path]:
    """Remove and return the files `lock` below `root` that no process has open. Builders of torch keep theirs open."""
    found = list(root.rglob("lock"))
    if not found:
        return []
    opened = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            opened.add(link.readlink())
    stale = [path for path in found if path.resolve() not in opened]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale
