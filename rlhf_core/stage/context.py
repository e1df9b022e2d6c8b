"""The context that a running stage gets, and the attempt that it belongs to."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar

from rlhf_core.config.models import LoraConfig
from rlhf_core.interfaces import ModelSpec, Runtime, StageTracker
from rlhf_core.processes.identity import user_name
from rlhf_core.schema.base import Config, CustomFunction
from rlhf_core.stage import failures, stopping
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.decision import Target
from rlhf_core.stage.failures import Counts, Settings
from rlhf_core.stage.gate_decisions import GateAnswer, GateDecisions, Question
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.versions import environment
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import Attempt
from rlhf_core.store.leases import Lease
from rlhf_core.store.records import Failed, Provenance
from rlhf_core.types import ArtifactRef
from rlhf_core.user_code import watch
from rlhf_core.user_code.dependencies import UserFunction

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=ArtifactRef)
Progress = Callable[[int, int, str], None]

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
    """A running attempt at a stage, with the data for its record and the lease that it holds."""

    spec: StageSpec
    target: Target
    lease: Lease
    attempt: Attempt
    work: Path
    tracking: Mapping[str, str]
    earlier_seconds: float
    earlier_code: Mapping[str, str]
    logged: Mapping[str, int]
    """Last step that earlier attempts recorded, by metric name."""
    failure_settings: Settings
    clock: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Duration of the attempt so far."""
        return time.monotonic() - self.clock

    def provenance(
        self, metrics: Mapping[str, float], engines: dict[str, str], failed: dict[str, Failed], unseen: tuple[str, ...]
    ) -> Provenance:
        """Collect the provenance of the artifact, for its record."""
        return Provenance(
            label=self.spec.label,
            stage=self.spec.name,
            payload=self.target.payload,
            config=self.spec.config.model_dump(mode="json"),
            inputs=tuple(dict.fromkeys(ref.uri for ref in self.spec.refs())),
            code=self.target.code,
            earlier_code=self.earlier_code,
            failures=failed,
            unseen=unseen,
            metrics={name: float(value) for name, value in metrics.items()},
            engines=engines,
            environment=environment(),
            user=user_name(),
            project=self.spec.project,
            cpus=self.spec.cpus,
            gpus=self.spec.gpus,
            started=self.attempt.started,
            seconds=round(self.earlier_seconds + self.seconds(), 3),
            tracking=dict(self.tracking),
            attempts=self.attempt.number,
            resumed_from=self.attempt.resumed_from,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Everything that a running stage may use besides its configuration and its inputs.

    `out` is an empty folder for the artifact. `work` survives a killed process: a stage keeps files there to resume
    from (shards), besides its `checkpoints`. `progress(done, total, message)` reports progress to the user.
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
        """Digests in the key of the user's files that the configuration names."""
        found: Mapping[str, str] = self._run.spec.engines["files"] if "files" in self._run.spec.engines else NOTHING
        return found

    @property
    def sampler_length(self) -> int | None:
        """The configured length limit of the sampler in tokens; None for the policy's whole context."""
        engines = self._run.spec.engines
        sampler = engines["sampler"] if "sampler" in engines else NOTHING
        return int(sampler["max_model_len"]) if "max_model_len" in sampler else None

    def path(self, ref: ArtifactRef) -> Path:
        """The folder of an input."""
        return self.store.path(ref)

    def model(
        self, ref: ArtifactRef, head: Literal["lm", "score", "value"] = "lm", *, lora: LoraConfig | None = None
    ) -> ModelSpec:
        """The specification of a model among the inputs, for training or inference."""
        return ModelSpec(str(self.path(ref)), head, lora, self.seed)

    @property
    def functions(self) -> Mapping[str, str]:
        """Digests of the user's functions in the key; loading a function checks its digest."""
        return self._run.target.functions

    def user_function(self, part: Config) -> UserFunction | None:
        """The user's function that a part of the configuration names, or None."""
        if not isinstance(part, CustomFunction):
            return None
        return UserFunction.of(part.function, self.functions[part.function], notes=self.notes)

    @property
    def notes(self) -> str:
        """The file in which all processes note the reads of user code beyond the key."""
        return str(self.work / attempts.UNSEEN)

    def figures(self, drawn: Mapping[str, bytes]) -> None:
        """Write plots (PNG, by name) into the artifact, and record them."""
        for name, png in drawn.items():
            path = self.out / "figures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png)
            self.tracker.file(path, "figures")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; `reward/mean` of the stage `ppo` becomes `ppo/reward/mean`.

        After a resume, steps recorded before the kill are computed again but not recorded twice.
        """
        new = {
            f"{self.label}/{name}": float(value)
            for name, value in values.items()
            if step > self._run.logged.get(f"{self.label}/{name}", step - 1)
        }
        if not new:
            return
        self._run.lease.fence()
        # The tracker comes first: it accepts a step twice, so a kill between the two writes loses nothing.
        self.tracker.metrics(step, new)
        with (self.work / attempts.METRICS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "values": new}) + "\n")

    def failed(self, step: int, counts: Counts) -> None:
        """Record how many answers failed at a step, before they are kept: {path in the configuration: (failed, of)}.

        The result then counts only for the settings at these paths. Paths without failure settings are left out.
        """
        failures.note_failures(self.work, step, counts, self._run.failure_settings)

    def stopping(self) -> bool:
        """Whether the stage must save and end now, because of a signal or the time limit.

        Raises ArtifactError if another process has taken the stage over.
        """
        self._run.lease.fence()
        return bool(stopping.reason())

    def stop(self) -> NoReturn:
        """Raise StageStopped. Call it after `stopping` returned True and all work has been saved."""
        self.checkpoints.settle()  # before the engines are released, because they may still be writing
        why = stopping.reason()
        logger.warning("%s: %s; saved, run the same command again to resume", self.label, why)
        raise stopping.StageStopped(why)

    def wait(self, what: str, condition: Mapping[str, Any] = NOTHING) -> NoReturn:
        """Raise StageWaiting: people must do something first; then the same command resumes the stage.

        `condition` is the condition that the stage waits for, as JSON values for other processes.
        """
        raise stopping.StageWaiting(f"{self.label} is waiting: {what}", condition)

    def decision(self, question: Question, hint: str) -> GateAnswer:
        """A person's answer to a question. Raises StageWaiting, with the question as its condition, if nobody has answered."""
        request = GateDecisions(self.store.shared).find(question.id)
        if request is None or request.answer is None:
            self.checkpoints.settle()  # before the engines are released, because they may still be writing
            self.wait(f"{question.found}: {hint}", {"question": question.model_dump()})
        return request.answer

    def commit(
        self,
        kind: type[R],
        *,
        children: Mapping[str, tuple[str, type[ArtifactRef]]] = NOTHING,
        metrics: Mapping[str, float] = NOTHING,
        pin: str = "",
    ) -> R:
        """Move `out` into the store as the artifact of this stage and return its handle.

        `children={"base": ("base", PolicyRef)}` sets the field `base` of the handle to a handle of the folder
        `out/base`. `metrics` are the final numbers, kept in the key record. With a
        note in `pin` the artifact is pinned, because it cannot be made again. Raises ArtifactError if an input was found
        damaged while the stage read it.
        """
        self.store.check_inputs(self._run.spec.refs())
        return self.store.commit(
            self._run.lease,
            self.out,
            kind,
            children=children,
            record=self._run.provenance(
                metrics,
                self.runtime.engines(),
                failures.noted_failures(self.work, self._run.failure_settings),
                watch.noted(Path(self.notes)),
            ),
            parents=tuple(dict.fromkeys(ref.digest for ref in self._run.spec.refs())),
            pin=pin,
        )


def logged_steps(path: Path) -> dict[str, int]:
    """The last step of each metric in the file of earlier attempts; a line cut short by a kill is removed."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    last: dict[str, int] = {}
    for line in whole.splitlines():
        entry = json.loads(line)
        for name in entry["values"]:
            last[name] = max(last.get(name, entry["step"]), entry["step"])
    return last
