"""Runs a stage: decide, hold the lease, hand the stage its context, and see that it committed what it returns."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from rlhf_core.config.base import Config
from rlhf_core.config.custom import CustomFunction
from rlhf_core.errors import ArtifactError, explain
from rlhf_core.interfaces import Runtime, StageTracker
from rlhf_core.secrets import references
from rlhf_core.secrets.redaction import hide_in
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision, Target, decide, decide_work, hit, remember, starts_over, target_of, unfit
from rlhf_core.stage.key import StageInput, StageSpec, key_payload, payload_key, stage_key, stage_module
from rlhf_core.store import attempts, failures
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt, Status
from rlhf_core.store.checkpoints import Checkpoints
from rlhf_core.store.damage import findings
from rlhf_core.store.failures import Counts, Failed
from rlhf_core.store.layout import CHECKPOINTS, naming_disk_errors
from rlhf_core.store.leases import Lease, Owner
from rlhf_core.store.records import KeyRecord, Provenance, environment
from rlhf_core.store.recovery import tidy
from rlhf_core.types import ArtifactRef
from rlhf_core.user_code.dependencies import UserFunction

__all__ = [
    "Decision",
    "StageContext",
    "StageInput",
    "StageSpec",
    "check_secrets",
    "decide",
    "execute",
    "find",
    "key_payload",
    "payload_key",
    "stage_key",
    "stage_module",
]

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
Progress = Callable[[int, int, str], None]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage may use while it runs, beside its configuration and its inputs.

    `out` is an empty folder for the artifact; `work` outlives a killed process, for what a stage wants to find again
    (shards) beside its `checkpoints`. `progress(done, total, message)` tells a person how far it is.
    """

    label: str
    key: str
    seed: int
    out: Path
    work: Path
    checkpoints: Checkpoints
    tracker: StageTracker
    runtime: Runtime
    store: ArtifactStore
    progress: Progress
    _run: _Run

    @property
    def files(self) -> Mapping[str, str]:
        """Return the digests, as they are in the key, of the user's files that the configuration names."""
        found: Mapping[str, str] = self._run.spec.engines["files"] if "files" in self._run.spec.engines else _NOTHING
        return found

    def path(self, ref: ArtifactRef) -> Path:
        """Return the folder of an input."""
        return self.store.path(ref)

    @property
    def functions(self) -> Mapping[str, str]:
        """The digests of the users' functions by which the key was made: whoever loads one checks that it has them yet."""
        return self._run.target.functions

    def user_function(self, part: Config) -> UserFunction | None:
        """Return the user's function that a part of the configuration names; None if it names none."""
        return (
            UserFunction.of(part.function, self.functions[part.function]) if isinstance(part, CustomFunction) else None
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; `reward/mean` of the stage `ppo` becomes `ppo/reward/mean`.

        After a resume, steps that were recorded before the kill are computed again but not recorded twice.
        """
        new = {
            f"{self.label}/{name}": float(value)
            for name, value in values.items()
            if step > self._run.logged.get(f"{self.label}/{name}", step - 1)
        }
        if not new:
            return
        self._run.still_ours()
        # The tracker first: it takes a step twice as once, so that a kill between the two loses nothing.
        self.tracker.metrics(step, new)
        with (self.work / attempts.METRICS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "values": new}) + "\n")

    def failed(self, step: int, counts: Counts) -> None:
        """Note how many answers failed at a step, before they are kept: {path in the configuration: (failed, of)}.

        The result then counts only for the settings there. Paths without settings that could be why are passed over.
        """
        failures.note(self.work, step, counts, failures.failure_settings(self._run.spec.config))

    def stopping(self) -> bool:
        """Return whether the stage is to save and end now: a signal arrived, or the time that was given is over.

        Raises ArtifactError if another process has taken the stage over.
        """
        self._run.still_ours()
        return bool(stopping.reason())

    def stop(self) -> NoReturn:
        """Raise StageStopped; call it when `stopping` was asked and everything that was done since has been saved."""
        self.checkpoints.settle()  # before the engines are let go of, which may still be writing
        why = stopping.reason()
        logger.warning("%s: %s; saved, and the same command goes on from here", self.label, why)
        raise stopping.StageStopped(why)

    def commit(
        self,
        kind: type[R],
        *,
        children: Mapping[str, tuple[str, type[ArtifactRef]]] = _NOTHING,
        metrics: Mapping[str, float] = _NOTHING,
    ) -> R:
        """Move `out` into the store as the artifact of this stage and return its handle.

        `children={"base": ("base", PolicyRef)}` gives the field `base` of the handle its own handle to the folder
        `out/base`. `metrics` are the final numbers, kept in the key record. ArtifactError if an input was found damaged
        while the stage read it.
        """
        self._run.check_inputs(self.store)
        return self.store.commit(
            self.key,
            self.out,
            kind,
            children=children,
            record=self._run.provenance(metrics, self.runtime.engines(), failures.noted(self.work)),
            parents=tuple(dict.fromkeys(ref.digest for ref in self._run.spec.refs())),
            lease=self._run.lease,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One attempt at a stage: what its record will say, and the lease that allows it."""

    spec: StageSpec
    target: Target
    lease: Lease
    attempt: Attempt
    tracking: Mapping[str, str]
    earlier_seconds: float
    earlier_code: Mapping[str, str]
    logged: Mapping[str, int]
    """Metric name -> last step that earlier attempts recorded."""
    clock: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.clock

    def still_ours(self) -> None:
        """Raise ArtifactError if another process has taken the stage over. Only the commit must be certain of it."""
        if not self.lease.may_be_ours():
            self.lease.check()

    def check_inputs(self, store: ArtifactStore) -> None:
        """Raise ArtifactError if the stage may have read something else than its inputs."""
        store.check_inputs(self.spec.refs())
        uris = (ref.uri for ref in self.spec.refs())
        for finding in findings(store.layout, uris, known=self.attempt.known_damage):
            rule = f"was read from {finding}"
            raise ArtifactError(explain(f"{self.spec.label}.inputs", finding.object[:12], rule, "run it again"))

    def provenance(self, metrics: Mapping[str, float], engines: dict[str, str], noted: dict[str, Failed]) -> Provenance:
        return Provenance(
            label=self.spec.label,
            stage=self.spec.name,
            payload=self.target.payload,
            inputs=tuple(dict.fromkeys(ref.uri for ref in self.spec.refs())),
            code=self.target.code,
            earlier_code=self.earlier_code,
            failures=noted,
            metrics={name: float(value) for name, value in metrics.items()},
            engines=engines,
            environment=environment(),
            started=self.attempt.started,
            seconds=round(self.earlier_seconds + self.seconds(), 3),
            tracking=dict(self.tracking),
            attempts=self.attempt.number,
            resumed_from=self.attempt.resumed_from,
            known_damage=tuple(self.attempt.known_damage),
        )


def find(
    store: ArtifactStore, spec: StageSpec, *, strict_code: bool = False, strict_env: bool = False
) -> tuple[KeyRecord, Decision] | None:
    """Return the record of a stage whose artifact is in the store, and the HIT; None if there is something to do."""
    target = target_of(store, spec, strict_code=strict_code, strict_env=strict_env)
    return _take(store, spec, target)


def execute(
    store: ArtifactStore,
    spec: StageSpec,
    *,
    runtime: Runtime,
    tracker: StageTracker,
    progress: Progress,
    force: bool = False,
    strict_code: bool = False,
    strict_env: bool = False,
    on_decision: Callable[[Decision], None] | None = None,
    tracking: Mapping[str, str] = _NOTHING,
) -> tuple[ArtifactRef, Decision]:
    """Return the handle of the stage's artifact and how we came by it.

    `on_decision` is told as soon as the decision is made, before anything is computed; when another process computes
    the key, it is told ATTACH while we wait and, should that process fail, what we do then. `force` runs the stage
    from its beginning and replaces the record. `tracking` (run ids, urls) is kept in the record.
    """

    def told(decision: Decision) -> Decision:
        logger.info("%s: %s: %s", spec.label, decision.action, decision.reason)
        if on_decision is not None:
            on_decision(decision)
        return decision

    target = target_of(store, spec, strict_code=strict_code, strict_env=strict_env)
    found = None if force else _take(store, spec, target)
    if found is not None:
        return found[0].handle, told(found[1])

    attached: list[Decision] = []

    def attach(owner: Owner) -> None:
        attached.append(told(Decision("ATTACH", f"{owner} is computing it", target.key, None)))

    with naming_disk_errors(store.root), store.lease(target.key, on_wait=attach) as lease:
        if not unfit(store, spec, target.key):
            found = None if force else _take(store, spec, target)
            if found is not None:
                return found[0].handle, attached[0] if attached else told(found[1])
            check_secrets(spec)
            decision = told(decide_work(store, spec, target, force=force))
            _remember(store, spec, target)
            run = _begin(store, spec, target, lease, decision, force=force, tracking=tracking)
            return _finish(store, run, runtime, tracker, progress), decision
    # Whom we waited for has left answers that failed under other settings than ours.
    return execute(
        store,
        spec,
        runtime=runtime,
        tracker=tracker,
        progress=progress,
        force=force,
        strict_code=strict_code,
        strict_env=strict_env,
        on_decision=on_decision,
        tracking=tracking,
    )


def check_secrets(spec: StageSpec) -> None:
    """Raise ConfigError if the stage's configuration refers to an environment variable that is not set."""
    references.check(spec.config, spec.label.replace("/", "."))


def _take(store: ArtifactStore, spec: StageSpec, target: Target) -> tuple[KeyRecord, Decision] | None:
    record = store.record(target.key)
    if record is None:
        return None
    store.used(target.key)
    tidy(store, target.key)  # its process may have been killed between the record and the end of its attempt
    _remember(store, spec, target)
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
) -> _Run:
    """Note a new attempt; one that starts over finds nothing of the earlier ones."""
    folder = store.layout.attempt(target.key)
    known_damage = store.known_damage(spec.refs())  # before anything is read
    store.check_inputs(spec.refs())
    with lease.undisturbed():  # a process that stood still here would take from its successor, or share with it
        anew = starts_over(store, spec, target.key, force=force)
        if anew:
            attempts.clear(folder, keep_metrics=False)
        ended = [item.seconds for item in attempts.history(folder) if item.status != "committed"]
        attempt = attempts.begin(
            folder, label=spec.label, resumed_from=decision.step, code=target.code, known_damage=known_damage
        )
        logged = attempts.logged_steps(folder)
        past = attempts.history(folder)
    return _Run(
        spec=spec,
        target=target,
        lease=lease,
        attempt=attempt,
        tracking=tracking,
        earlier_seconds=0.0 if anew else sum(ended),
        earlier_code={} if anew else _other_code(past, target.code),
        logged=logged,
    )


