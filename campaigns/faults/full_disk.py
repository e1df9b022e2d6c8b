"""Fill the disk under a stage and under MLflow: `python -m campaigns.faults.full_disk FOLDER`, a small disk.

Started by `campaigns.faults.disk`; prints one line of JSON per fault.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from campaigns.faults.fault import Outcome
from campaigns.faults.small import Small
from pipelines.execution.executor import Silent
from rlhf_core.errors import ArtifactError
from rlhf_core.stage.decision import Decision

LOCAL = ("runtime.type=local", "runtime.trainer.engine=torch", 'runtime.sampler={type = "hf"}')
POINTS = 10


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    with (disk / "filling").open("wb", buffering=0) as stream:
        block = bytes(1 << 20)
        while block:
            try:
                stream.write(block)
            except OSError:
                block = block[: len(block) // 2]


def free(disk: Path) -> None:
    """Free the space again."""
    (disk / "filling").unlink()


def under_a_stage(small: Small, disk: Path, stage: str, step: int) -> Outcome:
    """Fill the disk after `step` of a stage (0: at its start): one error, and a later run has the same result."""
    small.forget(stage)
    filling = _AtStep(stage, step, lambda: fill(disk))
    try:
        small.run(filling)
    except ArtifactError as error:
        ended = time.monotonic()
        said = str(error)
    else:
        return Outcome("not handled", None, None, "the run ended as if nothing were wrong")
    free(disk)
    if "the disk is full" not in said:
        return Outcome("not handled", ended - filling.at, None, said)
    began = time.monotonic()
    same = small.run(Silent()) == small.digests
    took = time.monotonic() - began
    return Outcome("one error" if same else "not handled", ended - filling.at, took, said)


class _AtStep(Silent):
    def __init__(self, stage: str, step: int, action: Callable[[], None]) -> None:
        self._stage, self._step, self._action = stage, step, action
        self.at = 0.0

    def started(self, label: str, decision: Decision) -> None:
        self.progress(label, 0, 0, "")

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        if label == self._stage and done == self._step and not self.at:
            self.at = time.monotonic()
            self._action()


def under_mlflow(disk: Path) -> Outcome:
    """Fill the disk of MLflow's database and of the spool: training must continue, and no point may be lost."""
    from mlflow import MlflowClient

    from rlhf_core.tracking.mlflow import MlflowTracker

    uri = f"sqlite:///{disk}/mlflow.db"
    tracker = MlflowTracker(uri, experiment="faults", artifact_root=disk / "files", spool=disk / "spool", place=uri)
    tracker.start("faults", run_id=None, params={}, tags={})
    stage = tracker.stage("ppo", key="0" * 64, params={}, tags={}, fresh=False)
    waited = 0.0
    for step in range(1, POINTS + 1):
        if step == POINTS // 2:
            fill(disk)
        began = time.monotonic()
        stage.metrics(step, {"ppo/loss": 1.0 / step})
        waited = max(waited, time.monotonic() - began)
        time.sleep(0.5)
    free(disk)
    began = time.monotonic()
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    took = time.monotonic() - began
    points = MlflowClient(tracking_uri=uri).get_metric_history(stage.run_id, "ppo/loss")
    there = sorted(point.step for point in points)
    if there != list(range(1, POINTS + 1)):
        return Outcome("not handled", waited, took, f"of {POINTS} points MLflow has {there}")
    return Outcome("recovered", waited, took, f"training waited {waited * 1000:.0f} ms, all {POINTS} points are there")


def main() -> int:
    """Cause the three faults on the disk of the argument."""
    disk = Path(sys.argv[1])
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    small = Small(disk, LOCAL)
    small.digests = small.run(Silent())
    results = {
        "checkpoint": under_a_stage(small, disk, "ppo", 2),
        "artifact": under_a_stage(small, disk, "prepare_data", 0),
        "mlflow": under_mlflow(disk),
    }
    for name, outcome in results.items():
        print(json.dumps({"name": name, **dataclasses.asdict(outcome)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
