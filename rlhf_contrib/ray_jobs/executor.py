"""Execute stages as Ray jobs: submit a job or attach to a running one, watch it, and stop it when this run is stopped.

The job holds the lease and commits. The store therefore decides whether a stage is done, not Ray, because a restarted
cluster has forgotten its jobs. If a flow is killed, its job keeps running, and the next run attaches to it.

A job reports its progress and outcome to the waiting flow through files in a shared folder. Each file is replaced
atomically, so a reader sees the old or the new version. The files outlive the job, the flow and the cluster.
"""

import importlib
import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pipelines.execution.budget import SPENT
from pipelines.execution.executor import Listener, Progress, RunContext, StageOutcome, reached, retry_lost_workers
from pipelines.execution.plan import PlannedStage
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.run_rules import BudgetConfig
from pipelines.services.home import OWN, Home, quiet_environment
from pipelines.services.user_servers import REGISTRY, tracking_uri
from rlhf_contrib.ray_jobs.jobs import Job, Jobs, JobServerError, open_jobs
from rlhf_core.errors import ArtifactError, ConfigError, RlhfError, TrainingError, WorkerLostError, explain
from rlhf_core.runtime.cluster import available_cores, threads_per_worker, worker_environment
from rlhf_core.schema.base import Config
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision, decide_work, fitting_record, target_of, unfit
from rlhf_core.stage.key import StageInput, StageSpec, Strictness
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.leases import name_of
from rlhf_core.store.opening import place_of, store_root
from rlhf_core.store.records import restore_handle, stored_handle
from rlhf_core.types import ArtifactRef

# ---------------------------------------------------------------- job report

logger = logging.getLogger(__name__)

SPEC = "spec.json"
PROGRESS = "progress.json"
OUTCOME = "outcome.json"
WRITE_EVERY_S = 0.5  # more often would be invisible to people, and each write is a file on a shared disk
WARNINGS_KEPT = 50  # enough for a stage that warns at every step
ONE_PATH = "make the store available to the flow and to the cluster under the same path"
"""Remedy if the flow and the cluster do not see the same files."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of a job. A `done` stage has `samples`, a `failed` one has the error's class and text.

    A stage that is `waiting` for people has its reason in `error`, and in `condition` in a form for other processes.
    """

    status: Literal["done", "failed", "waiting", "stopped"]
    decision: Decision | None = None
    samples: list[dict[str, str]] = field(default_factory=list)
    error_class: str = ""
    error: str = ""
    condition: dict[str, Any] = field(default_factory=dict)


def write_outcome(folder: Path, outcome: JobOutcome) -> None:
    """Write the outcome of the job, as its last action."""
    write_json(folder / OUTCOME, asdict(outcome))


def read_outcome(folder: Path) -> JobOutcome | None:
    """Read the outcome of the job; None if it still runs, or was killed before it could write one."""
    table = read_json(folder / OUTCOME)
    if table is None:
        return None
    decision = table["decision"]
    return JobOutcome(**(table | {"decision": None if decision is None else Decision(**decision)}))


class Reporter(Listener, logging.Handler):
    """The `Listener` of a job, which writes events to `progress.json`. As a log handler, it also reports warnings."""

    def __init__(self, folder: Path) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self._path = folder / PROGRESS
        self._report = _empty_report()
        self._changing = threading.Lock()
        self._due: threading.Timer | None = None

    def started(self, label: str, decision: Decision) -> None:
        with self._changing:
            self._report["decisions"].append(asdict(decision))
        self._write()

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        with self._changing:
            self._report["progress"] = [done, total, message]
            self._write_soon()

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        with self._changing:
            self._report["metrics"].update(values)
            self._report["step"] = step
            self._write_soon()

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        self._write()

    def failed(self, label: str, error: BaseException) -> None:
        self._write()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__ and len(self._report["warnings"]) < WARNINGS_KEPT:
            self._report["warnings"].append(record.getMessage())

    def _write_soon(self) -> None:
        """Write the report within `WRITE_EVERY_S`, even if no event follows, because the next step may take minutes."""
        if self._due is None:
            self._due = threading.Timer(WRITE_EVERY_S, self._write)
            self._due.daemon = True
            self._due.start()

    def _write(self) -> None:
        try:
            with self._changing:
                self._due = None
                write_json(self._path, self._report, durable=False)
        except OSError as error:  # a full disk must not fail the stage
            logger.warning("%s: %s; progress is not shown", self._path, error)


