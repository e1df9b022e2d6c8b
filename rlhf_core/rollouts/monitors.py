"""Watch a run of policy optimization: monitors warn, pause the run, stop it, or roll it back to the best checkpoint.

A rollback restores the models of an earlier checkpoint and continues with the next step and its prompts: the count of steps
does not go back, so a run ends after `steps` of them.

A run pauses until a person has decided whether it continues: it saves a checkpoint and ends as waiting. The pause is a part
of that checkpoint, and the decision a part of the report: a run whose answer came at once and one whose answer came a week
later have the same result.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import StageTracker
from rlhf_core.monitoring.bands import Action, History, MonitorConfig
from rlhf_core.rollouts.best_checkpoint import BestCheckpoint
from rlhf_core.stage.checkpoints import Checkpoint
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.gate_decisions import GateAnswer, Question

logger = logging.getLogger(__name__)

SEVERITY = ("stop", "rollback", "pause", "warn")
PAUSED = "paused"


@dataclass(frozen=True)
class Alarm:
    """Finding of a monitor at a step, and its action; `text` is "rollout/length 3.1 < 6 for 3 steps"."""

    step: int
    monitor: str
    action: Action
    text: str
    learning_rate_factor: float = 1.0
    kl_coef_factor: float = 1.0

    def __str__(self) -> str:
        return f"monitor {self.monitor}: {self.text} at step {self.step}"


class Monitors:
    """The monitors of a run with the history that they read, and their actions; `looks` is the number of evaluations.

    >>> from rlhf_core.monitoring.bands import Band
    >>> from rlhf_core.tracking.memory import MemoryStageTracker
    >>> band = Band(metric="rollout/length", low=6.0, for_steps=2, action="stop")
    >>> monitors = Monitors([band], looks=0, label="ppo", tracker=MemoryStageTracker())
    >>> monitors.observe(1, {"rollout/length": 3.1}), str(monitors.observe(2, {"rollout/length": 3.1})[0])
    ([], 'monitor band: rollout/length 3.1 < 6 for 2 steps at step 2')
    """

    def __init__(self, configs: Sequence[MonitorConfig], *, looks: int, label: str, tracker: StageTracker) -> None:
        self.configs = {config.label: config for config in configs}
        self._looks = looks
        self._label = label
        self._tracker = tracker
        self._history = History(dict.fromkeys(name for config in configs for name in config.reads()))
        self._streaks = dict.fromkeys(self.configs, 0)
        self._rollbacks = dict.fromkeys(self.configs, 0)
        self._accepted: set[str] = set()
        """Monitors whose alarm a person has accepted until it clears."""
        self.rates = {"learning_rate": 1.0, "kl_coef": 1.0}
        """The products of the factors of all rollbacks."""
        self.paused: tuple[Alarm, ...] = ()
        """The alarms about which a person has to decide."""
        self.events: list[dict[str, Any]] = []

    # ------------------------------------------------------------ find

    @property
    def quiet(self) -> bool:
        """True if no acting monitor has an unaccepted alarm at the last step."""
        return not any(
            self._streaks[name]
            for name, config in self.configs.items()
            if config.action != "warn" and name not in self._accepted
        )

    def observe(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, Sequence[float]] | None = None
    ) -> list[Alarm]:
        """The alarms of a step, the most severe first; `samples` are the scores of each held-out prompt."""
        self._history.add(step, metrics)
        if samples:
            self._history.add_samples(step, samples)
        alarms = []
        for name, config in self.configs.items():
            if step <= config.after or not any(read in metrics for read in config.reads()):
                continue
            found = config.check(self._history, looks=self._looks)
            self._streaks[name] = self._streaks[name] + 1 if found else 0
            if not found:
                self._accepted.discard(name)
            if self._streaks[name] == config.for_steps:
                alarms.append(self._alarm(step, config, found))
        return sorted(alarms, key=lambda alarm: SEVERITY.index(alarm.action))

    def complaints(self) -> dict[str, float]:
        """`monitor/<name>`: for how many steps in a row each monitor has had a complaint."""
        return {f"monitor/{name}": float(streak) for name, streak in self._streaks.items()}

    def check_metrics(self, logged: Mapping[str, float]) -> None:
        """Raise ConfigError if a monitor reads a metric that this step, with the first update, does not have."""
        later: tuple[str, ...] = ("eval/", "reward_extra/")
        if "policy/loss" not in logged:  # every answer was cut off and is masked, so there was no update
            later += ("policy/", "value/")
        for number, config in enumerate(self.configs.values()):
            for name in config.reads():
                if name not in logged and not name.startswith(later):
                    known = ", ".join(sorted(one for one in logged if not one.startswith(("time/", "monitor/"))))
                    rule = "no step of this run has such a metric, so the monitor would never find anything"
                    raise ConfigError(f"ppo.monitors[{number}].metric", name, rule, f"choose one of {known}")

    def missing(self) -> list[str]:
        """The metrics of monitors that no step has had so far."""
        return self._history.missing()

    # ------------------------------------------------------------ act

    def act(self, alarms: Sequence[Alarm], best: BestCheckpoint, *, last: bool) -> Checkpoint | None:
        """Act on the alarms of a step; the checkpoint to roll back to, or None. After the `last` step a rollback stops."""
        for alarm in alarms:
            if alarm.action == "warn":
                self._note(alarm, "warned")
        acting = tuple(alarm for alarm in alarms if alarm.action != "warn")
        if acting and acting[0].action != "pause":
            return self._stop_or_roll_back(acting[0], best, last=last)
        self.paused = acting
        return None

    def decide(self, best: BestCheckpoint, context: StageContext) -> None:
        """Continue or end as decided about a pause; raise StageWaiting without a decision.

        Call it when the checkpoint of the step is written. Who decided, when and why is in the tags and not in the
        report, whose content must not depend on it.
        """
        if not self.paused:
            return
        answer = decision(self.paused, context)
        ends = answer.answer == "reject"
        done = "rejected: stopped" + _result(best.checkpoints.best()) if ends else "approved: goes on"
        for alarm in self.paused:
            self._note(alarm, f"paused, {done}", said=f" ({answer})")
            self.accept(alarm.monitor)
        if ends:
            best.end(self.paused[0].step, f"monitor {self.paused[0].monitor}")
        self.paused = ()

    def accept(self, monitor: str) -> None:
        """Accept a monitor's alarm, as a person decided; it is not raised again until it clears."""
        self._accepted.add(monitor)

    def _stop_or_roll_back(self, alarm: Alarm, best: BestCheckpoint, *, last: bool) -> Checkpoint | None:
        target = best.checkpoints.best()
        if alarm.action == "stop" or last or target is None:
            self._note(alarm, f"stopped{_result(target)}")
            best.end(alarm.step, f"monitor {alarm.monitor}")
            return None
        self.note_rollback(alarm, to=target.step)
        best.note_rollback()
        factors = {"learning rate": alarm.learning_rate_factor, "KL coefficient": alarm.kl_coef_factor}
        changed = "".join(f", {name} x{factor:g}" for name, factor in factors.items() if factor != 1)
        self._note(alarm, f"rolled back to step {target.step}{changed}")
        return target

    def note_rollback(self, alarm: Alarm, *, to: int) -> None:
        """Drop the history after step `to`, count the rollback, and multiply the rates."""
        self._history.forget_after(to)
        self._streaks = dict.fromkeys(self._streaks, 0)
        self._accepted.clear()
        self._rollbacks[alarm.monitor] += 1
        self.rates["learning_rate"] *= alarm.learning_rate_factor
        self.rates["kl_coef"] *= alarm.kl_coef_factor

    def kl_factor(self, checkpoint: Checkpoint) -> float:
        """The factor of the KL coefficient in a checkpoint to which the run was rolled back."""
        return float(self.rates["kl_coef"] / checkpoint.state["guard"]["rates"]["kl_coef"])

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint (JSON)."""
        watch: dict[str, Any] = {
            "history": self._history.state(),
            "streaks": self._streaks,
            "rollbacks": self._rollbacks,
        }
        if self._accepted:
            watch["accepted"] = sorted(self._accepted)
        paused = {PAUSED: [asdict(alarm) for alarm in self.paused]} if self.paused else {}
        return {"watch": watch, "rates": self.rates, "events": self.events} | paused

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        watch = state["watch"]
        self._history.restore(watch["history"])
        self._streaks, self._rollbacks = dict(watch["streaks"]), dict(watch["rollbacks"])
        self._accepted = set(watch.get("accepted", ()))
        self.rates, self.events = dict(state["rates"]), list(state["events"])
        self.paused = paused_alarms(state)

    def _alarm(self, step: int, config: MonitorConfig, found: str) -> Alarm:
        name, streak = config.label, self._streaks[config.label]
        text = f"{found} for {streak} {config.unit}{'s' * (streak > 1)}"
        if config.action != "rollback":
            return Alarm(step, name, config.action, text)
        if self._rollbacks[name] >= config.max_rollbacks:
            return Alarm(step, name, "stop", f"{text}, after {self._rollbacks[name]} rollbacks")
        return Alarm(step, name, "rollback", text, config.learning_rate_factor, config.kl_coef_factor)

    def _note(self, alarm: Alarm, done: str, *, said: str = "") -> None:
        text = f"{alarm}: {done}"
        logger.warning("%s: %s", self._label, text)
        self.events.append(asdict(alarm) | {"done": done, "message": text})
        rows = [[event["step"], event["monitor"], event["message"]] for event in self.events]
        self._tracker.table("monitors", ["step", "monitor", "message"], rows)
        self._tracker.set_tags({f"monitor.{alarm.monitor}": text + said})


def _result(checkpoint: Checkpoint | None) -> str:
    return f", step {checkpoint.step} is the result" if checkpoint else ""


def paused_alarms(state: Mapping[str, Any]) -> tuple[Alarm, ...]:
    """The alarms in a checkpoint about which a person has to decide; () if it does not pause."""
    return tuple(Alarm(**alarm) for alarm in state.get(PAUSED, ()))


def decision(alarms: Sequence[Alarm], context: StageContext) -> GateAnswer:
    """The answer to: may the computation of this key continue after these alarms? Raises StageWaiting without one."""
    found = "; ".join(map(str, alarms))
    condition = {"after": context.label, "step": alarms[0].step, "found": found}
    question = Question(gate=alarms[0].monitor, condition=condition, digest=context.key, found=found)
    return context.decision(question, "paused, approve to go on, reject to end with the best checkpoint")


def await_decision(context: StageContext) -> None:
    """Raise StageWaiting before leasing engines if the newest checkpoint pauses and the decision is missing."""
    newest = context.checkpoints.latest()
    if newest is not None and (alarms := paused_alarms(newest.state.get("guard", {}))):
        decision(alarms, context)
