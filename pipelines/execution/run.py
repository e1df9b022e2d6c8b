"""One run of a pipeline: its plan, its engines, its tracker, and each stage decided and executed in turn. No Prefect."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pipelines.execution.lazy_runtime import DeferredRuntime
from pipelines.execution.listener import Listener, ShownTracker
from pipelines.execution.plan import Pipeline, PlannedStage, ReachedUntil, engines_needed, plan
from pipelines.execution.retry import reached, trying_again
from pipelines.flows.graph import RunStage, Stages
from pipelines.flows.profile import PipelineConfig
from pipelines.services.home import Home
from pipelines.services.registry import tracking_place, tracking_uri
from rlhf_core.interfaces import StageTracker
from rlhf_core.runtime.cluster import check_address, named_address
from rlhf_core.schema import secrets
from rlhf_core.secrets.redaction import hide_in
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision, starts_over, target_of
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import check_secrets, execute, find
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import living_owner
from rlhf_core.types import ArtifactRef, PolicyRef, RewardModelRef

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
Progress = Callable[[int, int, str], None]

ATTACH_POLL_S = 0.25


Status = Literal["FINISHED", "FAILED", "KILLED"]


class TrackedStage(StageTracker, Protocol):
    """A stage's tracker with the identity of its run and an end."""

    @property
    def run_id(self) -> str: ...

    def finish(self, status: Status) -> None: ...


class Tracker(Protocol):
    """One run of the pipeline where a person looks things up later: `MlflowTracker`, or `MemoryTracker`."""

    def start(self, name: str, *, run_id: str | None, params: Mapping[str, Any], tags: Mapping[str, str]) -> str: ...

    def stage(
        self, label: str, *, key: str, params: Mapping[str, Any], tags: Mapping[str, str], fresh: bool
    ) -> TrackedStage: ...

    def cached(self, label: str, *, run_id: str | None, key: str) -> None: ...

    def finish(self, status: Status, *, note: str) -> None: ...

    def url(self, run_id: str) -> str: ...

    @property
    def token(self) -> str: ...

    def leave(self) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """What a person may ask of a run beside its configuration."""

    until: str = ""
    """Label of the last stage to run; empty: all of them."""
    force: tuple[str, ...] = ()
    """Labels of stages that run although their result is there."""
    strict_code: bool = False
    """Every change of code counts, also in stages that normally only warn."""
    strict_env: bool = False
    """Other versions of Python and of the packages that compute count."""


@dataclass(frozen=True)
class StageOutcome:
    """What a stage gave, and what its card shows."""

    ref: ArtifactRef
    decision: Decision
    metrics: Mapping[str, float]
    seconds: float
    samples: list[dict[str, str]]
    tracking_url: str