class Watcher:
    """A reader of a job's report that passes on new entries."""

    def __init__(
        self,
        folder: Path,
        label: str,
        listener: Listener,
        show_progress: Callable[[int, int, str], None],
        *,
        decision: Decision,
    ) -> None:
        self.decision = decision
        """The latest reported decision: the newest of the job, or this run's to ATTACH."""
        self._folder = folder
        self._label = label
        self._listener = listener
        self._show_progress = show_progress
        self._seen = _empty_report()

    def poll(self) -> JobOutcome | None:
        """Pass on the job's reports since the last call; returns its outcome, or None while it runs."""
        outcome = read_outcome(self._folder)  # first, so that nothing reported before the end is lost
        report = read_json(self._folder / PROGRESS)
        if report is not None and report != self._seen:
            self._pass_on(report)
            self._seen = report
        return outcome

    def _pass_on(self, report: dict[str, Any]) -> None:
        seen = self._seen
        for table in report["decisions"][len(seen["decisions"]) :]:
            self._decided(Decision(**table))
        for text in report["warnings"][len(seen["warnings"]) :]:
            logger.warning("%s: %s", self._label, text)
        if report["metrics"] != seen["metrics"]:
            self._listener.metrics(self._label, report["step"], report["metrics"])
        if report["progress"] not in (None, seen["progress"]):
            done, total, message = report["progress"]
            self._listener.progress(self._label, done, total, message)
            self._show_progress(done, total, message)

    def _decided(self, decision: Decision) -> None:
        if self.decision.action != "ATTACH" and decision != self.decision:
            self.decision = decision
            self._listener.started(self._label, decision)


def failure(error: Exception) -> JobOutcome:
    """The outcome of a job that ended with `error`."""
    return JobOutcome("failed", error_class=type(error).__name__, error=without_secrets(str(error)))


def error_of(outcome: JobOutcome, *, label: str, log: str) -> RlhfError:
    """Convert a failed job's outcome to an error. RlhfErrors keep class and text; the text names the class of others.

    `log` is the location of the job's log.
    """
    kinds = {kind.__name__: kind for kind in _family(RlhfError)}
    if outcome.error_class in kinds:
        return kinds[outcome.error_class](outcome.error)
    return RlhfError(f"{label}: {outcome.error_class}: {outcome.error}; for the traceback see {log}")


def _empty_report() -> dict[str, Any]:
    return {"decisions": [], "progress": None, "metrics": {}, "step": 0, "warnings": []}


def _family(kind: type[RlhfError]) -> list[type[RlhfError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in _family(child))]


