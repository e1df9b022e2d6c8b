import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution import executor
from pipelines.execution.budget import SPENT
from pipelines.execution.executor import Progress, RunContext, RunOptions, StageOutcome
from pipelines.execution.opening import open_run, store_of
from pipelines.execution.run import PipelineRun
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_contrib.ray_jobs import executor as ray_job
from rlhf_contrib.ray_jobs.executor import OUTCOME, SPEC, JobOutcome, write_outcome
from rlhf_core.errors import ConfigError, RlhfError, TrainingError, WorkerLostError
from rlhf_core.stage import stopping
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store import attempts
from rlhf_core.tracking.memory import MemoryStageTracker, MemoryTracker
from tests.rlhf_contrib.ray_jobs.forked_jobs import ForkedJobs
from tests.support.buckets import Nodes
from tests.support.listener import Notes
from tests.support.small_pipeline import two_toys, write_mini
from tests.support.toy_stage import NoEngines, ToyConfig, stage_key, toy_spec
from tests.support.toy_stage import run_toy as run_stage

SLOW = ToyConfig(steps=40, seconds_a_step=0.2)
SPEC_OF_A_TOY = toy_spec(ToyConfig(), label="a/toy")


@pytest.fixture(autouse=True)
def quickly(monkeypatch, home: Home) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(ray_job, "POLL_S", 0.05)
    monkeypatch.setattr(ray_job, "TICK_S", 0.01)
    monkeypatch.setattr(executor, "PAUSE_S", 0.0)
    monkeypatch.setattr(stopping, "GRACE_S", 0.2)


@pytest.fixture
def jobs() -> Iterator[ForkedJobs]:
    server = ForkedJobs()
    yield server
    for job_id, process in server.processes.items():
        if process is not None and process.is_alive():
            server.kill(job_id)


def new_run(tmp_path: Path, home: Home, *overrides: str, force: tuple[str, ...] = ()) -> RunContext:
    config = load_profile(write_mini(tmp_path), ["runtime.execution=ray-job", *overrides])
    return RunContext(config, RunOptions(force=force), store_of(config, home), MemoryTracker(), Notes())


def nothing(done: int, total: int, message: str) -> None:
    return None


def run_toy(
    run: RunContext, jobs: ForkedJobs, spec: StageSpec = SPEC_OF_A_TOY, progress: Progress = nothing
) -> StageOutcome:
    return ray_job.RayJobExecutor(run, lambda: jobs).execute(spec, progress)


def of(run: RunContext, kind: str) -> list[tuple[object, ...]]:
    assert isinstance(run.listener, Notes)
    return run.listener.of(kind)


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def submitted(run: RunContext, jobs: ForkedJobs, spec: StageSpec) -> Iterator[str]:
    """A job whose flow has died: nobody waits for it."""
    job = ray_job._attach_or_submit(run, spec, stage_key(spec), jobs).job
    wait_until(lambda: list(run.store.layout.attempt(job.key).glob("work-*/ckpt/step-*")))
    yield job.job_id


def test_a_job_makes_the_same_artifact_as_the_flow_would_and_says_how_far_it_is(tmp_path, home, jobs):
    run, shown = new_run(tmp_path, home), []
    outcome = run_toy(run, jobs, progress=lambda *progress: shown.append(progress))
    other = store_of(load_profile(write_mini(tmp_path), [f"store={tmp_path / 'other'}"]), home)
    expected, _ = execute(
        other, SPEC_OF_A_TOY, runtime=NoEngines(), tracker=MemoryStageTracker(), progress=lambda *_: None
    )
    assert outcome.ref.digest == expected.digest and outcome.metrics == {"total": 1.5}
    assert of(run, "started") == [("a/toy", "RUN")] and outcome.decision.action == "RUN"
    assert of(run, "progress")[-1] == ("a/toy", 3, 3) and shown[-1] == (3, 3, "counting")
    assert of(run, "metrics")[-1] == ("a/toy", 3)
    (job_id,) = jobs.processes
    assert job_id == f"rlhf-a-toy-{stage_key(SPEC_OF_A_TOY)[:12]}-a1"
    record = run.store.record(stage_key(SPEC_OF_A_TOY))
    assert record is not None and record.tracking["ray.submission_id"] == job_id


