"""Run a stage with a fixed amount of dummy work, to compare the overhead around a stage with the stage itself."""

from __future__ import annotations

import hashlib

from rlhf_core.schema.base import Config
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import PolicyRef

NAME = "busy"
VERSION = 1

BLOCK = bytes(1 << 20)
METRICS = 12
"""As many metrics as a training step reports."""


class BusyConfig(Config):
    """Number of steps, and hashed MiB per step."""

    steps: int = 600
    blocks_per_step: int = 40


def work(config: BusyConfig) -> str:
    """Hash `blocks_per_step` MiB: one step, about 20 ms for 40 of them."""
    digest = hashlib.sha256()
    for _ in range(config.blocks_per_step):
        digest.update(BLOCK)
    return digest.hexdigest()


def run(config: BusyConfig, *, context: StageContext) -> PolicyRef:
    """Do the steps, and report the same metrics for each as a training step."""
    for step in range(1, config.steps + 1):
        work(config)
        context.metrics(step, {f"train/value_{i}": float(step * i) for i in range(METRICS)})
        context.progress(step, config.steps, "busy")
    (context.out / "done.txt").write_text(str(context.seed), encoding="utf-8")
    return context.commit(PolicyRef)


def busy_spec(config: BusyConfig, *, label: str, seed: int) -> StageSpec:
    """The spec of one such stage."""
    return StageSpec(
        name=NAME,
        module="benchmarks.busy_stage",
        version=VERSION,
        code="warn",
        config=config,
        inputs={},
        seed=seed,
        label=label,
        engines={},
    )
