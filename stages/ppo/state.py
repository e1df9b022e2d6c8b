"""The state of policy optimization, the content of its checkpoints, and the final export."""

import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from rlhf_core.algorithms.token_math import AdaptiveKL, FixedKL, kl_controller
from rlhf_core.config.policy import PPOConfig
from rlhf_core.interfaces import Metrics
from rlhf_core.rollouts.answers import StepSampler
from rlhf_core.rollouts.best_checkpoint import BestCheckpoint
from rlhf_core.rollouts.held_out import HeldOut
from rlhf_core.rollouts.monitors import Monitors
from rlhf_core.rollouts.prompts import BandOrder
from rlhf_core.schema.base import keyed
from rlhf_core.stage.checkpoints import Checkpoint
from rlhf_core.stage.context import StageContext
from rlhf_core.training.moving_reference import MovingReference
from stages.ppo.models import Models

logger = logging.getLogger(__name__)

REPORT = "monitors.json"


@dataclass
class TrainingState:
    """The state that a checkpoint restores: models, rewards, sampler, prompt order, KL controller, and monitors."""

    models: Models
    sampler: StepSampler
    band: BandOrder | None
    kl: FixedKL | AdaptiveKL
    held_out: HeldOut | None
    monitors: Monitors
    best: BestCheckpoint

    @classmethod
    def open(
        cls,
        config: PPOConfig,
        models: Models,
        sampler: StepSampler,
        band: BandOrder | None,
        held_out: HeldOut | None,
        context: StageContext,
    ) -> Self:
        """The state before the first step."""
        kl = kl_controller(config.kl.coef, config.kl.target, config.kl.horizon)
        looks = 1 + math.ceil(config.steps / config.evaluate.every) if config.evaluate else 0
        monitors = Monitors(config.monitors, looks=looks, label=context.label, tracker=context.tracker)
        best = BestCheckpoint(config.evaluate, context.checkpoints, context.label)
        return cls(models, sampler, band, kl, held_out, monitors, best)

    def save(self, metrics: Metrics, *, step: int, metric: float | None = None) -> None:
        """Write a checkpoint; with a `metric` it may be the best one. The log has the rollouts made since the last one."""
        state = {"kl": asdict(self.kl), "rewards": self.models.scorer.state(), "metrics": metrics}
        if self.band:
            state["band"] = self.band.state()
        if self.watched:
            evaluations = self.held_out.evaluations if self.held_out else []
            state["guard"] = self.monitors.state() | self.best.state() | {"evaluations": evaluations}
        with self.best.checkpoints.saving(step, state, metric=metric) as folder:
            self.sampler.save(folder / "rollouts")
            self.models.policy.save(folder / "policy")
            if self.models.value_model:
                self.models.value_model.save(folder / "value_model")
            if isinstance(self.models.reference, MovingReference):
                self.models.reference.save(folder)

    def resume(self, checkpoint: Checkpoint, context: StageContext) -> None:
        """Load all parts. Raises StageWaiting if the run is paused and nobody has decided."""
        self.sampler.load(checkpoint.path / "rollouts", checkpoint.step)
        if self.watched:
            guard = checkpoint.state["guard"]
            self.monitors.restore(guard)
            self.best.restore(guard)
            if self.held_out:
                self.held_out.evaluations[:] = guard["evaluations"]
        self.monitors.decide(self.best, context)
        self.restore(checkpoint)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the parts that a rollback changes, too: not the sampler, the evaluations and the monitors."""
        self.models.policy.load(checkpoint.path / "policy")
        if self.models.value_model:
            self.models.value_model.load(checkpoint.path / "value_model")
        if isinstance(self.models.reference, MovingReference):
            self.models.reference.load(checkpoint.path)
        self.models.scorer.restore(checkpoint.state["rewards"])
        if self.band:
            self.band.restore(checkpoint.state["band"])
        self.kl = replace(self.kl, **checkpoint.state["kl"])

    def damage(self, folder: Path) -> str:
        """The first damaged file of a checkpoint, or ""."""
        value = self.models.value_model
        return self.models.policy.damage(folder / "policy") or (value.damage(folder / "value_model") if value else "")

    @property
    def watched(self) -> bool:
        """True if the run is evaluated or has monitors."""
        return self.held_out is not None or bool(self.monitors.configs)


def export_result(config: PPOConfig, state: TrainingState, context: StageContext) -> Metrics:
    """Export the chosen weights, with the report of the evaluations and monitors; return the final metrics of both."""
    best, monitors = state.best, state.monitors
    done = best.ended["step"] if best.ended else config.steps
    exported = best.export(state.models.policy, context.out, step=done)
    if not state.watched:
        return {"steps": float(done)}
    for name in monitors.missing():
        logger.warning("%s: no step had the metric %s, so its monitor never found anything", context.label, name)
    report = {
        "exported_step": exported,
        "ended": best.ended,
        "events": monitors.events,
        "evaluations": state.held_out.evaluations if state.held_out else [],
        "monitors": [keyed(monitor) for monitor in config.monitors],
    }
    file = context.out / REPORT
    file.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    context.tracker.file(file, "")
    counts = {"alarms": float(len(monitors.events)), "stopped_early": float(bool(best.ended))}
    return {"steps": float(done), "exported_step": float(exported)} | counts