def test_a_run_attaches_to_the_job_that_a_dead_flow_left_at_work(tmp_path, home, jobs):
    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=20, seconds_a_step=0.05))
    with submitted(new_run(tmp_path, home), jobs, spec) as job_id:
        run = new_run(tmp_path, home)
        outcome = run_toy(run, jobs, spec)
    assert of(run, "started") == [("a/toy", "ATTACH")] and job_id in outcome.decision.reason
    assert list(jobs.processes) == [job_id] and jobs.stopped == []
    assert [past.status for past in attempts.history(run.store.attempts(stage_key(spec)))] == ["committed"]


def test_a_killed_job_is_submitted_again_and_goes_on_from_its_checkpoint(tmp_path, home, jobs):
    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=20, seconds_a_step=0.05))
    run = new_run(tmp_path, home)
    with submitted(run, jobs, spec) as first:
        jobs.kill(first)
    outcome = run_toy(run, jobs, spec)
    assert list(jobs.processes) == [first, first.replace("-a1", "-a2")]
    assert outcome.decision.action == "RESUME" and of(run, "started") == [("a/toy", "RESUME")]
    record = run.store.record(stage_key(spec))
    assert record is not None and record.attempts == 2 and record.resumed_from == outcome.decision.step


def test_jobs_that_die_without_progress_end_as_one_error(tmp_path, home):
    jobs = ForkedJobs(lambda arguments: 1)
    with pytest.raises(
        WorkerLostError,
        match=r"lost its workers 3 times .*rlhf-a-toy-.*-a3': ended as FAILED without writing its outcome.*`ray job logs",
    ):
        run_toy(new_run(tmp_path, home), jobs)
    assert len(jobs.processes) == 3


def test_a_job_that_the_cluster_forgot_is_submitted_again_under_a_new_name(tmp_path, home, jobs):
    run = new_run(tmp_path, home)
    with submitted(run, jobs, replace(SPEC_OF_A_TOY, config=SLOW)) as first:
        jobs.kill(first)
        jobs.processes.clear()
    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=40))
    run_toy(run, jobs, spec)
    assert list(jobs.processes) == [first.replace("-a1", "-a2")]


def test_the_error_of_a_stage_comes_back_as_one_error_and_is_not_tried_again(tmp_path, home, jobs):
    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(trouble="raise:2"))
    with pytest.raises(RlhfError, match=r"^a/toy: ValueError: step 2 went wrong; .*`ray job logs rlhf-a-toy-\w+-a1`$"):
        run_toy(new_run(tmp_path, home), jobs, spec)
    assert len(jobs.processes) == 1


def test_a_job_that_stays_pending_is_stopped_and_named(tmp_path, home, jobs):
    jobs.pending = True
    with pytest.raises(ConfigError, match=r"runtime.job_pending_timeout_s = 0.2: Ray job \S+ was still PENDING"):
        run_toy(new_run(tmp_path, home, "runtime.job_pending_timeout_s=0.2"), jobs)
    assert jobs.stopped == list(jobs.processes)


def test_a_silent_job_server_ends_the_watch_but_not_the_job(tmp_path, home, jobs, monkeypatch):
    monkeypatch.setattr(ray_job, "SERVER_AWAY_S", 0.2)
    jobs.silent = True
    with pytest.raises(TrainingError, match=r"has not answered for .*connection refused.* run again: it attaches"):
        run_toy(new_run(tmp_path, home), jobs, replace(SPEC_OF_A_TOY, config=SLOW))
    assert jobs.stopped == [] and [job.state for job in jobs.all()] == ["RUNNING"]


def test_a_result_that_is_there_counts_though_the_job_server_has_died(tmp_path, home, jobs):
    jobs.silent = True
    assert run_toy(new_run(tmp_path, home), jobs).metrics == {"total": 1.5}


