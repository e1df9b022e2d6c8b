"""Keep the best checkpoint of a run of policy optimization, end a run that finds no better one, and export the result."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics, Trainer
from rlhf_core.stage.checkpoints import Checkpoints

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The best value so far, its step (-1 before the first), and the number of evaluations since.

    >>> Best().after(0, 1.5).after(10, 2.0).after(20, 1.9)
    Best(value=2.0, step=10, since=1)
    """

    value: float = -math.inf
    step: int = -1
    since: int = 0

    def after(self, step: int, value: float) -> Self:
        """The best after another evaluation; NaN is never better."""
        if value > self.value:
            return replace(self, value=value, step=step, since=0)
        return replace(self, since=self.since + 1)


class BestCheckpoint:
    """The best checkpoint by `config`; without it, only the newest checkpoint is kept and exported."""

    def __init__(self, config: HeldOutConfig | None, checkpoints: Checkpoints, label: str) -> None:
        self._label = label
        self._config = config
        self._best = Best()
        self.checkpoints = checkpoints.keeping(best=1) if config else checkpoints
        self.ended: dict[str, Any] = {}
        """The step at which the run ends early, the reason, and which checkpoint to export; {} if it does not."""

    def judge(self, step: int, metrics: Metrics, *, quiet: bool) -> float | None:
        """Note an evaluation; its value if it is the best so far, else None. If not `quiet`, a monitor objects to it."""
        if self._config is None or not metrics:
            return None
        name = self._config.best_by
        if name not in metrics:
            rule = f"evaluations have no such metric, but {', '.join(sorted(metrics))}"
            raise ConfigError("ppo.evaluate.metric", name, rule, "choose one of these")
        self._best = self._best.after(step, metrics[name] if quiet else math.nan)
        return self._best.value if self._best.step == step else None

    def end_without_better(self, step: int) -> None:
        """End the run if its `patience` is used up."""
        if self._config and 0 < self._config.patience <= self._best.since:
            better = f"no better {self._config.best_by} since step {self._best.step}"
            self.end(step, better, export=self._config.export)

    def end(self, step: int, why: str, *, export: str = "best") -> None:
        """End the run after this step."""
        self.ended = {"step": step, "why": why, "export": export}
        logger.warning("%s: ends at step %d: %s", self._label, step, why)

    def note_rollback(self) -> None:
        """Restart the count of evaluations without improvement."""
        self._best = replace(self._best, since=0)

    def export(self, policy: Trainer, folder: Path, *, step: int) -> int:
        """Export the best weights, or the last ones as configured. `step` is the last step; returns the exported one."""
        which = self.ended["export"] if self.ended else self._config.export if self._config else "last"
        chosen = self.checkpoints.best() if which == "best" else None
        if chosen is not None:
            policy.load(chosen.path / "policy")
        policy.export(folder)
        return chosen.step if chosen else step

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint (JSON)."""
        value = self._best.value if self._best.step >= 0 else None
        return {"best": asdict(self._best) | {"value": value}, "ended": self.ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        best = state["best"]
        self._best = Best(**best) if best["step"] >= 0 else Best(since=best["since"])
        self.ended = dict(state["ended"])
