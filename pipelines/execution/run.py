"""Run a pipeline once: each stage, in order, is taken from the store or passed to the executor. No Prefect.

Stages that a run forced before it waited are remembered, so that they are not forced again when it resumes.

The note belongs to the last run of a configuration. It is written when that run waits for people or for a higher budget, and
removed when it has finished, or is blocked.
"""

import html
import json
import logging
import urllib.request
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipelines.execution.budget import Budget, cpus_of, gpus_of
from pipelines.execution.executor import (
    Progress,
    RunContext,
    RunOptions,
    StageExecutor,
    StageOutcome,
    find_result,
    status_of,
)
from pipelines.execution.gates import Gatekeeper, StageHeld, commands
from pipelines.execution.plan import HELD, Pipeline, PlannedStage, all_specs, placeholder, run_until
from pipelines.execution.record import record_results
from pipelines.execution.summary import run_headline, run_name
from pipelines.flows.graph import RunGroup, RunStage, ungrouped
from pipelines.flows.profile import PipelineConfig, profile_digest
from pipelines.flows.run_rules import Event, NotifyConfig
from pipelines.services.run_notes import COMPLETED, RunNote
from pipelines.services.waits import answers_awaited
from rlhf_core.errors import RlhfError
from rlhf_core.schema.base import keyed
from rlhf_core.schema.secrets import with_secrets
from rlhf_core.secrets.redaction import hidden, hide_in, without_secrets
from rlhf_core.stage import stopping
from rlhf_core.stage.gate_decisions import GateDecisions, Question, now
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunBlocked, RunHalted, RunOverBudget, StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.protocol import discard, update
from rlhf_core.store.roots import forget_wait, note_wait
from rlhf_core.store.typed_json import Stored, stored_in
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG
from rlhf_core.types import ArtifactRef, PolicyRef, PreparedDataRef, RewardModelRef

# ---------------------------------------------------------------- forcing

logger = logging.getLogger(__name__)


class ForcedStages(Stored):
    """The stages that a waiting run has forced and finished."""

    run: str
    labels: list[str]


def still_forced(options: RunOptions, config: PipelineConfig, store: ArtifactStore, *, say: bool = False) -> RunOptions:
    """The options without the stages that this run has forced before it waited; `say` logs which they are."""
    note = stored_in(store.shared.recent(_forced(config)), ForcedStages)
    done = () if note is None else tuple(label for label in options.force if label in note.labels)
    left = tuple(label for label in options.force if label not in done)
    for label in done if say else ():
        logger.info("%s: forced before it waited; not forced again", label)
    return replace(options, force=left, forced=tuple(dict.fromkeys((*options.forced, *done))))


def note_forced(
    options: RunOptions,
    config: PipelineConfig,
    store: ArtifactStore,
    *,
    finished: Collection[str],
    ended: BaseException | None,
) -> None:
    """Record the stages that need not be forced again if the run waits; discard the record when the run has ended.

    A failure or an interruption changes nothing: the stages forced before the last wait are finished.
    """
    done = [*options.forced, *(label for label in options.force if label in finished)]
    waits = isinstance(ended, (StageWaiting, RunOverBudget))
    if waits and done:
        noted = ForcedStages(run=config.name, labels=done).model_dump()
        update(store.shared, _forced(config), lambda _: noted)
    elif waits or ended is None or isinstance(ended, RunBlocked):
        discard(store.shared, _forced(config))


def _forced(config: PipelineConfig) -> str:
    # A higher budget, another gate or more workers do not make it another run.
    identity = json.dumps(keyed(config), sort_keys=True, default=str)
    return f"forced/{sha256_text(identity)}"


# ---------------------------------------------------------------- notify

EVENTS: Mapping[str, Event] = {"Waiting": "waiting", "Blocked": "blocked", "OverBudget": "over_budget"}
"""State of a halted run -> event."""
LONGEST_MESSAGE = 2000  # characters of an error in the request to a webhook


def event_of(error: BaseException | None) -> Event | None:
    """The event for the end of a run; None for an interrupted run, since the person who interrupted it knows."""
    if error is None:
        return "finished"
    if isinstance(error, RunHalted):
        return EVENTS[error.state]
    return "failed" if isinstance(error, Exception) else None


def notify(config: NotifyConfig | None, error: BaseException | None, *, run: str, links: Mapping[str, str]) -> None:
    """Send one POST about the end of a run, if the profile has a webhook; problems are logged."""
    event = event_of(error)
    if config is None or event is None or event not in config.events:
        return
    message = "" if error is None else without_secrets(str(error))[:LONGEST_MESSAGE]
    found: dict[str, str] = hidden("links", dict(links))
    content = {"event": event, "run": run, "message": message, "time": now(), "links": found}
    if config.format == "slack":
        content = {"text": slack_text(event, run, message, found)}
    try:
        address = with_secrets(config, "notify").webhook
        request = urllib.request.Request(
            address, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=config.timeout_s):
            logger.info("notify: sent to the webhook: the run is %s", event)
    except Exception as failure:  # the receiver, its network or its address: never a reason to fail the run
        logger.warning("notify.webhook: could not send that the run is %s: %s", event, type(failure).__name__)


