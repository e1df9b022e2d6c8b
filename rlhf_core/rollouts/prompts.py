"""Choose the prompts of a run of policy optimization: their order, the sources in use, and the held-out prompts.

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
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.reward_band import RewardBand
from rlhf_core.data.tables import DIFFICULTY, content_id, read_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.rubrics import check_rubrics
from rlhf_core.types import Prompt, Rollout, derive_seed


def split_prompts(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of the used sources into training and held-out ones; ConfigError if a source has none left."""
    used = sources_used(config, prompts, key=key)
    rows, held_out = hold_out(used, config.evaluate)
    for source in {one.source for one in used} - {one.source for one in rows} if any(config.mixtures.values()) else ():
        rule = f"holds out all prompts of the source {source}"
        raise ConfigError(f"{key}.evaluate.prompts", len(held_out), rule, "lower it, or take its share away")
    return rows, held_out


def ordered_prompts(config: PPOConfig, folder: Path, *, key: str) -> list[Prompt]:
    """Order the prompts: unchanged or, by `order`, the highest mean reward first; ConfigError without means."""
    prompts, difficulty = read_prompts(folder), folder / DIFFICULTY
    if config.order != "easy_first":
        return prompts
    if not difficulty.is_file():
        rule = "the prompts come without their difficulty"
        raise ConfigError(f"{key}.order", config.order, rule, 'take those of a select stage with type = "prompts"')
    means = {row["id"]: row["mean"] for row in json.loads(difficulty.read_text(encoding="utf-8"))["prompts"]}
    return sorted(prompts, key=lambda prompt: -means[prompt.id])


def sources_used(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> list[Prompt]:
    """Select the prompts of the sources in the mixture, or all; ConfigError for a source without prompts or term."""
    used = config.sources_used({prompt.source for prompt in prompts}, key=key)
    rows = [prompt for prompt in prompts if prompt.source in used]
    check_rubrics(config.rewards, rows, key=f"{key}.rewards")
    independent = config.evaluate.independent if config.evaluate else None
    check_rubrics(independent, rows, key=f"{key}.evaluate.independent")
    return rows


def hold_out(prompts: Sequence[Prompt], config: HeldOutConfig | None) -> tuple[list[Prompt], list[Prompt]]:
    """Split into training prompts and held-out ones, which share no conversation.

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


def open_band(config: PPOConfig, prompts: Sequence[Prompt], *, seed: int) -> "BandOrder | None":
    """The order of the prompts by their rewards, None for `order` other than "band"."""
    return BandOrder(prompts, config.band, seed=seed, lag=config.staleness) if config.order == "band" else None


@dataclass(frozen=True)
class Answered:
    """A step in which a prompt was drawn, and the last mean of its answers; None if they had none."""

    step: int
    mean: float | None


class BandOrder:
    """The prompts of each step for `order = "band"`; `state` and `restore` are for checkpoints.

    The prompts of a step are sampled up to `lag` steps ahead, and so depend on the rewards of steps before these.

    >>> prompts = [Prompt(name, (), "", "all") for name in "ab"]
    >>> order = BandOrder(prompts, RewardBand(low=0.2, high=0.8, again=0.0), seed=7)
    >>> order.restore({"a": [0, 1.0], "b": [0, 0.5]})
    >>> [one.id for one in order.drawn(1, {"": 1})]
    ['b']
    """

    def __init__(self, prompts: Sequence[Prompt], config: RewardBand, *, seed: int, lag: int = 0) -> None:
        different = {one.id: one for one in prompts}.values()
        self._prompts = sorted(different, key=lambda one: derive_seed(seed, "band", one.id))
        self._config, self._lag = config, lag
        self._noted = -1
        """The last step whose rewards are known."""
        self._answered: dict[str, tuple[Answered, ...]] = {}
        """The steps of each prompt; steps that are sampled ahead read all but the last ones."""
        self._drawn: dict[int, frozenset[str]] = {}
        """Step -> the prompts that it drew, of the last steps."""

    def drawn(self, step: int, counts: Mapping[str, int]) -> list[Prompt]:
        """The prompts of `step`, by the number of each source, or of all for ""."""
        found = [one for source, count in counts.items() for one in self._drawn_of(step, source, count)]
        self.note_drawn(step, found)
        return found

    def note_drawn(self, step: int, prompts: Sequence[Prompt]) -> None:
        """Note the prompts of a step whose answers may not be known when later steps are drawn."""
        self._drawn[step] = frozenset(one.id for one in prompts)

    def _drawn_of(self, step: int, source: str, count: int) -> list[Prompt]:
        """The next `count` prompts: those in the band or not answered yet, and a share of the others.

        In both, prompts that were not drawn for longest come first, and ties follow an order of the seed. Prompts
        repeat only if fewer than `count` exist.
        """
        own = [one for one in self._prompts if source in ("", one.source)]
        known = {one.id: self._known(one.id, step) for one in own}
        flying = {name: at for at in range(step - self._lag, step) for name in self._drawn.get(at, ())}

        def last_drawn(prompt: Prompt) -> int:
            answered = known[prompt.id]
            return flying.get(prompt.id, answered.step if answered else -1)

        def is_open(prompt: Prompt) -> bool:
            answered = known[prompt.id]
            return answered is None or (answered.mean is not None and self._is_inside(answered.mean))

        oldest = sorted(own, key=last_drawn)  # equal ones stay in the order of the seed
        inside = [one for one in oldest if is_open(one)]
        outside = [one for one in oldest if not is_open(one)]
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

        # A later step reads the last answers from before it was sampled, so older ones are not kept.
        for name in {one.id for one in drawn}:
            before = self._answered.get(name, ())
            mean = fmean(values[name]) if name in values else before[-1].mean if before else None
            old = [one for one in before if one.step <= step - self._lag]
            new = [one for one in before if one.step > step - self._lag]
            self._answered[name] = (*old[-1:], *new, Answered(step, mean))
        self._noted = step
        for at in [at for at in self._drawn if at < step - self._lag]:
            del self._drawn[at]

    def metrics(self) -> Metrics:
        """Fractions of all prompts that are in the band, and that were answered."""
        means = [one[-1].mean for one in self._answered.values() if one[-1].mean is not None]
        inside = sum(map(self._is_inside, means))
        return {"band/inside": inside / len(self._prompts), "band/answered": len(means) / len(self._prompts)}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint (JSON)."""
        answered = {
            name: [value for one in steps for value in (one.step, one.mean)]
            for name, steps in sorted(self._answered.items())
        }
        if not self._lag:
            return answered
        drawn = {str(at): sorted(names) for at, names in dict(self._drawn).items() if at <= self._noted}
        return {"answered": answered, "drawn": drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        answered = state["answered"] if self._lag else state
        self._answered = {
            name: tuple(Answered(*one) for one in zip(values[::2], values[1::2], strict=True))
            for name, values in answered.items()
        }
        if self._lag:  # after a rollback, the steps that were drawn since stay
            self._drawn = {int(at): frozenset(names) for at, names in state["drawn"].items()} | self._drawn

    def _known(self, name: str, step: int) -> Answered | None:
        """The last answers to a prompt that are known when `step` is sampled."""
        return next((one for one in reversed(self._answered.get(name, ())) if one.step < step - self._lag), None)

    def _is_inside(self, mean: float) -> bool:
        return self._config.low <= mean <= self._config.high
