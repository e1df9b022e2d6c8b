"""A stage as a job: what the job is told, what it reports, and how it ends."""

import json
import logging
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_contrib.ray_jobs import executor as ray_job
from rlhf_contrib.ray_jobs.executor import (
    PROGRESS,
    SPEC,
    JobOutcome,
    JobSpec,
    Reporter,
    Watcher,
    error_of,
    failure,
    read_outcome,
    read_spec,
    restore_stage,
    stored_stage,
    write_outcome,
    write_spec,
)
from rlhf_contrib.ray_jobs.job import main
from rlhf_core.errors import ArtifactError, RewardError, RlhfError
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.key import StageSpec, Strictness, key_payload
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import write_json
from tests.support.forks import forked
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, stage_key, toy_spec


@pytest.fixture(autouse=True)
def _surroundings(home: Home, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(stopping, "GRACE_S", 0.2)


def spec_of(folder: Path, stage: StageSpec, *, key: str, **changes: Any) -> JobSpec:
    unchanged: dict[str, Any] = {"force": False, "strict": Strictness(), "tracking": ""}
    config, store = load_profile(write_mini(folder)), folder / "store"
    return JobSpec(job_id="rlhf-toy-a1", key=key, stage=stage, config=config, store=store, **unchanged | changes)


def job_of(folder: Path, stage: StageSpec, *, key: str) -> BaseProcess:
    """Return a process that runs the stage as a job whose folder is `folder`."""
    write_spec(folder / SPEC, spec_of(folder, stage, key=key))
    return process(folder)


def process(folder: Path) -> BaseProcess:
    started = forked(lambda: main([str(folder)]))
    started.start()
    return started


def ended(job: BaseProcess, folder: Path) -> tuple[int | None, JobOutcome]:
    job.join(30)
    outcome = read_outcome(folder)
    assert outcome is not None
    return job.exitcode, outcome


def test_a_job_commits_by_itself_and_says_that_it_is_done(tmp_path):
    key = stage_key(toy_spec())
    status, outcome = ended(job_of(tmp_path, toy_spec(), key=key), tmp_path)
    assert (status, outcome.status) == (0, "done")
    record = ArtifactStore(tmp_path / "store").record(key)
    assert record is not None and record.tracking["ray.submission_id"] == "rlhf-toy-a1"


def test_a_job_that_cannot_read_its_spec_says_so(tmp_path):
    status, outcome = ended(process(tmp_path), tmp_path)
    assert (status, outcome.status, outcome.error_class) == (1, "failed", "ArtifactError")
    assert "make the store available to the flow and to the cluster under the same path" in outcome.error


def test_a_cluster_that_sees_other_code_is_noticed_by_the_key(tmp_path):
    status, outcome = ended(job_of(tmp_path, toy_spec(), key="0" * 64), tmp_path)
    assert (status, outcome.error_class) == (1, "ConfigError")
    assert outcome.error.startswith("toy.key = '000000000000': the cluster computes ")
    assert ArtifactStore(tmp_path / "store").records() == []


def test_a_job_that_gets_sigterm_ends_as_stopped(tmp_path):
    stage = toy_spec(ToyConfig(trouble=f"wait:{tmp_path / 'never'}"))
    job = job_of(tmp_path, stage, key=stage_key(stage))
    while not (tmp_path / PROGRESS).exists():
        time.sleep(0.01)
    job.terminate()
    status, outcome = ended(job, tmp_path)
    assert (status, outcome.status) == (130, "stopped")


@pytest.mark.parametrize("profile", ["tiny/full", "tiny/rlvr"])
def test_every_stage_of_a_pipeline_keeps_its_key_on_the_way_through_a_file(profile, tmp_path):
    planned = plan_stages(load_profile(profile), ArtifactStore(tmp_path))
    assert len(planned) > 3
    for stage in planned:
        restored = restore_stage(json.loads(json.dumps(stored_stage(stage.spec))))
        assert restored == stage.spec
        assert key_payload(restored) == key_payload(stage.spec)


def test_a_job_comes_back_from_its_file(tmp_path):
    job = spec_of(tmp_path, toy_spec(), key="ab" * 32, force=True, strict=Strictness(env=True), tracking="token")
    write_spec(tmp_path / "spec.json", job)
    assert read_spec(tmp_path / "spec.json") == job
    stored = json.loads((tmp_path / "spec.json").read_text())
    assert stored["strict"] == {"code": False, "env": True}


def test_a_file_that_is_not_there_is_refused_with_what_is_probably_wrong(tmp_path):
    with pytest.raises(
        ArtifactError,
        match="cannot be read here; make the store available to the flow and to the cluster under the same",
    ):
        read_spec(tmp_path / "spec.json")


def test_a_class_that_is_no_configuration_is_refused():
    stored = stored_stage(toy_spec())
    stored["config"]["type"] = "pathlib:Path"
    with pytest.raises(ArtifactError, match=r"stage.config.type = 'pathlib:Path': is not a configuration class"):
        restore_stage(stored)


RUN = Decision("RUN", "first run", "ab", None)
ATTACH = Decision("ATTACH", "Ray job x is computing it", "ab", None)


def watched(folder: Path, decision: Decision) -> tuple[Reporter, Watcher, Notes, list[tuple[int, int, str]]]:
    notes: Notes = Notes()
    shown: list[tuple[int, int, str]] = []
    watcher = Watcher(folder, "sft", notes, lambda *progress: shown.append(progress), decision=decision)
    return Reporter(folder), watcher, notes, shown


def test_what_the_job_tells_is_passed_on_once(tmp_path):
    reporter, watcher, notes, shown = watched(tmp_path, RUN)
    assert watcher.poll() is None and notes.events == []
    reporter.started("sft", RUN)  # the person knows that one
    resumed = Decision("RESUME", "from step 3 of attempt 1", "ab", 3)
    reporter.progress("sft", 1, 9, "training")
    reporter.metrics("sft", 1, {"sft/loss": 2.0})
    reporter.started("sft", resumed)
    watcher.poll()
    watcher.poll()
    assert notes.events == [("started", "sft", "RESUME"), ("metrics", "sft", 1), ("progress", "sft", 1, 9)]
    assert shown == [(1, 9, "training")] and watcher.decision == resumed


def test_who_attached_is_not_told_why_the_job_runs(tmp_path):
    reporter, watcher, notes, _ = watched(tmp_path, ATTACH)
    reporter.started("sft", RUN)
    watcher.poll()
    assert notes.events == [] and watcher.decision == ATTACH


def test_warnings_of_the_job_reach_the_log_of_the_flow(tmp_path, caplog):
    reporter, watcher, _, _ = watched(tmp_path, RUN)
    reporter.emit(logging.makeLogRecord({"msg": "trainer died; retrying from step %d", "args": (40,)}))
    reporter.finished("sft", RUN, {}, 1.0)
    watcher.poll()
    assert caplog.messages == ["sft: trainer died; retrying from step 40"]


def test_progress_is_written_now_and_then_and_the_last_of_it_soon(tmp_path, monkeypatch):
    written: list[Path] = []

    def write(path: Path, value: Mapping[str, Any], *, durable: bool) -> None:
        written.append(path)
        write_json(path, value, durable=durable)

    monkeypatch.setattr(ray_job, "write_json", write)
    reporter, watcher, _, shown = watched(tmp_path, RUN)
    for step in range(1, 1001):
        reporter.progress("sft", step, 1000, "")
    while not shown or shown[-1][0] < 1000:  # though nothing more is told
        watcher.poll()
        time.sleep(0.01)
    assert len(written) < 10


def test_a_folder_that_cannot_be_written_costs_the_job_nothing(tmp_path, caplog):
    (tmp_path / PROGRESS).mkdir()
    Reporter(tmp_path).started("sft", RUN)
    assert "progress is not shown" in caplog.text


def test_an_outcome_comes_back_from_its_file(tmp_path):
    assert read_outcome(tmp_path) is None
    outcome = JobOutcome("done", RUN, [{"prompt": "a"}])
    write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path) == outcome


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (RewardError("reward = nan: must be finite; fix it"), RewardError, "reward = nan: must be finite; fix it"),
        (KeyError("loss"), RlhfError, "ppo: KeyError: 'loss'; for the traceback see `ray job logs x`"),
    ],
)
def test_an_error_comes_back_with_its_text_and_one_of_ours_with_its_class(raised, kind, said):
    error = error_of(failure(raised), label="ppo", log="`ray job logs x`")
    assert type(error) is kind and str(error) == said