# ---------------------------------------------------------------- job spec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A stage and its surroundings. `job_id` is the name of the job on the cluster.

    `key` was computed by the submitter. If the job computes a different key, it sees other code or other files.
    `tracking` is the token of the pipeline run that the stage's tracking run belongs to, "" for a tracker that no other
    process can join.
    """

    job_id: str
    key: str
    stage: StageSpec
    config: PipelineConfig
    store: Path
    force: bool
    strict: Strictness
    tracking: str


def write_spec(path: Path, job: JobSpec) -> None:
    """Write the job to a file and sync it to disk."""
    config = job.config.model_dump(mode="json", exclude_none=True)
    ours = {
        "stage": stored_stage(job.stage),
        "config": config,
        "store": place_of(job.store),
        "strict": asdict(job.strict),
    }
    write_json(path, _fields(job) | ours)


def read_spec(path: Path) -> JobSpec:
    """Read the job that `write_spec` wrote; raises ArtifactError if the file is missing."""
    table = read_json(path)
    if table is None:
        raise ArtifactError("job", str(path), "cannot be read here", ONE_PATH)
    config = PipelineConfig.model_validate(
        table["config"]
    )  # first, because it creates the classes of stages that are named by path
    return JobSpec(
        **table
        | {
            "stage": restore_stage(table["stage"]),
            "config": config,
            "store": store_root(table["store"]),
            "strict": Strictness(**table["strict"]),
        }
    )


def stored_stage(spec: StageSpec) -> dict[str, Any]:
    """Convert a stage to a JSON table, from which `restore_stage` rebuilds it."""
    kind = type(spec.config)
    config = {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": spec.config.model_dump(mode="json")}
    inputs = {name: _stored_input(value) for name, value in spec.inputs.items()}
    return _fields(spec) | {"config": config, "inputs": inputs, "callables": list(spec.callables)}


def restore_stage(stored: Mapping[str, Any]) -> StageSpec:
    """Rebuild a stage from `stored_stage` with its original types, so that its key is the same."""
    module, _, name = stored["config"]["type"].partition(":")
    kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        rule, remedy = "is not a configuration class", "use the version of this program that wrote it"
        raise ArtifactError("stage.config.type", stored["config"]["type"], rule, remedy)
    config = kind.model_validate(stored["config"]["fields"])
    inputs = {name: _restore_input(value) for name, value in stored["inputs"].items()}
    return StageSpec(**{**stored, "config": config, "inputs": inputs, "callables": tuple(stored["callables"])})


def _fields(value: JobSpec | StageSpec) -> dict[str, Any]:
    """The fields of a dataclass, unchanged; `asdict` would copy the configuration in them."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _stored_input(value: StageInput) -> Any:
    if isinstance(value, ArtifactRef):
        return stored_handle(value)
    if isinstance(value, tuple):
        return [stored_handle(ref) for ref in value]
    return {"table": {label: stored_handle(ref) for label, ref in value.items()}}


def _restore_input(stored: Any) -> StageInput:
    if isinstance(stored, list):
        return tuple(restore_handle(item) for item in stored)
    if "table" in stored:
        return {label: restore_handle(item) for label, item in stored["table"].items()}
    return restore_handle(stored)


# ---------------------------------------------------------------- ray job

JOBS = ".jobs"
"""Folder within the folder of a key's attempts, for the spec, the progress and the outcome of each job."""
POLL_S = 2.0  # between requests to the job server
TICK_S = 0.25  # between reads of the job's report
SERVER_AWAY_S = 120.0
"""Seconds without a response of the job server after which the run stops watching; the job itself continues."""
STOP_MARGIN_S = 10
"""Seconds between the end of a stage's grace period and SIGKILL."""
INHERITED = ("HF_HOME", "HF_HUB_OFFLINE", "RLHF_GRACE_S")
"""Variables that the job inherits. All others, including tokens, come from the cluster; no token is sent."""


class JobLost(WorkerLostError):
    """A job ended without an outcome: its process, its node or the cluster died."""


