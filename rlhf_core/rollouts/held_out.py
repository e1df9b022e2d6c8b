"""Evaluate the policy on prompts that are held out of the training prompts, while it is optimized.

The same prompts, with the same seeds, at every evaluation: two evaluations differ by the policy alone. They are scored
with the rewards that train (not normalized, with their final weights) and, if there are some, with rewards that do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rlhf_core.agents.episodes import Episode
from rlhf_core.agents.process import Environments
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import content_id
from rlhf_core.errors import ConfigError, explain
from rlhf_core.interfaces import Metrics, Sampler
from rlhf_core.rewards.scoring import Scorer, component_means
from rlhf_core.rollouts.answers import answers
from rlhf_core.store.failures import Counts
from rlhf_core.types import Generation, Prompt, Rollout, derive_seed


@dataclass(frozen=True)
class Measured:
    """The metrics of an evaluation, and by the name of a mean the scores of each prompt, NaN where there is none."""

    metrics: Metrics
    samples: dict[str, tuple[float, ...]]


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
        raise ConfigError(explain("ppo.evaluate.prompts", config.prompts, rule, "lower it, or provide more prompts"))
    chosen = sorted(by_content, key=lambda content: (derive_seed("held-out", content), content))[: config.prompts]
    held_out = set(chosen)
    return [one for one in prompts if content_id(one.messages) not in held_out], [by_content[one] for one in chosen]


class HeldOut:
    """The held-out prompts with the engines that answer and score them; `measure` is called by who has the sampler."""

    def __init__(
        self,
        config: HeldOutConfig,
        prompts: Sequence[Prompt],
        *,
        engine: Sampler,
        chat: ChatTemplate,
        sampling: SamplingConfig,
        seed: int,
        environments: Environments | None,
        scorer: Scorer,
        independent: Scorer | None,
        note_failed: Callable[[int, Counts], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat if environments is None else chat.with_tools(environments.tools)
        self._sampling = sampling
        self._environments = environments
        self._scorer = scorer
        self._independent = independent
        self._note_failed = note_failed
        self._work = [
            Episode(prompt, self._chat.prompt_ids(prompt.messages), derive_seed(seed, "held-out", prompt.id, number))
            for prompt in prompts
            for number in range(config.samples)
        ]

    def sample(self) -> list[Generation]:
        """Return the answers of the policy that the engine holds, those to a prompt together."""
        drawn = answers(self._engine, self._chat, self._work, self._sampling, self._environments)
        return [Generation(one.prompt, ids, made) for one, (ids, made) in zip(self._work, drawn, strict=True)]

    def score(self, step: int, generations: Sequence[Generation]) -> Measured:
        """Return the figures of the answers: `eval/reward/*`, `eval/independent/*`, length, truncation, diversity."""
        made = [one.completion for one in generations]
        metrics = {
            "eval/length": fmean(sum(completion.action_mask) for completion in made),
            "eval/truncated": fmean(completion.finish_reason == "length" for completion in made),
            "eval/unique": len({completion.text for completion in made}) / len(made),
        }
        samples = {}
        failed: dict[str, tuple[int, int]] = {}
        scorers = {"reward": self._scorer} | ({"independent": self._independent} if self._independent else {})
        for name, scorer in scorers.items():
            scorer.at_step(2**31)  # with the final weights of the terms, so that two evaluations can be compared
            rollouts = scorer(generations)
            values = self._by_prompt(rollouts)
            samples[f"eval/{name}/mean"] = values
            metrics |= _summary(f"eval/{name}", values)
            metrics |= _components(name, component_means(rollouts))
            failed |= _counts(name, scorer.failed())
        self._note_failed(-1 - step, failed)  # a number of its own: the training of the step has counts, too
        return Measured(metrics, samples)

    def _by_prompt(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        size = self._config.samples
        groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        return tuple(_mean([one.reward for one in group if not one.invalid]) for group in groups)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _summary(name: str, values: Sequence[float]) -> Metrics:
    """Return the mean over the prompts that have a score and its standard error; NaN if none has."""
    scored = [value for value in values if not math.isnan(value)]
    error = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
    return {f"{name}/mean": _mean(scored), f"{name}/stderr": error}


def _components(name: str, means: Metrics) -> Metrics:
    """Return the means of terms; rewards that train and independent ones may have terms of one name."""
    return {f"eval/{name}_component/{key.removeprefix('reward_component/')}": mean for key, mean in means.items()}


def _counts(name: str, failed: Counts) -> dict[str, tuple[int, int]]:
    """Return what failed by its path in the configuration; independent rewards are not below `rewards`.

    Both score the same episodes, so those that failed are counted once.
    """
    if name == "reward":
        return dict(failed)
    terms = {path: count for path, count in failed.items() if path != "agent"}
    return {f"evaluate.independent.{path.removeprefix('rewards.')}": count for path, count in terms.items()}