@dataclass
class PipelineRun:
    """State of one run. `results` holds the artifact of every stage that is done, by label."""

    config: PipelineConfig
    options: RunOptions
    store: ArtifactStore
    runtime: DeferredRuntime
    tracker: Tracker
    listener: Listener
    planned: list[PlannedStage]
    results: dict[str, ArtifactRef] = field(default_factory=dict)
    started: int = 0
    """Stages that were begun, hits among them."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Where else a stage can be looked up: kept in its record and as tags of its tracking run."""

    def stage(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Return the artifact of a stage, from the store or by running it, with its tracking run closed truthfully."""
        if stopping.reason():
            raise stopping.StageStopped(stopping.reason())
        self.started += 1
        forced = spec.label in self.options.force
        try:
            outcome = None if forced else self._find(spec)
            if outcome is None and self.config.runtime.execution == "ray-job":
                outcome = self._submit(spec, show_progress)
            outcome = outcome or (None if forced else self._attach(spec)) or self._execute(spec, show_progress)
        except BaseException as error:
            safe = hide_in(error)
            self.listener.failed(spec.label, safe)
            if safe is error:
                raise
            raise safe from None
        self.results[spec.label] = outcome.ref
        self.listener.finished(spec.label, outcome.decision, outcome.metrics, outcome.seconds)
        return outcome

    def _find(self, spec: StageSpec) -> StageOutcome | None:
        found = find(self.store, spec, strict_code=self.options.strict_code, strict_env=self.options.strict_env)
        if found is None:
            return None
        record, decision = found
        self.listener.started(spec.label, decision)
        tracking_id = record.tracking.get("run_id")
        self.tracker.cached(spec.label, run_id=tracking_id, key=decision.key)
        url = self.tracker.url(tracking_id) if tracking_id else ""
        return StageOutcome(record.handle, decision, record.metrics, 0.0, [], url)

    def _attach(self, spec: StageSpec) -> StageOutcome | None:
        """Wait for another process that computes the key: the tracking run of the stage is its, and not ours to end."""
        key = target_of(self.store, spec, strict_code=self.options.strict_code, strict_env=self.options.strict_env).key
        owner = living_owner(self.store.layout.leases, key)
        if owner is None:
            return None
        self.listener.started(spec.label, Decision("ATTACH", f"{owner} is computing it", key, None))
        while living_owner(self.store.layout.leases, key) is not None:
            time.sleep(ATTACH_POLL_S)
        return self._find(spec)

    def _submit(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        from pipelines.execution.submission import run_as_job
        from rlhf_core.runtime.jobs import open_jobs

        return run_as_job(self, spec, show_progress, open_jobs())

    def _execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        began = time.monotonic()
        if "sampler" in spec.engines:
            secrets.check(self.config.runtime.sampler, "runtime.sampler")
        key = target_of(self.store, spec, strict_code=self.options.strict_code, strict_env=self.options.strict_env).key
        inner = self.tracker.stage(
            spec.label,
            key=key,
            params=spec.config.model_dump(mode="json"),
            tags={"stage": spec.name, **self.links},
            fresh=starts_over(self.store, spec, key, force=spec.label in self.options.force),
        )
        shown = ShownTracker(inner, spec.label, self.listener)

        def progress(done: int, total: int, message: str) -> None:
            self.listener.progress(spec.label, done, total, message)
            show_progress(done, total, message)

        status: Status = "KILLED"
        try:
            # One tracking run for all tries; a forced stage begins anew with each.
            ref, decision = trying_again(
                lambda: self._call(spec, shown, progress, {"run_id": inner.run_id, **self.links}),
                label=spec.label,
                retries=self.config.runtime.retries,
                where=lambda: reached(self.store, key),
                sleep=time.sleep,
            )
            self._log_models(spec.label, ref, inner)
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            inner.finish(status)
        record = self.store.record(decision.key)
        metrics = record.metrics if record is not None else {}
        url = self.tracker.url(inner.run_id)
        return StageOutcome(ref, decision, metrics, time.monotonic() - began, shown.samples, url)

    def _log_models(self, label: str, ref: ArtifactRef, tracker: StageTracker) -> None:
        """Name the models that a stage made, so that the tracker knows them as inputs of later stages."""
        for name, value in (("", ref), *ref):
            if isinstance(value, (PolicyRef, RewardModelRef)):
                tracker.model(f"{label}.{name}" if name else label, value.digest, value.uri)

    def _call(
        self, spec: StageSpec, tracker: StageTracker, progress: Progress, tracking: Mapping[str, str]
    ) -> tuple[ArtifactRef, Decision]:
        return execute(
            self.store,
            spec,
            runtime=self.runtime,
            tracker=tracker,
            progress=progress,
            force=spec.label in self.options.force,
            strict_code=self.options.strict_code,
            strict_env=self.options.strict_env,
            on_decision=lambda decision: self.listener.started(spec.label, decision),
            tracking=tracking,
        )


@dataclass(frozen=True)
class UntilStage:
    """Passes stages on and ends the pipeline after the one that the person named."""

    run_stage: RunStage
    until: str

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        ref = self.run_stage(spec, kind)
        if spec.label == self.until:
            raise ReachedUntil
        return ref


def store_of(config: PipelineConfig, home: Home) -> ArtifactStore:
    """Return the store that a profile names, or the one in the state folder."""
    return ArtifactStore(Path(config.store).expanduser() if config.store else home.store)


@contextmanager
def open_run(
    config: PipelineConfig, pipeline: Pipeline, options: RunOptions, *, home: Home, tracker: Tracker, listener: Listener
) -> Iterator[PipelineRun]:
    """Plan the run and begin to start the engines that the plan needs; close them at the end."""
    store = store_of(config, home)
    store.create()
    planned = plan(
        config,
        store,
        pipeline=pipeline,
        until=options.until,
        force=options.force,
        strict_code=options.strict_code,
        strict_env=options.strict_env,
    )
    for stage in planned:
        listener.planned(stage.label, stage.decision)
    runtime = DeferredRuntime(config.runtime)
    in_jobs = config.runtime.execution == "ray-job"
    if in_jobs and any(stage.decision.action != "HIT" for stage in planned):
        from pipelines.execution.submission import check_jobs

        check_jobs(tracked=bool(tracker.token))
    needed = set() if in_jobs else engines_needed(planned)
    if not in_jobs:  # a job has the environment of its cluster, and looks at its start
        for stage in planned:
            if stage.decision.action in ("RUN", "RESUME"):
                check_secrets(stage.spec)
    if "sampler" in needed:
        secrets.check(config.runtime.sampler, "runtime.sampler")
    if needed and config.runtime.type == "ray":
        check_address(named_address())  # now, and not when the first stage needs an engine
    if needed:
        threading.Thread(target=_prewarm, args=(runtime, needed), daemon=True, name="prewarm").start()
    try:
        yield PipelineRun(config, options, store, runtime, tracker, listener, planned)
    finally:
        runtime.close()


def run_stages(
    run: PipelineRun, pipeline: Pipeline, run_stage: RunStage, *, tags: Mapping[str, str]
) -> dict[str, ArtifactRef]:
    """Run the pipeline through `run_stage`; return the artifacts by label. The tracker's run gets the true status."""
    run.tracker.start(run.config.name, run_id=None, params=run.config.model_dump(mode="json"), tags=tags)
    status: Status = "KILLED"
    try:
        limited = UntilStage(run_stage, run.options.until)
        pipeline(run.config, Stages(limited, seed=run.config.seed, runtime=run.config.runtime))
        status = "FINISHED"
    except ReachedUntil:
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        run.tracker.finish(status, note=_note(run))
    return run.results


def open_tracker(config: PipelineConfig, home: Home, *, join: str = "") -> Tracker:
    """Return the MLflow tracker of a run; `join` is the token of one that another process has opened."""
    from rlhf_core.tracking.mlflow import MlflowTracker

    uri, place = tracking_uri(home), tracking_place(home)
    ours = place == home.mlflow_uri
    tracker: Tracker = MlflowTracker(
        uri,
        experiment=config.name,
        artifact_root=home.mlflow_artifacts if ours else None,
        spool=home.mlflow_artifacts / ".spool",
        place=place,
        join=join,
    )
    return tracker


def import_tracker(home: Home) -> None:
    """Import MLflow and see that its database is there, so that `Tracker.start` does not wait for it."""
    from rlhf_core.tracking.mlflow_client import open_client

    try:
        open_client(tracking_uri(home))
    except Exception as error:
        # The tracker itself copes with a server that is away, and says so.
        logger.debug("tracking: not reached ahead of time: %s", error)


def _prewarm(runtime: DeferredRuntime, needed: set[str]) -> None:
    try:
        runtime.prewarm(trainer="trainer" in needed, sampler="sampler" in needed)
    except Exception as error:
        # The stage that needs the engine fails with the same error, and then somebody hears it.
        logger.debug("engines could not be started ahead: %s", error)


def _note(run: PipelineRun) -> str:
    lines = [f"{label}: {ref.digest[:12]}" for label, ref in run.results.items()]
    return "\n".join(f"- {line}" for line in lines)
