"""A sweep on the engines of this process: what it computes, keeps, says and asks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import sweep_runs, sweep_verb
from pipelines.cli.main import EXIT_BLOCKED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_WAITING, main
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig
from pipelines.services.home import Home
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.small_pipeline import write_mini

OF_EACH_POINT = ("ppo", "evaluate/ppo/generate", "evaluate")
SHARED = ("prepare_data", "sft", "evaluate/base/generate", "evaluate/sft/generate")
FOUR = "ppo.kl_coef=0.01,0.02,0.05,0.1"


class Runs:
    """Runs of points without Prefect and MLflow; `trackers` has the one of each run, `died` stops one of them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.trackers: list[MemoryTracker] = []
        self.sweeps: list[MemoryTracker] = []
        self.errors: dict[str, BaseException] = {}
        patch.setenv("RLHF_HOME", str(folder / "home"))
        patch.setattr(sweep_runs, "run_recorded", self.run)
        patch.setattr(sweep_runs, "prefect_server", lambda home: nullcontext())
        patch.setattr(sweep_runs, "open_tracker", lambda config, home: self.opened(self.sweeps))

    def opened(self, among: list[MemoryTracker]) -> MemoryTracker:
        among.append(MemoryTracker())
        return among[-1]

    def run(
        self, config: PipelineConfig, planned: Any, wanted: RunOptions, options: Any, home: Home, listener: Any, **kept: Any
    ) -> Mapping[str, ArtifactRef]:
        for override in wanted.overrides:
            if override in self.errors:
                raise self.errors[override]
        tracker = self.opened(self.trackers)
        with open_run(
            config, lifecycle, wanted, home=home, tracker=tracker, listener=listener, runtime=kept["runtime"]
        ) as run:
            return run_stages(run, lifecycle, lambda spec, kind: run.stage(spec, lambda *_: None).ref, tags={})  # type: ignore[arg-type,return-value]

    def computed(self) -> Counter[str]:
        return Counter(stage.label for tracker in self.trackers for stage in tracker.stages.values())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def test_points_share_what_they_can_and_the_table_says_so(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = str(write_mini(tmp_path))
    assert main(["sweep", profile, "--grid", FOUR]) == 0
    assert runs.computed() == dict.fromkeys(OF_EACH_POINT, 4) | dict.fromkeys(SHARED, 1)
    out = capsys.readouterr().out
    assert "computed 16 stages (prepare_data 1, sft 1, ppo 4," in out and "; 12 were hits" in out
    assert "best: ppo.kl_coef=" in out
    (folder,) = (tmp_path / "home" / "sweeps").iterdir()
    points = json.loads((folder / "sweep.json").read_text())["points"]
    assert [len(point["hits"]) for point in points] == [0, 4, 4, 4]
    gold = [point["measures"]["evaluate"]["ppo/gold"] for point in points]
    assert all(one["low"] <= one["mean"] <= one["high"] for one in gold)
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")

    (sweep,) = runs.sweeps
    assert {tracker.tags["mlflow.parentRunId"] for tracker in runs.trackers} == {sweep.run_id}
    assert [tracker.tags["sweep.ppo.kl_coef"] for tracker in runs.trackers] == ["0.01", "0.02", "0.05", "0.1"]
    assert [tracker.tags["name"] for tracker in runs.trackers][0] == "mini ppo.kl_coef=0.01"
    ((_, numbers),) = runs.trackers[0].parent.points
    assert numbers["evaluate/ppo/gold"] == gold[0]["mean"] and numbers["run/hits"] == 0
    assert sweep.tags["sweep.best"].startswith("ppo.kl_coef=") and sweep.status == "FINISHED"
    assert ("", "sweep.png") in sweep.parent.files and len(sweep.parent.tables["sweep"][1]) == 4

    again = Counter(runs.computed())
    assert main(["sweep", profile, "--grid", FOUR]) == 0
    assert "computed 0 stages (none); 28 were hits" in capsys.readouterr().out
    assert runs.computed() == again and len(runs.sweeps) == 1  # nothing to record: nothing was computed
