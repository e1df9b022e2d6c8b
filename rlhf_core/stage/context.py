"""What a stage is handed while it runs, and the attempt that it is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.interfaces import Runtime, StageTracker
from rlhf_core.schema.base import Config
from rlhf_core.schema.custom import CustomFunction
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Target
from rlhf_core.stage.key import StageSpec
from rlhf_core.store import attempts, failures
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt
from rlhf_core.store.checkpoints import Checkpoints
from rlhf_core.store.damage import findings
from rlhf_core.store.failures import Counts, Failed
from rlhf_core.store.leases import Lease
from rlhf_core.store.records import Provenance, environment
from rlhf_core.types import ArtifactRef
from rlhf_core.user_code.dependencies import UserFunction

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
Progress = Callable[[int, int, str], None]

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
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
        """Return how long the attempt has run."""
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
        """Return what the record of the artifact says about how it was made."""
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
    _run: RunningAttempt

    @property
    def files(self) -> Mapping[str, str]:
        """Return the digests, as they are in the key, of the user's files that the configuration names."""
        found: Mapping[str, str] = self._run.spec.engines["files"] if "files" in self._run.spec.engines else NOTHING
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
        children: Mapping[str, tuple[str, type[ArtifactRef]]] = NOTHING,
        metrics: Mapping[str, float] = NOTHING,
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
