"""Guard a run of policy optimization: evaluate it, watch it, end it early, take it back to an honest checkpoint, or pause it.

Without `[ppo.evaluate]` and `[[ppo.monitors]]` a guard does nothing. A rollback restores the models of an earlier
checkpoint and goes on with the next step and its prompts: steps are counted on, so a run ends after `steps` of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.interfaces import Metrics, Trainer, Weights
from rlhf_core.monitoring.best import Best
from rlhf_core.monitoring.watch import Alarm, Watch, plain
from rlhf_core.rollouts.answers import StepSampler
from rlhf_core.rollouts.held_out import HeldOut, Measured
from rlhf_core.rollouts.pause import STATE as PAUSED
from rlhf_core.rollouts.pause import Pause
from rlhf_core.schema.base import keyed
from rlhf_core.stage.context import StageContext
from rlhf_core.store.checkpoints import Checkpoint

logger = logging.getLogger(__name__)

REPORT = "monitors.json"
NOTHING = Measured({}, {})


class RunGuard:
    """Evaluates and watches one run; `state` and `restore` are for checkpoints.

    >>> for step in guard.steps(first):                                            # doctest: +SKIP
    ...     metrics |= guard.after_step(step + 1, metrics, policy.weights)
    """

    def __init__(
        self, config: PPOConfig, sampler: StepSampler, held_out: HeldOut | None, context: StageContext
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._held_out = held_out
        self._context = context
        evaluate = config.evaluate
        self._watch = Watch(config.monitors, looks=1 + math.ceil(config.steps / evaluate.every) if evaluate else 0)
        self.acts = evaluate is not None
        """Whether the guard may return to a checkpoint, so that the best honest one is kept besides the newest."""
        self.checkpoints = context.checkpoints.keeping(best=1) if self.acts else context.checkpoints
        self.target: Checkpoint | None = None
        """The checkpoint that the last step is to be rolled back to."""
        self.candidate: float | None = None
        """The metric of the checkpoint after the last step; None if nothing may return to it."""
        self._best = Best()
        self._rates = {"learning_rate": 1.0, "kl_coef": 1.0}
        self._pause: Pause | None = None
        self._ended: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []

    # ------------------------------------------------------------ the loop of the stage

    @property
    def learning_rate_scale(self) -> float:
        """Return the product of the factors of all rollbacks."""
        return self._rates["learning_rate"]

    def steps(self, first: int) -> Iterator[int]:
        """Yield the steps from `first` on, until the run ends."""
        for step in range(first, self._config.steps):
            if self._ended:
                return
            yield step

    def before_training(self, weights: Callable[[], Weights]) -> Metrics:
        """Return the evaluation of the policy before any update; {} if nothing is evaluated.

        Raises ConfigError for a monitor of what evaluations do not have.
        """
        if self._idle:
            return {}
        measured = self._evaluate(0, weights)
        self._watch.check_metrics({*measured.metrics, *self._components()}, only="eval/")
        self._judge(0, measured.metrics)
        self._watch.observe(0, measured.metrics, measured.samples)
        return measured.metrics

    def after_step(self, step: int, metrics: Metrics, weights: Callable[[], Weights]) -> Metrics:
        """Evaluate if it is due, ask the monitors, decide; return what this adds to the metrics of the step.

        Afterwards `target` says where to roll back to, and `steps` ends if the run does.
        """
        self.target = None
        if self._idle:
            return {}
        every = self._config.evaluate.every if self._config.evaluate else 0
        due = every and (step % every == 0 or step == self._config.steps)
        measured = self._evaluate(step, weights) if due else NOTHING
        self._check_metrics(step, metrics)
        alarms = self._watch.observe(step, metrics | measured.metrics, measured.samples)
        complaints = self._watch.complaints()
        self._judge(step, measured.metrics)
        for alarm in alarms:
            if alarm.action == "warn":
                self._note(alarm, "warned")
        acting = [alarm for alarm in alarms if alarm.action != "warn"]
        if acting:
            self._act(acting)
        elif due and self._config.evaluate and 0 < self._config.evaluate.patience <= self._best.since:
            text = f"no better {self._config.evaluate.best_by} since step {self._best.step}"
            self._end(step, text, export=self._config.evaluate.export)
        return measured.metrics | complaints

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is due because of what the step brought: a new best, a rollback, a pause, the end."""
        new_best = self.candidate is not None
        return (
            bool(self._ended)
            or self._pause is not None
            or self.target is not None
            or new_best
            or (step == 0 and self.acts)
        )

    def decide(self) -> None:
        """Go on, or end, as a person has decided about a pause; raise StageWaiting if nobody has.

        Call it when the checkpoint of the step is written. Who decided, when and why is in the tags and not in the
        report, whose content must not depend on it.
        """
        if self._pause is None:
            return
        pause, answer = self._pause, self._pause.answer(self._context)
        self._pause = None
        best = self.checkpoints.best()
        ends = answer.answer == "reject"
        where = f", step {best.step} is the result" if best else ""
        done = f"rejected: stopped{where}" if ends else "approved: goes on"
        for alarm in pause.alarms:
            self._note(alarm, f"paused, {done}", said=f" ({answer})")
            self._watch.accept(alarm.monitor)
        if ends:
            self._end(pause.alarms[0].step, f"monitor {pause.alarms[0].monitor}", export="best")

    def kl_factor(self, checkpoint: Checkpoint) -> float:
        """Return the factor of the KL coefficient in a checkpoint to which the run was rolled back."""
        return float(self._rates["kl_coef"] / checkpoint.state["guard"]["rates"]["kl_coef"])

    def export(self, policy: Trainer) -> Metrics:
        """Export the chosen weights, with the report of the monitors; return the final metrics of the guard."""
        folder, done = self._context.out, self._ended["step"] if self._ended else self._config.steps
        if self._idle:
            policy.export(folder)
            return {"steps": float(done)}
        for name in self._watch.missing():
            logger.warning(
                "%s: no step had the metric %s, so its monitor never found anything", self._context.label, name
            )
        chosen = self.checkpoints.best() if self._exports_best() else None
        if chosen is not None:
            policy.load(chosen.path / "policy")
        policy.export(folder)
        exported = chosen.step if chosen else done
        self._write_report(folder / REPORT, exported)
        counts = {"alarms": float(len(self._events)), "stopped_early": float(bool(self._ended))}
        return {"steps": float(done), "exported_step": float(exported)} | counts

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON); {} for a guard that does nothing."""
        if self._idle:
            return {}
        return {
            "guard": {
                "watch": self._watch.state(),
                "best": self._best.state(),
                "rates": self._rates,
                "ended": self._ended,
                "events": self._events,
                "evaluations": self._evaluations,
            }
            | ({PAUSED: self._pause.state()} if self._pause else {})
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        if self._idle:
            return
        kept = state["guard"]
        self._watch.restore(kept["watch"])
        self._best = Best.restored(kept["best"])
        self._rates, self._ended = dict(kept["rates"]), dict(kept["ended"])
        self._events, self._evaluations = list(kept["events"]), list(kept["evaluations"])
        self._pause = Pause.restored(kept[PAUSED]) if PAUSED in kept else None

    # ------------------------------------------------------------ private

    @property
    def _idle(self) -> bool:
        return self._config.evaluate is None and not self._config.monitors

    def _evaluate(self, step: int, weights: Callable[[], Weights]) -> Measured:
        if self._held_out is None:
            return NOTHING
        generations = self._sampler.borrow(weights, version=step, job=self._held_out.sample)
        measured = self._held_out.score(step, generations)
        self._evaluations.append({"step": step} | measured.metrics)
        return measured

    def _check_metrics(self, step: int, metrics: Metrics) -> None:
        """Raise ConfigError, at the first step that updates the policy, for a monitor of what steps do not have."""
        if step == 1 + self._config.value_warmup_steps * self._config.advantage.uses_values:
            # Where every answer was cut off and is masked, the step has no update.
            not_updated = () if "policy/loss" in metrics else ("policy/", "value/")
            self._watch.check_metrics(metrics, later=("eval/", "reward_extra/", *not_updated))

    def _components(self) -> list[str]:
        """Return the metrics of terms, which an evaluation has only if they apply to one of its answers."""
        evaluate = self._config.evaluate
        scored = {"reward": self._config.rewards, "independent": evaluate.independent if evaluate else None}
        return [
            f"eval/{name}_component/{term}"
            for name, rewards in scored.items()
            if rewards
            for term in [
                *rewards.terms,
                *["truncated"] * bool(rewards.truncated),
                *["overlong"] * bool(rewards.overlong),
            ]
        ]

    def _judge(self, step: int, metrics: Metrics) -> None:
        """Set `candidate` to the value of a new best evaluation, if no monitor objects; else to None."""
        self.candidate = None
        if self._config.evaluate is None or not metrics:
            return
        name = self._config.evaluate.best_by
        if name not in metrics:
            rule = f"evaluations have no such metric, but {', '.join(sorted(metrics))}"
            raise ConfigError(explain("ppo.evaluate.metric", name, rule, "choose one of these"))
        after = self._best.after(step, metrics[name] if self._watch.honest else math.nan)
        self.candidate = after.value if after.step == step else None
        self._best = after

    def _act(self, alarms: list[Alarm]) -> None:
        alarm = alarms[0]  # the most severe
        if alarm.action == "pause":
            self._pause = Pause(tuple(alarms))
            return
        target = self.checkpoints.best()
        last = alarm.step == self._config.steps
        if alarm.action == "stop" or last or target is None:
            where = f", step {target.step} is the result" if target else ""
            self._note(alarm, f"stopped{where}")
            self._end(alarm.step, f"monitor {alarm.monitor}", export="best")
            return
        self.target = target
        self._rates = {
            "learning_rate": self._rates["learning_rate"] * alarm.learning_rate_factor,
            "kl_coef": self._rates["kl_coef"] * alarm.kl_coef_factor,
        }
        self._watch.rolled_back(alarm, to=target.step)
        self._best = replace(self._best, since=0)
        factors = {"learning rate": alarm.learning_rate_factor, "KL coefficient": alarm.kl_coef_factor}
        changed = "".join(f", {name} x{factor:g}" for name, factor in factors.items() if factor != 1)
        self._note(alarm, f"rolled back to step {target.step}{changed}")

    def _end(self, step: int, why: str, *, export: str) -> None:
        self._ended = {"step": step, "why": why, "export": export}
        logger.warning("%s: ends at step %d of %d: %s", self._context.label, step, self._config.steps, why)

    def _note(self, alarm: Alarm, done: str, *, said: str = "") -> None:
        text = f"monitor {alarm.monitor}: {alarm.text} at step {alarm.step}: {done}"
        logger.warning("%s: %s", self._context.label, text)
        self._events.append(plain(alarm) | {"done": done, "message": text})
        rows = [[event["step"], event["monitor"], event["message"]] for event in self._events]
        self._context.tracker.table("monitors", ["step", "monitor", "message"], rows)
        self._context.tracker.set_tags({f"monitor.{alarm.monitor}": text + said})

    def _exports_best(self) -> bool:
        if self._ended:
            return bool(self._ended["export"] == "best")
        return self._config.evaluate is not None and self._config.evaluate.export == "best"

    def _write_report(self, file: Path, exported: int) -> None:
        report = {
            "exported_step": exported,
            "ended": self._ended,
            "events": self._events,
            "evaluations": self._evaluations,
            "monitors": [keyed(monitor) for monitor in self._config.monitors],
        }
        file.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        self._context.tracker.file(file, "")
