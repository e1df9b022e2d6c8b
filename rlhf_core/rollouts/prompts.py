"""Choose the prompts of a run of policy optimization: their order, the sources in use, and those that are held out.

With `order = "band"` the prompts of a step follow from the rewards of the steps before: a pure function of these and the seed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.policy import PPOConfig, RewardBand
from rlhf_core.data.tables import DIFFICULTY, content_id, read_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.rubrics import check_rubrics
from rlhf_core.types import Prompt, Rollout, derive_seed


def split_prompts(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts of the sources in use, and the held-out ones; ConfigError if a source has none left."""
    used = sources_used(config, prompts, key=key)
    rows, held_out = hold_out(used, config.evaluate)
    for source in {one.source for one in used} - {one.source for one in rows} if config.mixture else ():
        rule = f"holds out all prompts of the source {source}"
        raise ConfigError(f"{key}.evaluate.prompts", len(held_out), rule, "lower it, or take its share away")
    return rows, held_out


def ordered_prompts(config: PPOConfig, folder: Path, *, key: str) -> list[Prompt]:
    """Return the prompts as they are or, by `order`, those with the highest mean reward first; ConfigError without means."""
    prompts, difficulty = read_prompts(folder), folder / DIFFICULTY
    if config.order != "easy_first":
        return prompts
    if not difficulty.is_file():
        rule = "the prompts come without their difficulty"
        raise ConfigError(f"{key}.order", config.order, rule, 'take those of a select stage with type = "prompts"')
    means = {row["id"]: row["mean"] for row in json.loads(difficulty.read_text(encoding="utf-8"))["prompts"]}
    return sorted(prompts, key=lambda prompt: -means[prompt.id])


def sources_used(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> list[Prompt]:
    """Return the prompts of the sources in the mixture, or all; ConfigError for a source that there is not, or without a term."""
    used = config.sources_used({prompt.source for prompt in prompts}, key=key)
    rows = [prompt for prompt in prompts if prompt.source in used]
    check_rubrics(config.rewards, rows, key=f"{key}.rewards")
    independent = config.evaluate.independent if config.evaluate else None
    check_rubrics(independent, rows, key=f"{key}.evaluate.independent")
    return rows


def hold_out(prompts: Sequence[Prompt], config: HeldOutConfig | None) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out ones, which share no conversation.

    The choice depends on the contents alone: not on their order, their ids or the seed of the run. Raises ConfigError if
    no training prompt would be left.
    """
    if config is None:
        return list(prompts), []
    by_content: dict[str, Prompt] = {}
    for prompt in prompts:
        by_content.setdefault(content_id(prompt.messages), prompt)
    if config.prompts >= len(by_content):
        rule = f"there are {len(by_content)} different prompts, and some must be left to train on"
        raise ConfigError("ppo.evaluate.prompts", config.prompts, rule, "lower it, or provide more prompts")
    chosen = sorted(by_content, key=lambda content: (derive_seed("held-out", content), content))[: config.prompts]
    held_out = set(chosen)
    return [one for one in prompts if content_id(one.messages) not in held_out], [by_content[one] for one in chosen]


@dataclass(frozen=True)
class Answered:
    """The last step in which a prompt was drawn, and the last mean of its answers; None if they had none."""

    step: int
    mean: float | None


class BandOrder:
    """The prompts of each step for `order = "band"`; `state` and `restore` are for checkpoints.

    >>> prompts = [Prompt(name, (), "", "all") for name in "ab"]
    >>> order = BandOrder(prompts, RewardBand(low=0.2, high=0.8, again=0.0), seed=7)
    >>> order.restore({"a": [0, 1.0], "b": [0, 0.5]})
    >>> [one.id for one in order.drawn(1)]
    ['b']
    """

    def __init__(self, prompts: Sequence[Prompt], config: RewardBand, *, seed: int) -> None:
        different = {one.id: one for one in prompts}.values()
        self._prompts = sorted(different, key=lambda one: derive_seed(seed, "band", one.id))
        self._config = config
        self._answered: dict[str, Answered] = {}

    def drawn(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts: those in the band or not answered yet, and a share of the others.

        In both, those that were not drawn for longest come first, and equal ones in an order of the seed. There are
        repeated ones only if there are fewer than `count` prompts.
        """
        oldest = sorted(self._prompts, key=self._last_drawn)  # equal ones stay in the order of the seed
        inside = [one for one in oldest if self._is_open(one)]
        outside = [one for one in oldest if not self._is_open(one)]
        again = min(math.ceil(self._config.again * count), len(outside))
        chosen = [*inside[: count - again], *outside][:count]
        chosen += inside[count - again :][: count - len(chosen)]
        return [chosen[at % len(chosen)] for at in range(count)]

    def after(self, step: int, drawn: Sequence[Prompt], rollouts: Sequence[Rollout]) -> None:
        """Note the prompts that a step drew, and the means of their valid answers."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for one in rollouts:
            value = one.reward_components.get(self._config.term) if self._config.term else one.reward
            if value is not None and not one.invalid:
                values[one.prompt.id].append(value)
        for name in {one.id for one in drawn}:
            before = self._answered[name].mean if name in self._answered else None
            self._answered[name] = Answered(step, fmean(values[name]) if name in values else before)

    def metrics(self) -> Metrics:
        """Return the shares of all prompts that are in the band, and that were answered."""
        means = [one.mean for one in self._answered.values() if one.mean is not None]
        inside = sum(map(self._is_inside, means))
        return {"band/inside": inside / len(self._prompts), "band/answered": len(means) / len(self._prompts)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        return {name: [one.step, one.mean] for name, one in sorted(self._answered.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._answered = {name: Answered(step, mean) for name, (step, mean) in state.items()}

    def _is_open(self, prompt: Prompt) -> bool:
        """Return whether a prompt is in the band, or not answered yet."""
        found = self._answered.get(prompt.id)
        return found is None or (found.mean is not None and self._is_inside(found.mean))

    def _is_inside(self, mean: float) -> bool:
        return self._config.low <= mean <= self._config.high

    def _last_drawn(self, prompt: Prompt) -> int:
        return self._answered[prompt.id].step if prompt.id in self._answered else -1
