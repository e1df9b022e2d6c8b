"""Run a pipeline once: each stage, in order, is taken from the store or passed to the executor. No Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pipelines.execution.executor import Progress, RunContext, StageExecutor, StageOutcome, find_result
from pipelines.execution.plan import Pipeline, PlannedStage, ReachedUntil
from pipelines.execution.tracker import Status
from pipelines.flows.graph import RunStage, Stages
from rlhf_core.secrets.redaction import hide_in
from rlhf_core.stage import stopping
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import ArtifactRef

R = TypeVar("R", bound=ArtifactRef)


@dataclass
class PipelineRun:
    """The state of one run. `results` holds the artifact of every finished stage, by label."""

    context: RunContext
    executor: StageExecutor
    planned: list[PlannedStage] = field(default_factory=list)
    """The plan that was shown before the run; empty if none was made."""
    results: dict[str, ArtifactRef] = field(default_factory=dict)
    started: int = 0
    """Number of stages that were started, cached ones included."""

    def stage(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Return the outcome of a stage, from the store or by executing it; report the end to the listener."""
        if stopping.reason():
            raise stopping.StageStopped(stopping.reason())
        self.started += 1
        listener = self.context.listener
        try:
            found = None if self.context.options.forces(spec.label) else find_result(self.context, spec)
            outcome = found or self.executor.execute(spec, show_progress)
        except BaseException as error:
            safe = hide_in(error)
            listener.failed(spec.label, safe)
            if safe is error:
                raise
            raise safe from None
        self.results[spec.label] = outcome.ref
        listener.finished(spec.label, outcome.decision, outcome.metrics, outcome.seconds)
        return outcome


@dataclass(frozen=True)
class UntilStage:
    """A `RunStage` that ends the pipeline after the stage called `until`."""

    run_stage: RunStage
    until: str

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        ref = self.run_stage(spec, kind)
        if spec.label == self.until:
            raise ReachedUntil
        return ref


def run_stages(
    run: PipelineRun, pipeline: Pipeline, run_stage: RunStage, *, tags: Mapping[str, str]
) -> dict[str, ArtifactRef]:
    """Run the pipeline through `run_stage`; return the artifacts by label. The tracking run gets the true status."""
    config, tracker = run.context.config, run.context.tracker
    tracker.start(config.name, run_id=None, params=config.model_dump(mode="json"), tags=tags)
    status: Status = "KILLED"
    try:
        limited = UntilStage(run_stage, run.context.options.until)
        pipeline(config, Stages(limited, seed=config.seed, runtime=config.runtime))
        status = "FINISHED"
    except ReachedUntil:
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.finish(status, note=_note(run))
    return run.results


def _note(run: PipelineRun) -> str:
    return "\n".join(f"- {label}: {ref.digest[:12]}" for label, ref in run.results.items())