@dataclass(frozen=True)
class RayJobExecutor:
    """A `StageExecutor` that runs each stage as a job of the Ray at `RAY_ADDRESS`; engines run only in the jobs."""

    context: RunContext
    connect: Callable[[], Jobs] = open_jobs

    def prepare(self, planned: Sequence[PlannedStage]) -> None:
        """Raise ConfigError unless a job server responds and no address that is passed to jobs contains a password.

        Secrets are not checked here. A job has the environment of its cluster, and checks secrets when it starts.
        """
        if all(stage.decision.action in ("HIT", "BLOCKED") for stage in planned):
            return
        self.connect()
        if self.context.tracker.token:
            _address("MLFLOW_TRACKING_URI", tracking_uri(Home.here()))
            _address(REGISTRY, os.environ.get(REGISTRY, ""))

    def execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Run the stage as a job and wait for its result; lost jobs are resubmitted from the newest checkpoint."""
        began, context, jobs = time.monotonic(), self.context, self.connect()

        def attempt() -> _Ended:
            submission = _attach_or_submit(context, spec, context.key_of(spec), jobs)
            return _await(context, submission, show_progress, jobs)

        while True:
            ended = retry_lost_workers(
                attempt,
                label=spec.label,
                retries=context.config.runtime.retries,
                where=lambda: reached(context.store, context.key_of(spec)),
                sleep=time.sleep,
            )
            # Raised here and not in `attempt`, because a job retries by itself before it fails.
            if ended.outcome is not None and ended.outcome.status == "failed":
                log = f"`ray job logs {ended.submission.job.job_id}`"
                raise error_of(ended.outcome, label=spec.label, log=log)
            if not unfit(spec, context.store.record(ended.submission.job.key)):
                return _result(context, ended, time.monotonic() - began)
            # The job belongs to another run, and it failed under that run's settings for failed answers.

    def close(self) -> None:
        """Do nothing: jobs outlive the run."""


# ---------------------------------------------------------------- submitting


@dataclass(frozen=True, slots=True)
class _Submission:
    """A job that we submitted, or `attached` to."""

    job: JobSpec
    folder: Path
    attached: bool


def _attach_or_submit(context: RunContext, spec: StageSpec, key: str, jobs: Jobs) -> _Submission:
    root = context.store.root.resolve()
    force = spec.label in context.options.force
    known = jobs.all()
    number = _next_number(context.store, key, known)
    jobs_folder = _jobs_folder(context.store, key)
    while True:
        wanted = [job.id for job in known if job.living and _computes(job, key, root, force=force)]
        living = [job_id for job_id in wanted if read_outcome(jobs_folder / job_id) is None]  # the others are ending
        stem = f"rlhf-{re.sub(r'[^A-Za-z0-9]+', '-', spec.label)}-{key[:12]}"
        job = JobSpec(
            job_id=living[-1] if living else f"{stem}-a{number}",
            key=key,
            stage=spec,
            config=_inline(context),
            store=root,
            force=force,
            strict=context.options.strict,
            tracking=context.tracker.token,
        )
        folder = jobs_folder / job.job_id
        if living:
            return _Submission(job, folder, attached=True)
        write_spec(folder / SPEC, job)
        if jobs.submit(job.job_id, _command(folder), environment=_environment(context), metadata=_metadata(job)):
            return _Submission(job, folder, attached=False)
        known, number = jobs.all(), number + 1  # the name is taken: another run was faster, or another store uses it


def _inline(context: RunContext) -> PipelineConfig:
    """The configuration with which the job runs the stage in-process; gates and budget stay with this run."""
    runtime = context.config.runtime.model_copy(update={"execution": "inline"})
    ours = {"gates": (), "budget": BudgetConfig(), "notify": None}
    return context.config.model_copy(update={"runtime": runtime} | ours)


def _next_number(store: ArtifactStore, key: str, known: list[Job]) -> int:
    """The next free number: one more than all attempts and jobs of the key."""
    names = [path.name for path in _jobs_folder(store, key).glob("*")]
    names += [job.id for job in known if key[:12] in job.id]
    numbers = [int(name.rpartition("-a")[2]) for name in names if name.rpartition("-a")[2].isdecimal()]
    numbers += [attempt.number for attempt in attempts.history(store.attempts(key))]
    return max(numbers, default=0) + 1


def _computes(job: Job, key: str, store: Path, *, force: bool) -> bool:
    """Whether the job computes the wanted result; with `force`, only a forced job does."""
    wanted = {"store.key": key, "store": str(store)} | ({"forced": "yes"} if force else {})
    return wanted.items() <= dict(job.metadata).items()


def _metadata(job: JobSpec) -> dict[str, str]:
    forced = "yes" if job.force else "no"
    return {"store.key": job.key, "store": str(job.store), "stage": job.stage.label, "forced": forced}


def _command(folder: Path) -> str:
    """Shell command for the cluster's head; it changes to this working folder, so relative paths stay valid."""
    here, python, job = (shlex.quote(str(part)) for part in (Path.cwd(), sys.executable, folder.resolve()))
    return f"cd {here} && exec {python} -P -m rlhf_contrib.ray_jobs.job {job}"


