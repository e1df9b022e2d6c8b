"""Execute stages in this process, on engines that start when the plan or a stage needs them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pipelines.execution.executor import (
    Progress,
    RunContext,
    ShownTracker,
    StageOutcome,
    find_result,
    reached,
    retry_lost_workers,
    status_of,
)
from pipelines.execution.plan import PlannedStage, engines_needed
from rlhf_core.config.annotators import People
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.interfaces import ModelSpec, Role, Runtime, Sampler, StageTracker, T, Trainer
from rlhf_core.runtime.cluster import check_ray_address, named_address
from rlhf_core.runtime.local_runtime import open_runtime
from rlhf_core.schema import secrets
from rlhf_core.stage.decision import Decision, starts_over, target_of
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import check_secrets, execute
from rlhf_core.types import ArtifactRef, PolicyRef, RewardModelRef

logger = logging.getLogger(__name__)

ATTACH_POLL_S = 0.25  # between looks at a key that another process computes


# ---------------------------------------------------------------- engines


class LazyRuntime:
    """A `Runtime` that opens the engines of `config` at the first call.

    Cached stages neither import nor start an engine.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]:
        return self._open().trainer(role, model, optimizer)

    def sampler(self, policy: Path) -> AbstractContextManager[Sampler]:
        return self._open().sampler(policy)

    def together(self, *work: Callable[[], T]) -> list[T]:
        return self._open().together(*work)

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Open the runtime and start its workers now."""
        self._open().prewarm(trainer=trainer, sampler=sampler)

    def engines(self) -> dict[str, str]:
        """The engines in use; none before the first call."""
        return {} if self._runtime is None else self._runtime.engines()

    def close(self) -> None:
        with self._lock:
            if self._runtime is not None:
                self._runtime.close()

    def _open(self) -> Runtime:
        with self._lock:
            if self._runtime is None:
                self._runtime = open_runtime(self._config)
            return self._runtime


class KeptRuntime:
    """Engines that several runs use one after the other, as long as their engine configuration is the same."""

    def __init__(self) -> None:
        self._config: RuntimeConfig | None = None
        self._runtime: LazyRuntime | None = None

    def of(self, config: RuntimeConfig) -> LazyRuntime:
        """The engines for a run with this configuration; engines of another configuration are closed."""
        if self._runtime is None or config != self._config:
            self.close()
            self._config, self._runtime = config, LazyRuntime(config)
        return self._runtime

    def close(self) -> None:
        """Close the engines, for instance after a failure that may have left them in any state."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()


# ---------------------------------------------------------------- the executor


@dataclass(frozen=True)
class LocalExecutor:
    """A `StageExecutor` that computes in this process; `runtime` holds the engines, and `close` ends them."""

    context: RunContext
    runtime: LazyRuntime
    owns_runtime: bool = True
    """Whether `close` ends the engines; otherwise they outlive the run, for the next one."""

    def prepare(self, planned: Sequence[PlannedStage]) -> None:
        """Check secrets and Ray's address now instead of when the first stage needs them; start engines in a thread."""
        config, needed = self.context.config.runtime, engines_needed(planned)
        for stage in planned:
            if stage.decision.action in ("RUN", "RESUME"):
                check_secrets(stage.spec)
        if "sampler" in needed:
            secrets.check(config.sampler, "runtime.sampler")
        if needed and config.type == "ray":
            check_ray_address(named_address())
        if needed and not _waits_for_people(planned):
            threading.Thread(target=_prewarm, args=(self.runtime, needed), daemon=True, name="prewarm").start()

    def execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Wait for another process that is computing the key, or compute it, and return the result."""
        attached = None if self.context.options.forces(spec.label) else self._attach(spec)
        return attached or self._compute(spec, show_progress)

    def close(self) -> None:
        """End the engines that were started, unless they belong to the caller."""
        if self.owns_runtime:
            self.runtime.close()

    def _attach(self, spec: StageSpec) -> StageOutcome | None:
        """Wait for another process that computes the key; the stage's tracking run belongs to that process."""
        key, store = self.context.key_of(spec), self.context.store
        owner = store.living_owner(key)
        if owner is None:
            return None
        self.context.listener.started(spec.label, Decision("ATTACH", owner.claim, key, None))
        while store.living_owner(key, fresh=True) is not None:
            time.sleep(ATTACH_POLL_S)
        return find_result(self.context, spec)

    def _compute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        """Compute the stage, with retries after lost workers, and close its tracking run with the true status."""
        began, context = time.monotonic(), self.context
        if "sampler" in spec.engines:
            secrets.check(context.config.runtime.sampler, "runtime.sampler")
        target = target_of(context.store, spec, strict=context.options.strict)
        key = target.key
        inner = context.tracker.stage(
            spec.label,
            key=key,
            params=spec.config.model_dump(mode="json"),
            tags={"stage": spec.name, **context.links},
            fresh=starts_over(context.store.attempts(key), target, force=context.options.forces(spec.label)),
        )
        shown = ShownTracker(inner, spec.label, context.listener)
        tracker = cast(StageTracker, shown)

        def progress(done: int, total: int, message: str) -> None:
            context.listener.progress(spec.label, done, total, message)
            show_progress(done, total, message)

        ended: BaseException | None = None
        try:
            # One tracking run for all tries; with each try, a forced stage starts over.
            ref, decision = retry_lost_workers(
                lambda: self._call(spec, tracker, progress, {"run_id": inner.run_id, **context.links}),
                label=spec.label,
                retries=context.config.runtime.retries,
                where=lambda: reached(context.store, key),
                sleep=time.sleep,
            )
            _log_models(spec.label, ref, inner)
        except BaseException as error:
            ended = error
            raise
        finally:
            inner.finish(status_of(ended))
        record = context.store.record(decision.key)
        metrics = record.metrics if record is not None else {}
        url = context.tracker.url(inner.run_id)
        return StageOutcome(ref, decision, metrics, time.monotonic() - began, shown.samples, url)

    def _call(
        self, spec: StageSpec, tracker: StageTracker, progress: Progress, tracking: Mapping[str, str]
    ) -> tuple[ArtifactRef, Decision]:
        options, listener = self.context.options, self.context.listener
        return execute(
            self.context.store,
            spec,
            runtime=self.runtime,
            tracker=tracker,
            progress=progress,
            force=options.forces(spec.label),
            strict=options.strict,
            on_decision=lambda decision: listener.started(spec.label, decision),
            tracking=tracking,
        )


def _log_models(label: str, ref: ArtifactRef, tracker: StageTracker) -> None:
    """Log the models that a stage made, so that the tracker knows them as inputs of later stages."""
    for name, value in (("", ref), *ref):
        if isinstance(value, (PolicyRef, RewardModelRef)):
            tracker.model(f"{label}.{name}" if name else label, value.digest, value.uri)


def _prewarm(runtime: LazyRuntime, needed: set[str]) -> None:
    try:
        runtime.prewarm(trainer="trainer" in needed, sampler="sampler" in needed)
    except Exception as error:
        # The stage that needs the engine fails with the same error, and reports it.
        logger.debug("could not start the engines in advance: %s", error)


def _waits_for_people(planned: Sequence[PlannedStage]) -> bool:
    """Whether the next stage waits for people, who have probably not judged enough yet."""
    working = (stage for stage in planned if stage.decision.action not in ("HIT", "BLOCKED"))
    following = next((stage.spec.config for stage in working), None)
    return isinstance(getattr(following, "annotator", None), People)
