"""What run-level tests of generate, score and select share: a store to run in, and rollouts to start from."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.execution.gates import numbers
from rlhf_core.config.monitors import is_named
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.schema.base import Config
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.types import ArtifactRef, Completion, FinishReason, Generation, Message, Prompt, Rollout
from stages.table import STAGES, numbers_of
from tests.support.policies import RUNTIME


def quiet(done: int, total: int, message: str) -> None:
    """A progress callback that does nothing."""


@dataclass
class Workshop:
    """A store with a runtime in this process, whose engines start only if a stage leases them."""

    store: ArtifactStore
    runtime: LocalRuntime = field(default_factory=lambda: LocalRuntime(RUNTIME))
    tracker: MemoryStageTracker = field(default_factory=MemoryStageTracker)

    def run(
        self,
        name: str,
        config: Config,
        inputs: dict[str, Any],
        *,
        progress: Callable[[int, int, str], None] = quiet,
        seed: int = 17,
        callables: tuple[str, ...] = (),
        files: dict[str, str] | None = None,
    ) -> tuple[ArtifactRef, Decision]:
        """Execute a stage; `files` are the digests of the user's files that a pipeline has in the key."""
        engines = {} if files is None else {"files": files}
        spec = STAGES[name].spec(config, inputs, label=name, seed=seed, engines=engines, callables=callables)
        ref, decision = execute(self.store, spec, runtime=self.runtime, tracker=self.tracker, progress=progress)
        self._check_measured(spec, ref, decision)
        return ref, decision

    def _check_measured(self, spec: StageSpec, ref: ArtifactRef, decision: Decision) -> None:
        """Fail for a number that the stage does not name beforehand: gates and sweeps could not ask for it."""
        names = numbers_of(spec, {})
        assert names is not None
        report = self.store.path(ref) / "report.json"
        found = dict(numbers(json.loads(report.read_text()))) if report.is_file() else {}
        unnamed = [name for name in self.metrics(decision) if not is_named(name, names.record)]
        unnamed += [name for name in found if not is_named(name, names.report)]
        assert not unnamed, f"{spec.name} records numbers that stages/measured.py does not name: {unnamed}"

    def metrics(self, decision: Decision) -> dict[str, float]:
        """Return the final metrics of a stage that ran."""
        record = self.store.record(decision.key)
        return dict(record.metrics)


def workshop(root: Path, **options: Any) -> Workshop:
    """A store in `root`; `runtime=None` for stages that must fail before they lease an engine."""
    return Workshop(ArtifactStore(root / "store"), **options)


def generation(prompt_id: str, text: str, *, tokens: int = 3, finish_reason: FinishReason = "stop") -> Generation:
    """An answer of `tokens` tokens, each of log-probability -0.5."""
    prompt = Prompt(prompt_id, (Message("user", f"question {prompt_id}"),), "label", "test")
    return Generation(prompt, (1, 2), Completion((5,) * tokens, (-0.5,) * tokens, text, finish_reason, 0, 0))


def rollout(
    prompt_id: str, text: str, reward: float, *, tokens: int = 3, finish_reason: FinishReason = "stop"
) -> Rollout:
    """The same, scored."""
    made = generation(prompt_id, text, tokens=tokens, finish_reason=finish_reason)
    return Rollout(made.prompt, made.prompt_ids, made.completion, reward, {"quality": reward})