def _environment(context: RunContext) -> dict[str, str]:
    home = Home.here()
    quiet = {name: value for name, value in quiet_environment(home).items() if not name.startswith(("PREFECT", OWN))}
    worker = worker_environment(threads=threads_per_worker(context.config.runtime, cores=available_cores()))
    del worker["HF_HUB_OFFLINE"]  # the stage itself may download a model, as it may in the flow
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    tracking = (
        {"MLFLOW_TRACKING_URI": _address("MLFLOW_TRACKING_URI", tracking_uri(home))} if context.tracker.token else {}
    )
    if tracking and os.environ.get(REGISTRY):
        tracking[REGISTRY] = _address(REGISTRY, os.environ[REGISTRY])
    ray = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(stopping.grace_s()) + STOP_MARGIN_S)}
    return quiet | worker | inherited | tracking | ray


def _address(name: str, address: str) -> str:
    """Check an address that is passed to a job; raises ConfigError if it contains a password."""
    if without_secrets(address) != address:
        rule = "contains a password, which the job server would show to all of its users"
        remedy = "give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to `ray start` instead"
        raise ConfigError(name, without_secrets(address), rule, remedy)
    return address


def _jobs_folder(store: ArtifactStore, key: str) -> Path:
    return store.layout.attempt(key) / JOBS


# ---------------------------------------------------------------- watching


@dataclass(frozen=True, slots=True)
class _Ended:
    """A job that has ended. `outcome` is None if the job was killed after its commit, before it wrote one."""

    submission: _Submission
    outcome: JobOutcome | None
    decision: Decision


def _await(context: RunContext, submission: _Submission, show_progress: Progress, jobs: Jobs) -> _Ended:
    """Wait for the job; raises JobLost if it left neither an outcome nor a result. An interrupt stops the job."""
    job, label = submission.job, submission.job.stage.label
    if submission.attached:
        decision = Decision("ATTACH", f"Ray job {job.job_id} is computing it", job.key, None)
    else:
        target = target_of(context.store, job.stage, strict=job.strict)
        decision = decide_work(context.store, job.stage, target, force=job.force)
    context.listener.started(label, decision)
    watcher = Watcher(submission.folder, label, context.listener, show_progress, decision=decision)
    try:
        pending_s = context.config.runtime.job_pending_timeout_s
        ended = _follow(jobs, job.job_id, watcher, pending_s=pending_s, attached=submission.attached)
    except BaseException as error:
        if not isinstance(error, Exception) and not (submission.attached and str(error) == SPENT):
            _stop(jobs, job.job_id)
        raise
    context.store.shared.read(name_of(job.key))  # the last listing of a bucket may be older than the job's commit
    outcome = watcher.poll()
    if outcome is not None and outcome.status == "waiting":
        raise stopping.StageWaiting(outcome.error, outcome.condition)
    unfinished = outcome is None or outcome.status == "stopped"
    if unfinished and (job.force or fitting_record(context.store, job.stage, job.key) is None):
        _check_stopped(submission, ended, outcome)
        raise JobLost(_lost(job.job_id, ended))
    return _Ended(submission, outcome, watcher.decision)


