"""Resume ZeRO from a checkpoint of a different number of ranks, through DeepSpeed's universal checkpoint.

Rank 0 converts the ranks' partitions to one folder per parameter, beside them, and every rank reads its part of each.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch.optim import Optimizer

from rlhf_core.store.layout import remove_tree

_FOLDER = "universal"


def load_universal(engine: Any, folder: Path, *, tag: str, rank: int) -> None:
    """Load the checkpoint `tag` of `folder` into DeepSpeed's `engine`. Every rank must call it with the same folder.

    `folder` needs disk space for a second copy until all ranks have read it.
    """
    universal = folder / _FOLDER
    if rank == 0:
        remove_tree(universal)
        _convert(folder / tag, universal / tag)
    dist.barrier()
    with _own_groups_and_steps(engine.optimizer.optimizer):
        _load(engine, universal, tag)
    dist.barrier()
    if rank == 0:
        remove_tree(universal)


def _load(engine: Any, universal: Path, tag: str) -> None:
    config = engine._config  # meant to be set before an engine is made, but the checkpoint is known only now
    config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(universal), tag=tag, load_module_strict=False)
    finally:
        config.load_universal_checkpoint = False


@contextmanager
def _own_groups_and_steps(optimizer: Optimizer) -> Iterator[None]:
    """Restore parameter groups and step counters, since stage 3 gives all groups the weight decay of the first and one
    shared step counter.

    Every group would increment the shared counter in every step.
    """
    kept = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)
    for state in [state for state in optimizer.state.values() if "step" in state]:
        state["step"] = state["step"].clone()


def _convert(partitions: Path, universal: Path) -> None:
    settings = Namespace(
        input_folder=str(partitions),
        output_folder=str(universal),
        # Use this process, because every child process would import torch again.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # The state that it calls missing concerns tensor parallelism, which is not used here.
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(settings)