@pytest.mark.parametrize("writes", [True, False])
def test_a_result_counts_that_a_job_has_committed_since_the_last_look_at_the_bucket(
    tmp_path, home, jobs, monkeypatch, writes
):
    """The flow has just read that the last attempt failed. The job may be killed before it `writes` its outcome."""
    nodes = Nodes(tmp_path, monkeypatch)
    job = nodes.store("job")
    with pytest.raises(ValueError, match="step 2 went wrong"):
        run_stage(job, replace(SPEC_OF_A_TOY, config=ToyConfig(trouble="raise:2")))

    def submit(job_id: str, command: str, **_: Any) -> bool:
        run_stage(job, SPEC_OF_A_TOY)
        if writes:
            write_outcome(Path(shlex.split(command)[-1]), JobOutcome("done"))
        return True

    monkeypatch.setattr(jobs, "submit", submit)
    run = replace(new_run(tmp_path, home), store=nodes.store("flow"))
    assert run_toy(run, jobs).metrics == {"total": 1.5}


def test_a_flow_that_is_asked_to_stop_stops_its_job(tmp_path, home, jobs):
    def stop(done: int, total: int, message: str) -> None:
        stopping.ask("SIGTERM arrived")

    try:
        with pytest.raises(stopping.StageStopped, match="SIGTERM arrived"):
            run_toy(new_run(tmp_path, home), jobs, replace(SPEC_OF_A_TOY, config=SLOW), progress=stop)
    finally:
        stopping._asked.clear()
    assert jobs.stopped == list(jobs.processes)
    jobs.join()


def test_a_flow_that_is_interrupted_stops_its_job(tmp_path, home, jobs):
    def interrupt(done: int, total: int, message: str) -> None:
        raise KeyboardInterrupt

    run = new_run(tmp_path, home)
    spec = replace(SPEC_OF_A_TOY, config=SLOW)
    with pytest.raises(KeyboardInterrupt):
        run_toy(run, jobs, spec, progress=interrupt)
    assert jobs.stopped == list(jobs.processes)
    jobs.join()
    (past,) = attempts.history(run.store.attempts(stage_key(spec)))
    assert past.status == "interrupted"


def test_our_budget_does_not_stop_the_job_of_another_run(tmp_path, home, jobs):
    def spend(done: int, total: int, message: str) -> None:
        stopping.ask(SPENT)

    spec = replace(SPEC_OF_A_TOY, config=SLOW)
    try:
        with (
            submitted(new_run(tmp_path, home), jobs, spec),
            pytest.raises(stopping.StageStopped, match=SPENT),
        ):
            run_toy(new_run(tmp_path, home), jobs, spec, progress=spend)
    finally:
        stopping._asked.clear()
    assert jobs.stopped == [] and [job.state for job in jobs.all()] == ["RUNNING"]


def test_a_flow_that_fails_leaves_its_job_at_work(tmp_path, home, jobs):
    def fail(done: int, total: int, message: str) -> None:
        raise OSError("the page of the run is away")

    with pytest.raises(OSError, match="is away"):
        run_toy(new_run(tmp_path, home), jobs, replace(SPEC_OF_A_TOY, config=SLOW), progress=fail)
    assert jobs.stopped == [] and [job.state for job in jobs.all()] == ["RUNNING"]


def test_who_attached_to_a_job_that_its_own_flow_stopped_submits_another(tmp_path, home, jobs):
    stopped: list[str] = []

    def stop_the_first(done: int, total: int, message: str) -> None:
        if not stopped:
            stopped.append(next(iter(jobs.processes)))
            jobs.stop(stopped[0])

    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=50, seconds_a_step=0.02))
    with submitted(new_run(tmp_path, home), jobs, spec):
        outcome = run_toy(new_run(tmp_path, home), jobs, spec, progress=stop_the_first)
    assert len(jobs.processes) == 2 and outcome.decision.action == "RESUME"