def _follow(jobs: Jobs, job_id: str, watcher: Watcher, *, pending_s: float, attached: bool) -> Job | None:
    """Watch until the job has written its outcome or has ended; returns the job as Ray last described it.

    If this run only `attached` to another run's job, exceeding our budget does not stop the job; StageStopped is
    raised.
    """
    began = answered = time.monotonic()
    due, stopped = began, False
    job: Job | None = None
    while watcher.poll() is None:
        if attached and stopping.reason() == SPENT:
            raise stopping.StageStopped(SPENT)
        if stopping.reason() and not stopped:
            stopped = True
            _stop(jobs, job_id)
        now = time.monotonic()
        if now >= due:
            due = now + POLL_S
            try:
                job = jobs.get(job_id)
            except JobServerError as error:
                _tolerate_silence(error, job_id, silent_s=now - answered)
            else:
                answered = now
                if job is None or not job.living:
                    return job
                if job.state == "PENDING" and now - began > pending_s:
                    _stop(jobs, job_id)
                    rule = f"Ray job {job.id} was still PENDING ({job.message}) and was stopped"
                    raise ConfigError(
                        "runtime.job_pending_timeout_s", pending_s, rule, "check `ray status`, or raise it"
                    )
        time.sleep(TICK_S)
    return job


def _tolerate_silence(error: JobServerError, job_id: str, *, silent_s: float) -> None:
    """Raise TrainingError if the job server has not responded for `SERVER_AWAY_S`."""
    logger.debug("the job server does not answer: %s", error)
    if silent_s > SERVER_AWAY_S:
        rule = f"the job server has not answered for {silent_s:.0f} s ({error}); the job may still be running"
        raise TrainingError("Ray job", job_id, rule, "run again: it attaches to the job, or resumes it") from error


def _stop(jobs: Jobs, job_id: str) -> None:
    try:
        jobs.stop(job_id)
    except JobServerError as error:
        logger.warning("Ray job %s could not be stopped (%s); stop it with `ray job stop %s`", job_id, error, job_id)


def _check_stopped(submission: _Submission, ended: Job | None, outcome: JobOutcome | None) -> None:
    """Raise the error of a job that was stopped by this run or by someone else; returns if it was not stopped."""
    if stopping.reason():
        raise stopping.StageStopped(stopping.reason())
    if outcome is None and (ended is None or ended.state != "STOPPED"):
        return
    message = explain(
        "Ray job", submission.job.job_id, "was stopped", "run again: it resumes from the newest checkpoint"
    )
    # The run that submitted the job was stopped, but this run still needs the result.
    raise JobLost(message) if submission.attached else TrainingError(message)


def _lost(job_id: str, ended: Job | None) -> str:
    if ended is None:
        rule = "Ray no longer knows this job: the cluster was restarted"
    else:
        rule = f"ended as {ended.state} without writing its outcome, so it was killed ({ended.message.rstrip(':')})"
    return explain("Ray job", job_id, rule, f"see `ray job logs {job_id}` and `ray status`")


# ---------------------------------------------------------------- the result


def _result(context: RunContext, ended: _Ended, seconds: float) -> StageOutcome:
    job, outcome, attached = ended.submission.job, ended.outcome, ended.submission.attached
    record = context.store.record(job.key)
    if record is None:
        rule = f"Ray job {job.job_id} has finished, but its record is not in this store"
        raise ArtifactError("store", str(job.store), rule, ONE_PATH)
    run_id = record.tracking["run_id"] if "run_id" in record.tracking else ""
    if attached:  # its tracking run belongs to another pipeline run
        context.tracker.cached(job.stage.label, run_id=run_id, key=job.key)
    reported = None if outcome is None or attached else outcome.decision
    samples = [] if outcome is None else outcome.samples
    url = context.tracker.url(run_id) if run_id else ""
    return StageOutcome(record.handle, reported or ended.decision, record.metrics, seconds, samples, url)
