"""Run a stage: decide, hold the lease, pass the context to the stage, and check that its result is committed."""

import logging
from collections.abc import Callable, Mapping, Sequence

from rlhf_core.errors import ArtifactError
from rlhf_core.interfaces import Runtime, StageTracker
from rlhf_core.schema import secrets
from rlhf_core.secrets.redaction import hide_in
from rlhf_core.stage import stopping
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.context import NOTHING, Progress, RunningAttempt, StageContext, logged_steps
from rlhf_core.stage.decision import (
    Decision,
    Target,
    decide_work,
    fitting_record,
    hit,
    remember,
    starts_over,
    target_of,
)
from rlhf_core.stage.failures import failure_settings
from rlhf_core.stage.key import StageSpec, Strictness, stage_module
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt, AttemptFolder, Status
from rlhf_core.store.layout import CHECKPOINTS, naming_disk_errors
from rlhf_core.store.leases import Lease, Owner
from rlhf_core.store.records import KeyRecord
from rlhf_core.store.unfinished import bring_work, keeping
from rlhf_core.types import ArtifactRef, GenerationsRef, ModelRef, ReportRef, RolloutsRef

logger = logging.getLogger(__name__)


def find_hit(
    store: ArtifactStore, spec: StageSpec, *, strict: Strictness = Strictness()
) -> tuple[KeyRecord, Decision] | None:
    """Look up the record and the HIT of a stage whose artifact is in the store; None if the stage must run."""
    return _take(store, spec, target_of(store, spec, strict=strict))


def execute(
    store: ArtifactStore,
    spec: StageSpec,
    *,
    runtime: Runtime,
    tracker: StageTracker,
    progress: Progress,
    force: bool = False,
    strict: Strictness = Strictness(),
    on_decision: Callable[[Decision], None] | None = None,
    tracking: Mapping[str, str] = NOTHING,
) -> tuple[ArtifactRef, Decision]:
    """Run the stage unless its result exists: the handle of its artifact, and the decision that led to it.

    `on_decision` is called as soon as the decision is made, before anything is computed; without it the decision is
    logged. If another process computes the key, it gets ATTACH during the wait and, if that process fails, a second
    decision. `force` runs the stage from the beginning and replaces the record. `tracking` (run ids, urls) is kept in
    the record.
    """

    def reported(decision: Decision) -> Decision:
        if on_decision is None:
            logger.info("%s: %s: %s", spec.label, decision.action, decision.reason)
        else:
            on_decision(decision)
        return decision

    target = target_of(store, spec, strict=strict)
    found = None if force else _take(store, spec, target)
    if found is not None:
        return found[0].handle, reported(found[1])

    attached: list[Decision] = []

    def attach(owner: Owner) -> None:
        attached.append(reported(Decision("ATTACH", owner.claim, target.key, None)))

    with naming_disk_errors(store.root), store.lease(target.key, on_wait=attach) as lease:
        found = None if force else _take(store, spec, target, lease)
        if found is not None:
            return found[0].handle, attached[0] if attached else reported(found[1])
        check_secrets(spec)
        folder = store.attempts(target.key, lease)
        if not starts_over(folder, target, force=force):
            bring_work(folder)
        decision = reported(decide_work(store, spec, target, force=force, lease=lease))
        remember(store, spec, target)
        run = _begin(store, spec, target, lease, decision, force=force, tracking=tracking)
        return _finish(store, run, runtime, tracker, progress), decision


def check_secrets(spec: StageSpec) -> None:
    """Raise ConfigError if the stage's configuration refers to an environment variable that is not set."""
    secrets.check(spec.config, spec.label.replace("/", "."))


def _take(
    store: ArtifactStore, spec: StageSpec, target: Target, lease: Lease | None = None
) -> tuple[KeyRecord, Decision] | None:
    record = fitting_record(store, spec, target.key, lease)
    if record is None or not store.used(target.key, lease):
        return None
    store.tidy(target.key)  # its process may have been killed between writing the record and ending its attempt
    remember(store, spec, target, is_hit=True)
    return record, hit(target, record)


def _begin(
    store: ArtifactStore,
    spec: StageSpec,
    target: Target,
    lease: Lease,
    decision: Decision,
    *,
    force: bool,
    tracking: Mapping[str, str],
) -> RunningAttempt:
    """Record a new attempt; if it starts over, remove the work of earlier ones first."""
    folder = store.attempts(target.key, lease)
    store.check_inputs(spec.refs())
    anew = starts_over(folder, target, force=force)
    if anew:
        lease.forget_work()
        last = attempts.history(folder)[-1:]  # the work of a process that has taken over meanwhile has a later number
        attempts.clear(folder, keep_metrics=False, until=last[0] if last else None)
    ended = [item.seconds for item in attempts.history(folder) if item.status != "committed"]
    attempt = attempts.begin(
        folder,
        label=spec.label,
        resumed_from=decision.step,
        code=target.code,
        inputs=tuple(ref.uri for ref in spec.refs()),
        forced=force,
        continues=force and not anew,
    )
    logged = logged_steps(attempts.metrics(folder))
    past = attempts.history(folder)
    return RunningAttempt(
        spec=spec,
        target=target,
        lease=lease,
        attempt=attempt,
        work=attempts.work(folder, attempt),
        tracking=tracking,
        earlier_seconds=0.0 if anew else sum(ended),
        earlier_code={} if anew else _other_code(past, target.code),
        logged=logged,
        failure_settings=failure_settings(spec.config),
    )