def _other_code(past: Sequence[Attempt], code: Mapping[str, str]) -> dict[str, str]:
    """Return the digests, other than those of `code`, of the attempts since the last that committed."""
    other: dict[str, str] = {}
    for item in past:
        changed = {name: digest for name, digest in item.code.items() if code.get(name) != digest}
        other = {} if item.status == "committed" else other | changed
    return other


def _finish(
    store: ArtifactStore, run: _Run, runtime: Runtime, tracker: StageTracker, progress: Progress
) -> ArtifactRef:
    """Run the attempt and note how it ended; what it went on from is removed once it has committed."""
    folder = store.layout.attempt(run.target.key)
    work = attempts.work(folder, run.attempt)
    context = StageContext(
        label=run.spec.label,
        key=run.target.key,
        seed=run.spec.seed,
        out=attempts.output(folder, run.attempt),
        work=work,
        checkpoints=Checkpoints(work / CHECKPOINTS, fence=run.still_ours),
        tracker=tracker,
        runtime=runtime,
        store=store,
        progress=progress,
        _run=run,
    )
    try:
        handle: ArtifactRef = stage_module(run.spec).run(run.spec.config, **run.spec.inputs, context=context)
        _check_committed(store, run, handle)
    except BaseException as error:
        safe = hide_in(error)  # from here on it is written down and shown
        context.checkpoints.settle_after(error)
        _note_failure(folder, run, safe)
        if safe is error:
            raise
        raise safe from None
    try:
        context.checkpoints.settle()
    except Exception as error:  # nobody will go on from it any more
        logger.warning("%s: the last checkpoint could not be written: %s", run.spec.label, error)
    _note_end(folder, run)
    attempts.clear(folder, keep_metrics=True, until=run.attempt)
    attempts.give_way(folder, run.attempt)
    return handle


