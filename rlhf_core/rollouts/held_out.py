"""Evaluate the policy on held-out prompts while it is optimized.

Held-out prompts are answered with the same seeds at every evaluation, so that two evaluations differ by the policy alone.
They are scored with the rewards that train (not normalized, with their final weights) and, if there are any, with independent
rewards that do not train.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from rlhf_core.agents.episodes import Episode
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import Metrics, Sampler, Weights
from rlhf_core.rewards.scoring import Scorer, component_means
from rlhf_core.rollouts.answers import OpenEnvironments, StepSampler, answers
from rlhf_core.stage.failures import Counts
from rlhf_core.types import Generation, Prompt, Rollout, chunks, derive_seed


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation, and the scores of each prompt by the name of their mean: NaN if a prompt has none."""

    metrics: Metrics
    samples: Mapping[str, tuple[float, ...]]


NO_EVALUATION = Evaluation({}, {})


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out prompts with the engines that answer and score them; `evaluations` is the state for checkpoints."""

    config: HeldOutConfig
    prompts: Sequence[Prompt]
    engine: Sampler
    chat: ChatTemplate
    sampling: SamplingConfig
    seed: int
    environments: OpenEnvironments
    scorers: Mapping[str, Scorer]
    """The rewards that train as "reward", and maybe others as "independent"."""
    note_failed: Callable[[int, Counts], None]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """The step and the metrics of each evaluation."""

    def is_due(self, step: int, *, last: bool) -> bool:
        """True every few steps and after the `last` one."""
        return last or step % self.config.every == 0

    def evaluate(self, step: int, sampler: StepSampler, weights: Callable[[], Weights]) -> Evaluation:
        """Answer and score the held-out prompts with the policy's `weights`."""
        evaluation = self.score(step, sampler.borrow(weights, version=step, job=self.sample))
        self.evaluations.append({"step": step} | evaluation.metrics)
        return evaluation

    def sample(self) -> list[Generation]:
        """Sample answers with the policy that the engine holds; answers to a prompt stay together."""
        drawn = answers(self.engine, self.chat, self._work, self.sampling, self.environments)
        return [Generation(one.prompt, ids, made) for one, (ids, made) in zip(self._work, drawn, strict=True)]

    def score(self, step: int, generations: Sequence[Generation]) -> Evaluation:
        """The figures of the answers: `eval/reward/*`, `eval/independent/*`, length, truncation, diversity."""
        made = [one.completion for one in generations]
        metrics = {
            "eval/length": fmean(completion.action_mask.count(1) for completion in made),
            "eval/truncated": fmean(completion.finish_reason == "length" for completion in made),
            "eval/unique": len({completion.text for completion in made}) / len(made),
        }
        samples: dict[str, tuple[float, ...]] = {}
        failed: dict[str, tuple[int, int]] = {}
        for name, scorer in self.scorers.items():
            scorer.at_step(2**31)  # with the final weights of the terms, so that two evaluations can be compared
            rollouts = scorer(generations)
            groups = chunks(rollouts, self.config.samples)
            samples[f"eval/{name}/mean"] = values = tuple(map(_mean_reward, groups))
            scored = [value for value in values if not math.isnan(value)]
            metrics[f"eval/{name}/mean"] = fmean(scored) if scored else math.nan
            metrics[f"eval/{name}/stderr"] = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
            for key, mean in component_means(rollouts).items():
                metrics[f"eval/{name}_component/{key.removeprefix('reward_component/')}"] = mean
            failed |= _failures(name, scorer.failed())
        self.note_failed(-1 - step, failed)  # a separate number: the training of the step has counts, too
        return Evaluation(metrics, samples)

    @cached_property
    def _work(self) -> list[Episode]:
        templates = self.environments.templates(self.chat)
        return [
            Episode(one, templates(one).prompt_ids(one.messages), derive_seed(self.seed, "held-out", one.id, number))
            for one in self.prompts
            for number in range(self.config.samples)
        ]


def _mean_reward(group: Sequence[Rollout]) -> float:
    """The mean reward of the valid answers to a prompt, NaN if there is none."""
    rewards = [one.reward for one in group if not one.invalid]
    return fmean(rewards) if rewards else math.nan


def _failures(name: str, failed: Counts) -> dict[str, tuple[int, int]]:
    """The failures by path in the configuration, where independent rewards are not below `rewards`.

    Both scorers see the same episodes, so failed episodes are counted once.
    """
    if name == "reward":
        return dict(failed)
    terms = {path: count for path, count in failed.items() if path.startswith("rewards.")}
    return {f"evaluate.independent.{path.removeprefix('rewards.')}": count for path, count in terms.items()}
