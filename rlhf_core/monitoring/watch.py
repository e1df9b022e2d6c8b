"""Decide from the metrics of each step whether a run goes on, stops or rolls back; remember what was decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.errors import ConfigError, explain
from rlhf_core.monitoring.base import Action, MonitorConfig
from rlhf_core.monitoring.history import History


@dataclass(frozen=True)
class Alarm:
    """What a monitor found at a step, and what is to be done; `text` is "rollout/length 3.1 < 6 for 3 steps"."""

    step: int
    monitor: str
    action: Action
    text: str
    learning_rate_factor: float = 1.0
    kl_coef_factor: float = 1.0


class Watch:
    """The monitors of a run with the history that they read; `state` and `restore` are for checkpoints.

    >>> from rlhf_core.monitoring.bands import Band
    >>> watch = Watch([Band(metric="rollout/length", low=6.0, for_steps=2, action="stop")], looks=0)
    >>> watch.observe(1, {"rollout/length": 3.1}), watch.observe(2, {"rollout/length": 3.1})[0].text
    ([], 'rollout/length 3.1 < 6 for 2 steps')
    """

    def __init__(self, monitors: Sequence[MonitorConfig], *, looks: int) -> None:
        self._monitors = {monitor.label: monitor for monitor in monitors}
        self._looks = looks
        self._history = History(dict.fromkeys(name for monitor in monitors for name in monitor.reads()))
        self._streaks = dict.fromkeys(self._monitors, 0)
        self._rollbacks = dict.fromkeys(self._monitors, 0)
        self._accepted: set[str] = set()
        """Monitors whose complaint a person has accepted, until it ends."""

    @property
    def honest(self) -> bool:
        """Return whether no monitor that acts has a complaint about the last step that nobody has accepted."""
        acting = [name for name, one in self._monitors.items() if one.action != "warn" and name not in self._accepted]
        return not any(self._streaks[name] for name in acting)

    def observe(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, Sequence[float]] | None = None
    ) -> list[Alarm]:
        """Return the alarms of a step, the most severe first; `samples` are the scores of each held-out prompt."""
        self._history.add(step, metrics)
        if samples:
            self._history.add_samples(step, samples)
        alarms = []
        for name, monitor in self._monitors.items():
            if step <= monitor.after or not any(read in metrics for read in monitor.reads()):
                continue
            found = monitor.check(self._history, looks=self._looks)
            self._streaks[name] = self._streaks[name] + 1 if found else 0
            if not found:
                self._accepted.discard(name)
            if self._streaks[name] == monitor.for_steps:
                alarms.append(self._alarm(step, monitor, found))
        severity = ("stop", "rollback", "pause", "warn")
        return sorted(alarms, key=lambda alarm: severity.index(alarm.action))

    def complaints(self) -> dict[str, float]:
        """Return `monitor/<name>`: for how many steps in a row each monitor has had a complaint."""
        return {f"monitor/{name}": float(streak) for name, streak in self._streaks.items()}

    def accept(self, monitor: str) -> None:
        """Take a monitor's complaint for honest, as a person has decided, until it ends."""
        self._accepted.add(monitor)

    def rolled_back(self, alarm: Alarm, *, to: int) -> None:
        """Forget what came after step `to`, and count the rollback."""
        self._history.forget_after(to)
        self._streaks = dict.fromkeys(self._streaks, 0)
        self._accepted.clear()
        self._rollbacks[alarm.monitor] += 1

    def missing(self) -> list[str]:
        """Return the metrics of monitors that no step had so far."""
        return self._history.missing()

    def check_metrics(self, logged: Iterable[str], *, only: str = "", later: Sequence[str] = ()) -> None:
        """Raise ConfigError if a monitor reads a metric that steps do not have.

        Looks at names that begin with `only`; `later` are prefixes of metrics that come later.
        """
        for number, monitor in enumerate(self._monitors.values()):
            for name in monitor.reads():
                if name.startswith(only) and name not in logged and not name.startswith(tuple(later)):
                    known = ", ".join(sorted(one for one in logged if not one.startswith(("time/", "monitor/"))))
                    rule = "no step of this run has such a metric, so the monitor would never find anything"
                    raise ConfigError(explain(f"ppo.monitors[{number}].metric", name, rule, f"choose one of {known}"))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON)."""
        kept = {"history": self._history.state(), "streaks": self._streaks, "rollbacks": self._rollbacks}
        return kept | ({"accepted": sorted(self._accepted)} if self._accepted else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._history.restore(state["history"])
        self._streaks, self._rollbacks = dict(state["streaks"]), dict(state["rollbacks"])
        self._accepted = set(state["accepted"]) if "accepted" in state else set()

    def _alarm(self, step: int, monitor: MonitorConfig, found: str) -> Alarm:
        name, streak = monitor.label, self._streaks[monitor.label]
        text = f"{found} for {streak} {monitor.unit}{'s' * (streak > 1)}"
        if monitor.action != "rollback":
            return Alarm(step, name, monitor.action, text)
        if self._rollbacks[name] >= monitor.max_rollbacks:
            return Alarm(step, name, "stop", f"{text}, after {self._rollbacks[name]} rollbacks")
        return Alarm(step, name, "rollback", text, monitor.learning_rate_factor, monitor.kl_coef_factor)


def plain(alarm: Alarm) -> dict[str, Any]:
    """Return an alarm for JSON."""
    return asdict(alarm)