def test_who_forces_a_stage_does_not_take_what_an_unforced_job_makes(tmp_path, home, jobs):
    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=10, seconds_a_step=0.05))
    with submitted(new_run(tmp_path, home), jobs, spec):
        outcome = run_toy(new_run(tmp_path, home, force=("a/toy",)), jobs, spec)
    assert len(jobs.processes) == 2 and outcome.decision.reason == "forced"
    assert [jobs.metadata[job_id]["forced"] for job_id in jobs.processes] == ["no", "yes"]


def test_the_same_key_in_another_store_is_another_job(tmp_path, home, jobs):
    with submitted(new_run(tmp_path, home, f"store={tmp_path / 'other'}"), jobs, replace(SPEC_OF_A_TOY, config=SLOW)):
        outcome = run_toy(new_run(tmp_path, home), jobs, replace(SPEC_OF_A_TOY, config=ToyConfig(steps=40)))
    assert outcome.decision.action == "RUN" and len(jobs.processes) == 2


def test_a_name_that_another_run_took_a_moment_ago_is_attached_to(tmp_path, home):
    class Faster(ForkedJobs):
        def submit(self, *arguments: Any, **named: Any) -> bool:
            super().submit(*arguments, **named)  # another run, a moment before
            return False

    spec = replace(SPEC_OF_A_TOY, config=ToyConfig(steps=10, seconds_a_step=0.05))
    run, jobs = new_run(tmp_path, home), Faster()
    assert run_toy(run, jobs, spec).decision.action == "ATTACH"
    assert len(jobs.processes) == 1
    jobs.join()


def test_what_a_job_gets_holds_no_token(tmp_path, home, jobs, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    run = new_run(tmp_path, home)
    run_toy(run, jobs)
    folder = run.store.layout.attempt(stage_key(SPEC_OF_A_TOY)) / ray_job.JOBS
    sent = f"{jobs.environment}{jobs.metadata}{[path.read_text() for path in folder.rglob('*.json')]}"
    assert "hf_abc" not in sent and "RLHF_HOME" in sent
    assert sorted(path.name for path in folder.rglob("*.json")) == [OUTCOME, "progress.json", SPEC]


def test_a_password_in_the_address_of_mlflow_is_refused_before_a_job_could_show_it(tmp_path, home, jobs, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@mlflow.example:5000")
    run = new_run(tmp_path, home)
    run.tracker.token = "t"
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI = 'http://\*\*\*@mlflow.*MLFLOW_TRACKING_PASSWORD"):
        run_toy(run, jobs)
    assert jobs.processes == {}


def test_a_job_that_was_stopped_after_its_commit_is_done(tmp_path, home):
    def body(arguments: list[str]) -> int:
        from rlhf_contrib.ray_jobs.job import main

        main(arguments)
        (Path(arguments[0]) / OUTCOME).unlink()
        return 1

    assert run_toy(new_run(tmp_path, home), ForkedJobs(body)).decision.action == "RUN"


def test_without_a_cluster_the_run_is_refused_before_its_first_stage(tmp_path, home, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_profile(write_mini(tmp_path), ["runtime.execution=ray-job"])
    notes = Notes()
    with (
        pytest.raises(ConfigError, match=r"runtime.execution = 'ray-job': a job needs a Ray cluster that outlives"),
        open_run(config, two_toys, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes),
    ):
        pass
    assert notes.of("started") == []


def test_a_question_of_a_job_is_asked_once_and_answered_for_the_run(tmp_path, home, jobs):
    context = new_run(tmp_path, home)
    run = PipelineRun(context, ray_job.RayJobExecutor(context, lambda: jobs), links={"prefect.flow_run_id": "f1"})
    spec = toy_spec(ToyConfig(trouble="ask"))
    with pytest.raises(stopping.StageWaiting) as waits:
        run.stage(spec, nothing)
    assert str(waits.value).count("`rlhf approve mini pace") == 1
    decisions = GateDecisions(context.store.shared)
    (request,) = decisions.requests()
    assert request.asked_in("mini") and request.asked_in("f1")
    decisions.decide(request, "approve", reason="fine")
    assert run.stage(spec, nothing).decision.action == "RESUME"
