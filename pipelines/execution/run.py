"""Run a pipeline once: each stage, in order, is taken from the store or passed to the executor. No Prefect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pipelines.execution.budget import Budget, gpus_of
from pipelines.execution.champion import champion_of
from pipelines.execution.executor import Progress, RunContext, StageExecutor, StageOutcome, find_result
from pipelines.execution.forcing import note_forced
from pipelines.execution.gates import Gatekeeper, StageHeld, commands
from pipelines.execution.notify import notify
from pipelines.execution.plan import HELD, Pipeline, PlannedStage, ReachedUntil, placeholder
from pipelines.execution.summary import description, headline_metrics, run_name
from pipelines.execution.tracker import Status
from pipelines.flows.graph import RunGroup, RunStage, Stages, ungrouped
from pipelines.flows.profile import profile_digest
from pipelines.services.waits import answers_awaited
from rlhf_core.errors import RlhfError
from rlhf_core.secrets.redaction import hide_in
from rlhf_core.stage import stopping
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.store.gate_decisions import GateDecisions, Question
from rlhf_core.store.roots import forget_wait, note_wait
from rlhf_core.types import ArtifactRef

logger = logging.getLogger(__name__)

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
    """Number of stages that were started, cached ones included, and of groups of them."""
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    """What came of every finished stage, by label."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Where the run can be looked up, besides the tracker."""
    gates: Gatekeeper = field(init=False)
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        config, store = self.context.config, self.context.store
        self.gates = Gatekeeper(config.gates, store, config.name)
        self.budget = Budget(config.budget, config.name, store.root)

    def stage(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Return the outcome of a stage, from the store or by executing it; report the end to the listener.

        Raises StageHeld if a gate holds back an input.
        """
        if stopping.reason():
            raise stopping.StageStopped(stopping.reason())
        self.started += 1
        listener = self.context.listener
        try:
            verdict = self.gates.hold(spec)
            if verdict is not None:
                raise StageHeld(str(verdict), "Waiting" if verdict.outcome == "waiting" else "Blocked")
            found = None if self.context.options.forces(spec.label) else find_result(self.context, spec)
            outcome = found or self._execute(spec, show_progress)
        except BaseException as error:
            safe = hide_in(error)
            listener.failed(spec.label, safe)
            if safe is error:
                raise
            raise safe from None
        self.results[spec.label] = outcome.ref
        self.outcomes[spec.label] = outcome
        listener.finished(spec.label, outcome.decision, outcome.metrics, outcome.seconds)
        return outcome

    def judge(self, spec: StageSpec, ref: ArtifactRef) -> None:
        """Judge the gates after a finished stage; log and track the verdicts, and ask a person where one has to decide."""
        if not any(gate.after == spec.label for gate in self.context.config.gates):
            return
        record = self.context.store.record(self.context.key_of(spec))
        for verdict in self.gates.judge(spec, ref, {} if record is None else record.metrics):
            level = logging.INFO if verdict.outcome in ("passed", "approved") else logging.WARNING
            logger.log(level, "%s: %s", spec.label, verdict)
            self.context.tracker.tag({f"gate.{verdict.gate.title}": f"{verdict.outcome}: {verdict.why}"})
            if verdict.outcome == "waiting":
                self._ask(verdict.question)

    def _asked(self, waiting: StageWaiting) -> StageWaiting:
        """Ask the question that a stage waits for, if it does, and return how the run waits for the answer."""
        if "question" in waiting.condition:
            question, root = Question.model_validate(waiting.condition["question"]), self.context.store.root
            self._ask(question)
            said = f"{waiting}: {commands(question, self.context.config.name, root)}"
            return StageWaiting(said, answers_awaited([question.id], root))
        if "questions" in waiting.condition:  # the job of the stage has asked; so do we, with our links
            decisions = GateDecisions(self.context.store.layout)
            for asked in map(decisions.find, waiting.condition["questions"]):
                if asked is not None:
                    self._ask(asked.question)
        return waiting

    def _ask(self, question: Question) -> None:
        config = self.context.config
        decisions = GateDecisions(self.context.store.layout)
        decisions.ask(question, run=config.name, profile=profile_digest(config), links=self.links)

    def keys(self) -> list[str]:
        """Return the keys of the stages that have finished."""
        return [outcome.decision.key for outcome in self.outcomes.values()]

    def _execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        with self.budget.spending(gpus_of(spec, self.context.config.runtime)) as spent:
            try:
                outcome = self.executor.execute(spec, show_progress)
            except StageWaiting as waiting:
                raise self._asked(waiting) from None
            # The process that computed it pays, whether we attached to its job or waited for its result.
            spent.counts = outcome.decision.action not in ("ATTACH", "HIT")
        return outcome


@dataclass(frozen=True)
class GatedStages:
    """A `RunStage` that judges the gates after each stage, and goes on without the stages that they hold back."""

    run: PipelineRun
    run_stage: RunStage

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        try:
            ref = self.run_stage(spec, kind)
        except StageHeld:
            verdict, missing = self.run.gates.hold(spec), placeholder(spec.label, kind, HELD)
            assert verdict is not None  # it is why the stage was held back
            self.run.gates.skip(spec, missing, verdict)
            return missing
        self.run.judge(spec, ref)
        return ref


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
    run: PipelineRun,
    pipeline: Pipeline,
    run_stage: RunStage,
    *,
    tags: Mapping[str, str],
    group: RunGroup = ungrouped,
) -> dict[str, ArtifactRef]:
    """Run the pipeline through `run_stage`; return the artifacts by label. The tracking run gets the true status.

    Raises RunHalted if gates hold back a part of the pipeline, or the budget is spent.
    """
    config, tracker, options = run.context.config, run.context.tracker, run.context.options
    params = config.model_dump(mode="json", exclude={"notify"})  # the path of an address may be a secret
    run.links = tags
    name = run_name(config.name, options.overrides, tracker.token)
    tracker.start(name, run_id=None, params=params, tags={**tags, **options.tags})
    status: Status = "KILLED"
    ended: BaseException | None = None
    try:
        limited = UntilStage(GatedStages(run, run_stage), options.until)
        champion = champion_of(config, run.context.store)
        with suppress(ReachedUntil):
            stages = Stages(limited, config.seed, config.runtime, champion, decisions=run.gates.notes, group=group)
            pipeline(config, stages)
        run.gates.check()
        if not options.until:
            run.budget.close()
            forget_wait(run.context.store.layout, config.name)
        status = "FINISHED"
    except BaseException as error:
        ended = error
        if isinstance(error, StageWaiting):
            note_wait(run.context.store.layout, config.name, run.keys())
        if isinstance(error, stopping.RunHalted):
            tracker.tag({"state": error.state, "state.message": str(error)})
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        raise
    finally:
        tracker.finish(status, note=_summarize(run))
        note_forced(options, config, run.context.store, finished=run.results, ended=ended)
        notify(config.notify, ended, run=config.name, links=tags)
    return run.results


def _summarize(run: PipelineRun) -> str:
    """Log the headline metrics on the pipeline's run and return its description."""
    try:
        run.context.tracker.parent.metrics(0, headline_metrics(run.outcomes, run.context.store))
        return description(run.outcomes, run.context.store)
    except (RlhfError, OSError, ValueError, KeyError) as error:  # an artifact that was lost must not change the end
        logger.warning("tracking: the summary of the run is incomplete: %s", error)
        return "\n".join(f"- {label}: {ref.digest[:12]}" for label, ref in run.results.items())
