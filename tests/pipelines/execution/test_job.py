from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipelines.execution.job import main
from pipelines.execution.ray_job import PROGRESS, SPEC, JobOutcome, JobSpec, read_outcome, write_spec
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.stage import stopping
from rlhf_core.stage.key import StageSpec, Strictness, stage_key
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.forks import forked
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec


@pytest.fixture(autouse=True)
def _surroundings(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(stopping, "GRACE_S", 0.2)


def job_of(folder: Path, stage: StageSpec, *, key: str) -> BaseProcess:
    """Return a process that runs the stage as a job whose folder is `folder`."""
    job = JobSpec(
        job_id="rlhf-toy-a1",
        key=key,
        stage=stage,
        config=load_profile(write_mini(folder)),
        store=folder / "store",
        force=False,
        strict=Strictness(),
        tracking="",
    )
    write_spec(folder / SPEC, job)
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


def test_a_job_commits_by_itself_and_says_that_it_is_done(tmp_path: Path) -> None:
    key = stage_key(toy_spec())
    status, outcome = ended(job_of(tmp_path, toy_spec(), key=key), tmp_path)
    assert (status, outcome.status) == (0, "done")
    record = ArtifactStore(tmp_path / "store").record(key)
    assert record is not None and record.tracking["ray.submission_id"] == "rlhf-toy-a1"


def test_a_job_that_cannot_read_its_spec_says_so(tmp_path: Path) -> None:
    status, outcome = ended(process(tmp_path), tmp_path)
    assert (status, outcome.status, outcome.error_class) == (1, "failed", "ArtifactError")
    assert "make the store available to the flow and to the cluster under the same path" in outcome.error


def test_a_cluster_that_sees_other_code_is_noticed_by_the_key(tmp_path: Path) -> None:
    status, outcome = ended(job_of(tmp_path, toy_spec(), key="0" * 64), tmp_path)
    assert (status, outcome.error_class) == (1, "ConfigError")
    assert outcome.error.startswith("toy.key = '000000000000': the cluster computes ")
    assert ArtifactStore(tmp_path / "store").records() == []


def test_a_job_that_gets_sigterm_ends_as_stopped(tmp_path: Path) -> None:
    stage = toy_spec(ToyConfig(trouble=f"wait:{tmp_path / 'never'}"))
    job = job_of(tmp_path, stage, key=stage_key(stage))
    while not (tmp_path / PROGRESS).exists():
        time.sleep(0.01)
    job.terminate()
    status, outcome = ended(job, tmp_path)
    assert (status, outcome.status) == (130, "stopped")