def _other_code(past: Sequence[Attempt], code: Mapping[str, str]) -> dict[str, str]:
    """Digests that differ from `code` in the attempts since the last committed one."""
    other: dict[str, str] = {}
    for item in past:
        changed = {name: digest for name, digest in item.code.items() if code.get(name) != digest}
        other = {} if item.status == "committed" else other | changed
    return other


def _finish(
    store: ArtifactStore, run: RunningAttempt, runtime: Runtime, tracker: StageTracker, progress: Progress
) -> ArtifactRef:
    """Run the attempt and record how it ended; after the commit, remove the work that it resumed from."""
    folder = store.attempts(run.target.key, run.lease)
    context = StageContext(
        label=run.spec.label,
        key=run.target.key,
        seed=run.spec.seed,
        out=attempts.output(folder, run.attempt),
        work=run.work,
        checkpoints=Checkpoints(run.work / CHECKPOINTS, fence=run.lease.fence),
        tracker=tracker,
        runtime=runtime,
        store=store,
        progress=progress,
        _run=run,
    )
    with keeping(run.lease, run.attempt.number, run.work):
        handle = _call(store, run, context)
    try:
        context.checkpoints.settle()
    except Exception as error:  # the stage has committed: no attempt will resume from this checkpoint
        logger.warning("%s: could not write the last checkpoint: %s", run.spec.label, error)
    try:
        _end(folder, run, status="committed", failure="")
    except ArtifactError as error:  # after the commit: the result exists, also for the process that took over
        logger.warning("%s: %s", run.spec.label, error)
    attempts.clear(folder, keep_metrics=True, until=run.attempt)
    attempts.give_way(folder, run.attempt)
    return handle


_ONLY_MEASURED = {"compare_reward_models": "preferences", "condition": "prompts", "prepare_data": "suites"}
"""Stage -> its input that trains nothing."""


def _record_inputs(spec: StageSpec, tracker: StageTracker) -> None:
    """Record the stage's inputs: models, answers without scores and reports as evaluation, other data as training."""
    measured = _ONLY_MEASURED.get(spec.name)
    for name, ref in spec.named_refs():
        if isinstance(ref, ModelRef):
            tracker.input_model(ref.digest)
        else:
            answers = isinstance(ref, (GenerationsRef, ReportRef)) and not isinstance(ref, RolloutsRef)
            evaluated = answers or name.partition("/")[0] == measured
            tracker.dataset(name, ref.digest, "evaluation" if evaluated else "training")


def _call(store: ArtifactStore, run: RunningAttempt, context: StageContext) -> ArtifactRef:
    """Run the stage and commit its result. An error is raised once its last checkpoint is whole and its attempt is
    over.
    """
    try:
        _record_inputs(run.spec, context.tracker)
        handle: ArtifactRef = stage_module(run.spec).run(run.spec.config, **run.spec.inputs, context=context)
        _check_committed(store, run, handle)
    except BaseException as error:
        safe = hide_in(error)  # from here on the error is recorded and shown
        context.checkpoints.settle_after(error)
        _note_failure(store.attempts(run.target.key, run.lease), run, safe)
        if safe is error:
            raise
        raise safe from None
    return handle


def _check_committed(store: ArtifactStore, run: RunningAttempt, handle: object) -> None:
    record = store.record(run.target.key, run.lease)
    name = f"{run.spec.module}.run"
    if record is None or (record.attempts, record.started) != (run.attempt.number, run.attempt.started):
        rule = "returned without committing an artifact"
        raise ArtifactError(name, type(handle).__name__, rule, "return context.commit(...)")
    if record.handle != handle:
        rule = "returned another handle than it committed"
        raise ArtifactError(name, handle, rule, "return what context.commit gave")


def _note_failure(folder: AttemptFolder, run: RunningAttempt, error: BaseException) -> None:
    """Record how the attempt failed. Raises ArtifactError if another process has taken over and owns the history."""
    status: Status = "failed" if isinstance(error, Exception) else "interrupted"
    by_signal = isinstance(error, KeyboardInterrupt) or not (isinstance(error, Exception) or str(error))
    failure = f"{error}" or "by a signal" if by_signal else f"{type(error).__name__}: {error}"
    try:
        _end(folder, run, status=status, failure=failure[:500], halted=stopping.goes_on(error))
    except ArtifactError:
        attempts.give_way(folder, run.attempt)
        raise
    except OSError as full:  # the error being recorded matters more than the failure to record it
        logger.error("%s: could not record how attempt %d failed: %s", run.spec.label, run.attempt.number, full)


def _end(folder: AttemptFolder, run: RunningAttempt, *, status: Status, failure: str, halted: bool = False) -> None:
    label, seconds = run.spec.label, run.seconds()
    attempts.end(folder, run.attempt, label=label, status=status, failure=failure, seconds=seconds, halted=halted)