def _note_end(folder: Path, run: _Run) -> None:
    label = run.spec.label
    try:
        with run.lease.undisturbed():
            attempts.end(folder, run.attempt, label=label, status="committed", failure="", seconds=run.seconds())
    except ArtifactError as error:  # after the commit: the result is there, and the same for whoever took over
        logger.warning("%s: %s", label, error)


def _check_committed(store: ArtifactStore, run: _Run, handle: object) -> None:
    record = store.record(run.target.key)
    name = f"{run.spec.module}.run"
    if record is None or (record.attempts, record.started) != (run.attempt.number, run.attempt.started):
        rule = "returned without a commit"
        raise ArtifactError(explain(name, type(handle).__name__, rule, "return context.commit(...)"))
    if record.handle != handle:
        rule = "returned another handle than it committed"
        raise ArtifactError(explain(name, handle, rule, "return what context.commit gave"))


def _note_failure(folder: Path, run: _Run, error: BaseException) -> None:
    """Note how the attempt failed. ArtifactError if another process has taken over: the history is that one's now."""
    status: Status = "failed" if isinstance(error, Exception) else "interrupted"
    failure = f"{type(error).__name__}: {error}"[:500]
    label = run.spec.label
    try:
        with run.lease.undisturbed():
            attempts.end(folder, run.attempt, label=label, status=status, failure=failure, seconds=run.seconds())
    except ArtifactError:
        attempts.give_way(folder, run.attempt)
        raise
    except OSError as full:  # the error that we note here matters more than that it could not be noted
        logger.error("%s: the failure of attempt %d could not be noted: %s", label, run.attempt.number, full)


def _remember(store: ArtifactStore, spec: StageSpec, target: Target) -> None:
    try:
        remember(store, spec, target)
    except OSError as error:
        logger.warning("%s: what it is now could not be noted: %s", spec.label, error)
