"""Run a two-stage pipeline, small enough to break many times, with Ray, DeepSpeed and vLLM; check its faults."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from campaigns.faults.fault import Outcome
from pipelines.execution.executor import RunContext, RunOptions, Silent
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from rlhf_core.errors import RlhfError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard
from rlhf_core.tracking.memory import MemoryTracker

WORKER_TIMEOUT_S = 120.0
STEPS = 4
SMALL = f"""
name = "faults"
[runtime]
worker_timeout_s = {WORKER_TIMEOUT_S}
[runtime.trainer]
engine = "deepspeed"
[runtime.sampler]
type = "vllm"
max_model_len = 96
kv_cache_gib = 0.25
[prepare_data]
max_prompt_tokens = 64
max_tokens = 96
data = {{type = "support", demonstrations = 48, preferences = 48, prompts = 16, eval_demonstrations = 8, \
eval_preferences = 8, eval_prompts = 4}}
model = {{type = "init", vocab_size = 400, hidden_size = 64, layers = 2, heads = 2, kv_heads = 2, \
intermediate_size = 128, max_positions = 96}}
[ppo]
start_from = "base"
steps = {STEPS}
prompts_per_step = 8
sampling = {{max_tokens = 16}}
checkpoint_every = 1
[ppo.rewards.terms.finished]
type = "function"
function = "rlhf_core.rewards.verifiable:finished"
"""


def small_config(folder: Path, overrides: tuple[str, ...] = ()) -> PipelineConfig:
    """The configuration of the small pipeline, whose profile is written into `folder`."""
    path = folder / "faults.toml"
    path.write_text(SMALL, encoding="utf-8")
    return load_profile(path, overrides)


class Faulty(Silent):
    """Causes a fault shortly after `stage` has reported `step`, and records the times of the following events.

    From the fault until its detection, every step takes `pause_s` longer, because such a small stage might end before.
    """

    def __init__(self, stage: str, step: int, cause: Callable[[], None], pause_s: float) -> None:
        self._stage, self._step, self._cause, self._pause_s = stage, step, cause, pause_s
        self.caused_at: float | None = None
        self.noticed_at: float | None = None
        self.went_on_at: float | None = None
        self.said = ""

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        if label != self._stage:
            return
        now = time.monotonic()
        if self.noticed_at is not None and self.went_on_at is None:
            self.went_on_at = now
        if done == self._step and self.caused_at is None:
            threading.Timer(0.2, self._strike).start()  # into the middle of the next call
        elif self.caused_at is not None and self.noticed_at is None:
            time.sleep(self._pause_s)

    def _strike(self) -> None:
        self.caused_at = time.monotonic()
        self._cause()

    def hear(self, message: str) -> None:
        """Record the first warning that a stage is retried."""
        if self.noticed_at is None and self.caused_at is not None:
            self.noticed_at, self.said = time.monotonic(), message

    def outcome(self, problem: str) -> Outcome:
        """The outcome at the end of the run: recovered, unless there is a `problem`."""
        if self.caused_at is None or self.noticed_at is None or problem:
            return Outcome("not handled", None, None, problem or "the fault went by without a sign of it")
        went_on = self.went_on_at or time.monotonic()  # the end of the run if no step was left
        return Outcome("recovered", self.noticed_at - self.caused_at, went_on - self.noticed_at, self.said)


class _Hearing(logging.Handler):
    def __init__(self, faulty: Faulty) -> None:
        super().__init__(logging.WARNING)
        self._faulty = faulty

    def emit(self, record: logging.LogRecord) -> None:
        self._faulty.hear(record.getMessage())


class Small:
    """The small pipeline with warm engines, its store, and the digests of an undisturbed run."""

    def __init__(self, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.config = small_config(folder, overrides)
        self.store = ArtifactStore(folder / "store")
        self.store.create()
        self.runtime = LazyRuntime(self.config.runtime)
        self.digests: Mapping[str, str] = {}

    def run(self, listener: Silent) -> dict[str, str]:
        """Run the stages that are not in the store; returns label -> digest."""
        context = RunContext(self.config, RunOptions(), self.store, MemoryTracker(), listener)
        run = PipelineRun(context, LocalExecutor(context, self.runtime))
        made = run_stages(run, lifecycle, run.directly, tags={})
        return {label: ref.digest for label, ref in made.items()}

    def forget(self, label: str) -> None:
        """Remove the result of a stage from the store, so that it runs again."""
        for record in self.store.records():
            if record.label == label:
                discard(self.store.shared, name_of(record.key))

    def recover(self, stage: str, step: int, cause: Callable[[], None], *, pause_s: float = 0.0) -> Outcome:
        """Cause a fault in `stage` after `step`; returns the outcome. The digests must equal the undisturbed run's."""
        if not self.digests:
            self.digests = self.run(Silent())
        self.forget(stage)
        faulty = Faulty(stage, step, cause, pause_s)
        handler, logger = _Hearing(faulty), logging.getLogger("pipelines.execution.executor")
        logger.addHandler(handler)
        try:
            same = self.run(faulty) == self.digests
        except RlhfError as error:
            return Outcome("not handled", None, None, f"{type(error).__name__}: {error}")
        finally:
            logger.removeHandler(handler)
        return faulty.outcome("" if same else "another digest than in peace")