def slack_text(event: Event, run: str, message: str, links: Mapping[str, str]) -> str:
    """Format a notification in Slack's markup, with links to the pages; Slack requires `&`, `<` and `>` to be escaped.

    >>> slack_text("waiting", "mini", "steps 3 < 1000", {"prefect.url": "http://127.0.0.1:4200/runs/flow-run/1"})
    '*mini*: waiting\\nsteps 3 &lt; 1000\\n<http://127.0.0.1:4200/runs/flow-run/1|prefect>'
    """
    head, body = (html.escape(text, quote=False) for text in (run, message))
    pages = [f"<{url}|{name.removesuffix('.url')}>" for name, url in links.items() if url.startswith("http")]
    return "\n".join(filter(None, [f"*{head}*: {event.replace('_', ' ')}", body, " ".join(pages)]))


# ---------------------------------------------------------------- run

R = TypeVar("R", bound=ArtifactRef)


def free_slot(stage: str) -> AbstractContextManager[None]:
    """No-op slot, for a stage without a limit on the number of runs that compute it at the same time."""
    return nullcontext()


@dataclass
class PipelineRun:
    """The state of one run. `results` holds the artifact of every finished stage, by label."""

    context: RunContext
    executor: StageExecutor
    planned: list[PlannedStage] = field(default_factory=list)
    """The plan that was shown before the run; empty if none was made."""
    results: dict[str, ArtifactRef] = field(default_factory=dict)
    started: int = 0
    """Number of started stages and groups of stages, cached ones included."""
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    """Outcome of every finished stage, by label."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the run's pages, by name."""
    page: str = ""
    """Page of the tracking run; `runs:/<id>` where no server shows it yet."""
    headline: str = ""
    """The result in a line, when the run has ended."""
    description: str = ""
    """The results and stages in Markdown, when the run has ended."""
    slot: Callable[[str], AbstractContextManager[None]] = free_slot
    """Waits for and holds a slot of a stage, by its name; runs on the same server share the slots."""
    note: RunNote | None = None
    """Line of the run in `rlhf runs`; None for a run that it does not list."""
    gates: Gatekeeper = field(init=False)
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        config, store = self.context.config, self.context.store
        self.gates = Gatekeeper(config.gates, store, config.name)
        self.budget = Budget(config.budget, config.name, store.shared)

    def stage(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Take a stage from the store or execute it, and report its end to the listener.

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

    def directly(self, spec: StageSpec, kind: type[R]) -> R:
        """Run a stage in this thread and return its artifact: a `RunStage` without Prefect."""
        ref = self.stage(spec, lambda *_: None).ref
        assert isinstance(ref, kind)
        return ref

    def judge(self, spec: StageSpec, ref: ArtifactRef) -> None:
        """Judge the gates after a finished stage; log and track the verdicts, and record a question where a person must decide."""
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
        """Record the question that a stage waits for, if any, and return how the run waits for the answer."""
        if "question" in waiting.condition:
            question, root = Question.model_validate(waiting.condition["question"]), self.context.store.root
            self._ask(question)
            said = f"{waiting}: {commands(question, self.context.config.name, root)}"
            return StageWaiting(said, answers_awaited([question.id], root))
        if (
            "questions" in waiting.condition
        ):  # the stage's job has recorded the question; record it again with our links
            decisions = GateDecisions(self.context.store.shared)
            for asked in map(decisions.find, waiting.condition["questions"]):
                if asked is not None:
                    self._ask(asked.question)
        return waiting

    def _ask(self, question: Question) -> None:
        config = self.context.config
        decisions = GateDecisions(self.context.store.shared)
        decisions.ask(question, run=config.name, profile=profile_digest(config), links=self.links)

    def keys(self) -> list[str]:
        """Keys of the stages that have finished."""
        return [outcome.decision.key for outcome in self.outcomes.values()]

    def _execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        gpus = gpus_of(spec, self.context.config.runtime)
        with self.slot(spec.name), self.budget.spending(gpus) as spent:  # waiting costs nothing
            try:
                outcome = self.executor.execute(spec, show_progress)
            except StageWaiting as waiting:
                raise self._asked(waiting) from None
            # The process that computed it pays, whether we attached to its job or waited for its result.
            spent.counts = outcome.decision.action not in ("ATTACH", "HIT")
        return outcome


@dataclass(frozen=True)
class GatedStages:
    """A `RunStage` that judges the gates after each stage, and continues without the stages that they hold back.

    Raises ConfigError after `prepare_data` if a later stage needs a table that has no rows.
    """

    run: PipelineRun
    run_stage: RunStage
    pipeline: Pipeline

    def __call__(self, spec: StageSpec, kind: type[R]) -> R:
        spec = billed(spec, self.run.context.config)
        try:
            ref = self.run_stage(spec, kind)
        except StageHeld:
            verdict, missing = self.run.gates.hold(spec), placeholder(spec, kind, HELD)
            assert verdict is not None  # it is why the stage was held back
            self.run.gates.skip(spec, missing, verdict)
            return missing
        self.run.judge(spec, ref)
        if isinstance(ref, PreparedDataRef) and self.run.outcomes[spec.label].decision.action != "HIT":
            # A table that turned out empty is missed now, not when the stage that reads it begins, hours later.
            options = self.run.context.options
            all_specs(self.run.context.config, self.pipeline, until=options.until, made={spec.label: ref})
        return ref


def billed(spec: StageSpec, config: PipelineConfig) -> StageSpec:
    """Add the billing fields of the record to a stage, outside of its key: pipeline, project, CPUs and GPUs."""
    cpus, gpus = cpus_of(spec, config.runtime), gpus_of(spec, config.runtime)
    return replace(spec, pipeline=config.name, project=config.project.name, cpus=cpus, gpus=gpus)


def run_stages(
    run: PipelineRun,
    pipeline: Pipeline,
    run_stage: RunStage,
    *,
    tags: Mapping[str, str],
    name: str = "",
    group: RunGroup = ungrouped,
) -> dict[str, ArtifactRef]:
    """Run the pipeline through `run_stage`; return the artifacts by label. The tracking run gets the true status.

    `name` is the run's name, by default made of the profile's name and the overrides.

    Raises RunHalted if gates hold back a part of the pipeline, or the budget is spent.
    """
    config, tracker, options = run.context.config, run.context.tracker, run.context.options
    params = config.model_dump(mode="json", exclude={"notify"})  # the path of an address may be a secret
    name = name or run_name(config.name, options.overrides, tracker.token)
    if run.note is not None:
        run.note.change(name=name, flow_run=tags[FLOW_RUN_TAG] if FLOW_RUN_TAG in tags else "")
    run.page = tracker.url(tracker.start(name, run_id=None, params=params, tags={**tags, **options.tags}))
    run.links = {**tags, **({"mlflow.url": run.page} if run.page.startswith("http") else {})}
    ended: BaseException | None = None
    try:
        stages = run.gates.stages(config, GatedStages(run, run_stage, pipeline), group=group)
        run_until(config, pipeline, stages, options.until)
        run.gates.check()
        if not options.until:
            run.budget.close()
            forget_wait(run.context.store.shared, config.name)
    except BaseException as error:
        ended = error
        if isinstance(error, StageWaiting):
            note_wait(run.context.store.shared, config.name, run.keys())
        if isinstance(error, stopping.RunHalted):
            tracker.tag({"state": error.state, "state.message": str(error)})
        raise
    finally:
        run.headline, run.description = _headline(run), _summarize(run, name)
        tracker.finish(status_of(ended), note=run.description)
        note_forced(options, config, run.context.store, finished=run.results, ended=ended)
        notify(config.notify, ended, run=config.name, links=run.links)
        if run.note is not None:
            end, policies = state_of(ended), model_digests(run.results)
            run.note.change(state=end, message=str(ended or ""), headline=run.headline, policies=policies)
    return run.results


def model_digests(results: Mapping[str, ArtifactRef]) -> dict[str, str]:
    """Digests of the policies and reward models among the results of a run, by stage."""
    return {label: ref.digest for label, ref in results.items() if isinstance(ref, (PolicyRef, RewardModelRef))}


def state_of(ended: BaseException | None) -> str:
    """State of a run by the error that ended it, under the name that Prefect's pages show."""
    if ended is None:
        return COMPLETED
    if isinstance(ended, RunHalted):
        return ended.state
    return "Failed" if isinstance(ended, Exception) else "Cancelled"


def _headline(run: PipelineRun) -> str:
    with suppress(RlhfError, OSError, ValueError, KeyError):  # of an artifact that was lost
        return run_headline(run.outcomes, run.context.store)
    return ""


def _summarize(run: PipelineRun, name: str) -> str:
    """Hand the results to the tracker, and return the description of the run."""
    kept, links = None if run.note is None else run.note.page, {**run.links, "mlflow.url": run.page}
    try:
        return record_results(run.context, run.outcomes, name=name, links=links, page=kept)
    except (RlhfError, OSError, ValueError, KeyError) as error:  # an artifact that was lost must not change the end
        logger.warning("tracking: the summary of the run is incomplete: %s", error)
        return "\n".join(f"- {label}: {ref.digest[:12]}" for label, ref in run.results.items())
