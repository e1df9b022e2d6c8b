"""Prepare DeepSpeed without importing it: its environment, its configuration and its messages.

The import takes seconds and 70 MiB, which a worker of the plain engine or of frozen models does not need.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.piece_sizes import BUCKET


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


def deepspeed_config(
    optimizer: OptimizerConfig | None, config: TrainerConfig, *, stage: int, trained: int
) -> dict[str, Any]:
    """DeepSpeed's configuration for a number of trained parameters.

    Raises ConfigError for offloading at stage 0, which partitions nothing.
    """
    zero: dict[str, Any] = {"stage": stage}
    if trained:
        zero["reduce_bucket_size"] = min(BUCKET, 2 * trained)
    if config.offload_optimizer:
        if stage == 0:
            key, remedy = "runtime.trainer.offload_optimizer", "set zero_stage to 1, 2 or 3"
            raise ConfigError(key, True, "ZeRO stage 0 keeps the optimizer on its device", remedy)
        # A GPU reads and writes pinned memory at several times the rate of any other.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
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
        if config.fp32_reduce:
            settings["communication_data_type"] = "fp32"
    return settings
