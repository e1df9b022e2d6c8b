"""A stage without engines for the tests of the store: counts steps, checkpoints them, writes what it counted."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.interfaces import ModelSpec, RegistryState, Role, Sampler, Trainer
from rlhf_core.schema.base import FAILURES, OPERATIONAL, Config
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.gate_decisions import Question
from rlhf_core.stage.key import StageSpec, key_payload, payload_key
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PolicyRef, PreparedDataRef

NAME = "toy"
VERSION = 1
CODE = "warn"


class Inner(Config):
    rate: float = 0.5
    log_every: Annotated[int, OPERATIONAL] = 10
    timeout_s: Annotated[float, FAILURES] = 60.0
    """Below 10, one of the four answers of each step fails."""


class ToyConfig(Config):
    kl_coef: float = 0.05
    steps: int = 3
    inner: Inner = Inner()
    names: tuple[str, ...] = ("a", "b")
    workers: Annotated[int, OPERATIONAL] = 1
    seconds_a_step: Annotated[float, OPERATIONAL] = 0.0
    bytes_out: Annotated[int, OPERATIONAL] = 0
    """Of no influence on the key, so a test can ask for the same key with another cost."""
    trouble: Annotated[str, OPERATIONAL] = ""
    """`raise:<step>`, `wait:<file>` (goes on once it is there), `full`, `no commit`, `other handle`, `children`,
    `shards`, `people:<file>` (waits for people after step 2 until it is there), `ask` (waits
    after step 2 for the answer to a question)."""


def run(config: ToyConfig, *, context: StageContext, policy: PolicyRef | None = None) -> ArtifactRef:
    """Return an artifact whose content depends on the keyed configuration, the seed and the input alone."""
    checkpoint = context.checkpoints.latest()
    total = 0.0 if checkpoint is None else checkpoint.state["total"]
    for step in range(1 if checkpoint is None else checkpoint.step + 1, config.steps + 1):
        total += config.kl_coef * step + context.seed
        time.sleep(config.seconds_a_step)
        context.metrics(step, {"train/total": total})
        context.failed(step, {"inner": (config.inner.timeout_s < 10, 4)})
        if config.trouble == "shards":
            (context.work / f"shard-{step}.txt").write_text("x")
        if config.trouble == f"raise:{step}":
            raise ValueError(f"step {step} went wrong")
        if config.trouble != "shards":
            with context.checkpoints.saving(step, {"total": total}) as folder:
                (folder / "weights.bin").write_bytes(os.urandom(64))
        context.progress(step, config.steps, "counting")
        if step == 2 and config.trouble.startswith("people:"):
            people = Path(config.trouble.removeprefix("people:"))
            if not people.exists():
                context.wait("nobody has written the file", {"file": str(people)})
        if step == 2 and config.trouble == "ask":
            question = Question(gate="pace", condition={"after": context.label}, digest=context.key, found="too fast")
            context.decision(question, "slow down")
        while config.trouble.startswith("wait:") and not Path(config.trouble.removeprefix("wait:")).exists():
            if context.stopping():
                context.stop()
            time.sleep(0.02)
    read = "" if policy is None else (context.path(policy) / "total.txt").read_text()
    (context.out / "total.txt").write_text(f"{total} {read}")
    (context.out / "padding.bin").write_bytes(bytes(config.bytes_out))
    return _finish(config.trouble, context)


def _finish(trouble: str, context: StageContext) -> ArtifactRef:
    if trouble == "full":
        Path("/dev/full").write_text("x")  # a device that is always full
    if trouble in ("no commit", "raise:end", "shards"):
        if trouble == "no commit":
            return PolicyRef(uri="store://" + "0" * 64, digest="0" * 64)
        raise ValueError("the end went wrong")
    if trouble == "children":
        (context.out / "base").mkdir()
        (context.out / "base" / "config.json").write_text("{}")
        children: dict[str, tuple[str, type[ArtifactRef]]] = {"base": ("base", PolicyRef)}
        return context.commit(PreparedDataRef, children=children)
    handle = context.commit(PolicyRef, metrics={"total": 1.5})
    return DemonstrationsRef(**handle.model_dump()) if trouble == "other handle" else handle


def toy_spec(config: ToyConfig | None = None, **changes: Any) -> StageSpec:
    """Return the spec of a toy stage with some fields changed."""
    fields: dict[str, Any] = {
        "name": NAME,
        "module": __name__,
        "version": VERSION,
        "code": CODE,
        "config": ToyConfig() if config is None else config,
        "inputs": {},
        "seed": 7,
        "label": "toy",
        "engines": {},
    }
    return StageSpec(**(fields | changes))


def stage_key(spec: StageSpec, *, strict_code: bool = False) -> str:
    """Return the key of the stage: 64 hexadecimal digits."""
    return payload_key(key_payload(spec, strict_code=strict_code))


class NoEngines:
    """A runtime for stages that lease nothing."""

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]:
        raise NotImplementedError

    def sampler(self, policy: Path) -> AbstractContextManager[Sampler]:
        raise NotImplementedError

    def prewarm(self, *, trainer: bool, sampler: bool) -> None: ...

    def engines(self) -> dict[str, str]:
        return {"none": "1.0"}

    def close(self) -> None: ...


class RecordingTracker:
    """A tracker that keeps metrics in a list of (step, values)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append((step, dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def file(self, path: Path, folder: str) -> None: ...

    def dataset(self, name: str, digest: str, context: str) -> None: ...

    def model(self, name: str, digest: str, uri: str) -> None: ...

    def input_model(self, digest: str) -> None: ...

    def set_tags(self, values: Mapping[str, str]) -> None: ...

    def register(
        self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str], uri: str = ""
    ) -> str:
        return "1"

    def champions(self, name: str) -> RegistryState:
        return RegistryState()


def run_toy(store: ArtifactStore, spec: StageSpec | None = None, **options: Any) -> tuple[ArtifactRef, Decision]:
    """Execute a toy stage without engines; `options` go to `execute`."""
    given = {"runtime": NoEngines(), "tracker": RecordingTracker(), "progress": lambda *_: None} | options
    return execute(store, toy_spec() if spec is None else spec, **given)
