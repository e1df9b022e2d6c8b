"""Score generations: every term, then composition and shaping, to rollouts.

Combine several rewards of one generation to a single number.

A term that does not apply to a generation has None there. It adds nothing to a sum, and as a gate it is open.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from rlhf_core.config.rewards import (
    Composition,
    GatedProduct,
    Gdpo,
    RewardsConfig,
    Term,
    WeightedSum,
    what_moves_rewards,
)
from rlhf_core.errors import RewardError, explain
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.batches import BatchedReward, Logs, Reward, RewardOutcome, joined, merged_logs, screened
from rlhf_core.rewards.model import check_reward_models
from rlhf_core.rewards.shaping import RunningNormalizer, clipped, linear_weight, soft_overlong, truncated_reward
from rlhf_core.rewards.terms import open_terms
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.failures import ONE_AGENT, Counts, failed_episodes
from rlhf_core.types import Generation, ModelRef, Rollout

# ---------------------------------------------------------------- Combine several rewards of one generation to a single number

Components = Mapping[str, Sequence[float | None]]
"""Reward name -> one value per generation, None where it does not apply."""


def compose(
    components: Components, composition: Composition, weights: Mapping[str, float], groups: Sequence[str]
) -> list[float | None]:
    """Combine the components of each generation into one reward; None if no term of `weights` applies.

    `groups` names the prompt of each generation: generations with the same name form one group.
    """
    match composition:
        case WeightedSum():
            return weighted_sum(components, weights)
        case GatedProduct(gates=gates, closed=closed):
            return gated_product(components, weights, gates=gates, closed=closed)
        case Gdpo():
            return weighted_sum({name: in_group(values, groups) for name, values in components.items()}, weights)


def weighted_sum(components: Components, weights: Mapping[str, float]) -> list[float | None]:
    """Sum of weight * value over the terms of `weights` that apply, per generation; None if none does.

    >>> weighted_sum({"a": [1.0, None], "b": [0.5, None]}, {"a": 1.0, "b": 2.0})
    [2.0, None]
    """
    rows = zip(*(components[name] for name in weights), strict=True)
    return [_weighed(list(weights.values()), row) for row in rows]


def gated_product(
    components: Components, weights: Mapping[str, float], *, gates: Sequence[str], closed: float
) -> list[float | None]:
    """Compute g * (weighted sum of the other terms) + (1 - g) * closed, with g the product of the gates.

    A bare product would pay for failing the gate wherever the sum is negative; hence `closed`. Behind a gate that is
    shut the other terms need not apply. RewardError when a gate is outside [0, 1].

    >>> gated_product({"form": [1.0, 0.0], "x": [-2.0, 5.0]}, {"x": 1.0}, gates=["form"], closed=-3.0)
    [-2.0, -3.0]
    """
    for name in gates:
        for value in components[name]:
            if value is not None and not 0 <= value <= 1:
                raise RewardError(f"rewards.{name}", value, "a gate must be in [0, 1]", "remove it from gates")
    sums = weighted_sum(components, {name: weight for name, weight in weights.items() if name not in gates})
    opened = [
        math.prod(value for value in row if value is not None)
        for row in zip(*(components[name] for name in gates), strict=True)
    ]
    return [_gated(gate, total, closed) for gate, total in zip(opened, sums, strict=True)]


def in_group(values: Sequence[float | None], groups: Sequence[str]) -> list[float | None]:
    """Normalize (value - mean) / std within each group, 0 where its values are equal: GDPO, arXiv 2601.05242.

    The standard deviation is the sample's (divisor G - 1), as in `rlhf_core.algorithms.advantage.group`.

    >>> in_group([1.0, 3.0, 5.0, None], ["p", "p", "q", "p"])
    [-0.7071067811865475, 0.7071067811865475, 0.0, None]
    """
    members: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            members.setdefault(group, []).append(value)
    scale = {group: _mean_and_std(found) for group, found in members.items()}
    return [
        None if value is None else _standardized(value, *scale[group])
        for value, group in zip(values, groups, strict=True)
    ]


def _weighed(weights: Sequence[float], row: Sequence[float | None]) -> float | None:
    parts = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
    return math.fsum(parts) if parts else None


def _gated(gate: float, total: float | None, closed: float) -> float | None:
    if total is None:
        return closed if gate == 0 else None
    return gate * total + (1 - gate) * closed  # g R + (1 - g) c


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    if min(values) == max(values):  # exactly 0, and not rounding noise divided by noise
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _standardized(value: float, mean: float, std: float) -> float:
    return (value - mean) / std if std else 0.0  # (r_i - mean(r)) / std(r) within the group


# ---------------------------------------------------------------- Score generations: every term, then composition and shaping, to rollouts

logger = logging.getLogger(__name__)

NO_REWARD = "no reward applies"
REWARD = ""
"""Key of the composed reward's normalizer, among the terms' names."""
_NOT_IN_A_NAME = re.compile(r"[^\w\-. ]")


class Scorer:
    """Scores generations with opened terms.

    Holds the step, for weights that change, the running normalizers, and the logs and failures of the rewards in the
    step; `state` and `restore` are for checkpoints.
    """

    def __init__(
        self,
        config: RewardsConfig,
        rewards: Mapping[str, Reward],
        agents: Mapping[str, str] = ONE_AGENT,
    ) -> None:
        """`agents` are the keys of the agents that play the prompts of each source (`AgentsBySource.agent_keys`)."""
        self._config = config
        self._rewards = rewards
        self._agents = agents
        running = (name for name, spec in config.terms.items() if spec.normalize == "running")
        self._normalizers = dict.fromkeys((REWARD, *running), RunningNormalizer.empty())
        self._constant: set[str] = set()
        self.at_step(0)

    def at_step(self, step: int) -> None:
        """Weigh the terms as at `step` of policy optimization, and begin its logs."""
        self._step = step
        self._logs: dict[str, tuple[float, int]] = {}
        self._failed: dict[str, tuple[int, int]] = {}
        self._ranges: dict[str, tuple[float, float, int]] = {}

    def __call__(self, generations: Sequence[Generation]) -> list[Rollout]:
        """Score the generations: one rollout each, in order. RewardError names the reward and the prompt.

        A generation that failed is not shown to any reward. It is invalid, and so is one for which a term that counts
        failed, or to which none applies: its reward is NaN and `invalid` is the reason.
        """
        shown = [one for one in generations if not one.completion.failure]
        outcomes = self._outcomes(shown)
        self._note(outcomes, failed_episodes(generations, self._agents))
        weights = self._weights()
        composed = self._composed(outcomes, weights, [one.prompt.id for one in shown])
        reasons = [self._reason(at, outcomes, weights, composed[at]) for at in range(len(shown))]
        valid = [None if why else reward for reward, why in zip(composed, reasons, strict=True)]
        rewards = self._scaled(valid, self._config)
        scores = self._scores(outcomes, weights) or (None,) * len(shown)
        rollouts = iter(
            [
                _rollout(one, rewards[at], _components(outcomes, at), reasons[at], scores[at])
                for at, one in enumerate(shown)
            ]
        )
        return [
            _rollout(one, None, {}, failure)
            if (failure := one.completion.failure)
            else self._with_penalty(next(rollouts))
            for one in generations
        ]

    def comparable(self) -> Scorer:
        """A scorer with the same rewards and no normalization, so that scores of different steps can be compared.

        Clipping bounds apply to normalized values and are dropped, too. Running statistics, logs and counts stay unchanged.
        """
        as_given = {"normalize": "none", "clip": 0.0}
        terms = {
            name: spec if spec.normalize == "none" else spec.model_copy(update=as_given)
            for name, spec in self._config.terms.items()
        }
        composition = WeightedSum() if isinstance(self._config.composition, Gdpo) else self._config.composition
        clip = 0.0 if what_moves_rewards(self._config) else self._config.clip
        plain = {"terms": terms, "composition": composition, "normalize": "none", "clip": clip}
        return Scorer(self._config.model_copy(update=plain), self._rewards, self._agents)

    def logs(self) -> Metrics:
        """The logs of the rewards in this step: means, and for terms that may fail the fraction that did.

        `reward_constant/<term>` is 1 if all answers of the step got one value from the term, and 0 otherwise. A term that
        becomes constant is a warning in the log: nothing can be learned from it.
        """
        constant = {name: low == high for name, (low, high, count) in self._ranges.items() if count > 1}
        for name in (name for name, same in constant.items() if same and name not in self._constant):
            low, _, count = self._ranges[name]
            rule = f"is what each of the {count} answers of this step got, so nothing can be learned from this term"
            remedy = "check what its function reads (docs/score.md) and whether the policy can earn it"
            logger.warning(explain(f"rewards.terms.{name}", low, rule, remedy))
        self._constant = {name for name in self._constant | set(constant) if constant.get(name, True)}
        means = {name: total / count for name, (total, count) in self._logs.items() if count}
        return means | {_metric("reward_constant", name): float(same) for name, same in constant.items()}

    def failed(self) -> Counts:
        """The number of failed answers in this step, and of all: episodes by agent, and each `rewards.terms.<name>`."""
        return self._failed

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint (JSON)."""
        terms = {name: asdict(normalizer) for name, normalizer in self._normalizers.items()}
        kept = {"normaliser": terms.pop(REWARD), "terms": terms, "logs": self._logs, "failed": self._failed}
        return kept | {"ranges": self._ranges}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; a state of an earlier version lacks failures and values."""
        normalizers = {REWARD: state["normaliser"], **state["terms"]}
        self._normalizers = {name: RunningNormalizer(**kept) for name, kept in normalizers.items()}
        self._logs = {name: (total, count) for name, (total, count) in state["logs"].items()}
        self._failed = {path: (failed, of) for path, (failed, of) in state.get("failed", {}).items()}
        self._ranges = {name: (low, high, count) for name, (low, high, count) in state.get("ranges", {}).items()}

    def _outcomes(self, generations: Sequence[Generation]) -> dict[str, RewardOutcome]:
        """Call each reward. Rewards in other processes run concurrently, and at the same time as the models here."""

        def outcome(name: str) -> RewardOutcome:
            sources = self._config.terms[name].sources
            places = [at for at, one in enumerate(generations) if not sources or one.prompt.source in sources]
            shown = [generations[at] for at in places]
            found = self._rewards[name](shown) if shown else RewardOutcome(())
            return spread(screened(name, found, shown, on_failure="fail"), places, len(generations))

        elsewhere = [name for name, reward in self._rewards.items() if isinstance(reward, BatchedReward)]
        with ThreadPoolExecutor(len(elsewhere) or 1, thread_name_prefix="reward") as pool:
            waiting = {name: pool.submit(outcome, name) for name in elsewhere}
            here = {name: outcome(name) for name in self._rewards if name not in elsewhere}
            return {name: here[name] if name in here else waiting[name].result() for name in self._rewards}

    def _scores(self, outcomes: Mapping[str, RewardOutcome], weights: Mapping[str, float]) -> Sequence[float | None]:
        """The `scores` of the only term with a weight, returned next to its rewards; empty for several terms."""
        only = next(iter(weights)) if len(weights) == 1 else None
        return outcomes[only].scores if only else ()

    def _weights(self) -> dict[str, float]:
        """The weights of the terms that count; one whose schedule is at 0 now still applies."""
        counting = {name: spec for name, spec in self._config.terms.items() if spec.weight or spec.weight_end}
        return {name: _weight_at(spec, self._step) for name, spec in counting.items()}

    def _composed(
        self, outcomes: Mapping[str, RewardOutcome], weights: Mapping[str, float], groups: Sequence[str]
    ) -> list[float | None]:
        if not self._config.terms:  # of a policy that learns from teachers alone
            return [0.0] * len(groups)
        scaled = {}
        for name, spec in self._config.terms.items():
            values = outcomes[name].values
            scaled[name] = self._scaled(in_group(values, groups) if spec.normalize == "group" else values, spec, name)
        return compose(scaled, self._config.composition, weights, groups)

    def _scaled(
        self, values: Sequence[float | None], config: Term | RewardsConfig, name: str = REWARD
    ) -> list[float | None]:
        """Normalize the values of a term, or of the reward, by the running statistics, and clip them."""
        present = [value for value in values if value is not None]
        if config.normalize == "running":
            self._normalizers[name] = self._normalizers[name].updated(present)
            present = self._normalizers[name].normalized(present)
        each = iter(clipped(present, limit=config.clip) if config.clip else present)
        return [None if value is None else next(each) for value in values]

    def _reason(
        self, at: int, outcomes: Mapping[str, RewardOutcome], weights: Mapping[str, float], reward: float | None
    ) -> str:
        """The reason why a generation has no reward, "" if it has one. A term without a weight may fail."""
        composition = self._config.composition
        gates = composition.gates if isinstance(composition, GatedProduct) else ()
        for name, outcome in outcomes.items():
            if at in outcome.failures and (weights.get(name) or name in gates):
                return f"{name}: {outcome.failures[at]}"
        return NO_REWARD if reward is None else ""

    def _with_penalty(self, rollout: Rollout) -> Rollout:
        rollout = self._if_truncated(rollout)
        if (overlong := self._config.overlong) is None:
            return rollout
        penalty = soft_overlong(
            rollout.completion.action_mask.count(1),  # without an environment's tokens
            max_tokens=overlong.max_tokens,
            buffer_tokens=overlong.buffer_tokens,
            factor=overlong.factor,
        )
        components = rollout.reward_components | {"overlong": penalty}
        return replace(rollout, reward=rollout.reward + penalty, reward_components=components)

    def _if_truncated(self, rollout: Rollout) -> Rollout:
        treated = self._config.truncated
        if treated is None:
            return rollout
        reward = rollout.reward
        if rollout.completion.finish_reason == "length" and not rollout.invalid:
            reward = truncated_reward(reward, kind=treated.type, amount=treated.amount)
        components = rollout.reward_components | {"truncated": 0.0 if rollout.invalid else reward - rollout.reward}
        return replace(rollout, reward=reward, reward_components=components)

    def _note(self, outcomes: Mapping[str, RewardOutcome], episodes: Counts) -> None:
        """Add to the logs, ranges and failures of the step."""
        found: list[Logs] = [self._logs]
        counted = dict(episodes)
        for name, outcome in outcomes.items():
            values = [value for value in outcome.values if value is not None]
            if values:
                low, high, count = self._ranges.get(name, (math.inf, -math.inf, 0))
                self._ranges[name] = (min(low, *values), max(high, *values), count + len(values))
            found.append({_metric("reward_extra", name, key): value for key, value in outcome.logs.items()})
            failed = counted[f"rewards.terms.{name}"] = (len(outcome.failures), outcome.of)
            if getattr(self._rewards[name], "on_failure", "fail") == "invalid":
                found.append({_metric("reward_failed", name): failed})
        self._logs = merged_logs(found)
        for path, (failures, of) in counted.items():
            before, seen = self._failed.get(path, (0, 0))
            self._failed[path] = (before + failures, seen + of)


def spread(outcome: RewardOutcome, places: Sequence[int], count: int) -> RewardOutcome:
    """Extend the outcome of a reward that was shown only the generations at `places` to all `count` generations.

    >>> spread(RewardOutcome((1.0, None), failures={1: "late"}), [0, 2], 3)
    RewardOutcome(values=(1.0, None, None), failures={2: 'late'}, logs={}, scores=(), asked=2)
    """
    if len(places) == count:
        return outcome
    rows = {at: outcome.row(shown) for shown, at in enumerate(places)}
    whole = joined([rows.get(at, RewardOutcome((None,))) for at in range(count)])
    return replace(whole, logs=outcome.logs, asked=len(places))


@contextmanager
def open_scorer(
    config: RewardsConfig,
    reward_models: Mapping[str, ModelRef],
    context: StageContext,
    agents: Mapping[str, str] = ONE_AGENT,
) -> Iterator[Scorer]:
    """Yield a scorer whose reward models are leased, and verified against their contracts, and whose functions run.

    ConfigError when a term names a reward model that the stage was not given or a function that does not exist;
    ArtifactError when a reward model does not score its probes as it did after training.
    """
    check_reward_models(config, reward_models)
    with ExitStack() as leases:
        yield Scorer(config, open_terms(config, reward_models, context, leases), agents)


def component_means(rollouts: Sequence[Rollout]) -> Metrics:
    """Mean of each component over the valid rollouts that it applies to, as `reward_component/name`."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in (one for one in rollouts if not one.invalid):
        for name, value in rollout.reward_components.items():
            found[name].append(value)
    return {f"reward_component/{name}": fmean(values) for name, values in found.items()}


def _rollout(
    one: Generation, reward: float | None, components: dict[str, float], invalid: str, score: float | None = None
) -> Rollout:
    given = math.nan if reward is None else reward
    return Rollout(one.prompt, one.prompt_ids, one.completion, given, components, invalid, score)


def _components(outcomes: Mapping[str, RewardOutcome], at: int) -> dict[str, float]:
    values = {name: outcome.values[at] for name, outcome in outcomes.items()}
    return {name: value for name, value in values.items() if value is not None}


def _weight_at(spec: Term, step: int) -> float:
    if spec.weight_end is None:
        return spec.weight
    return linear_weight(step, start=spec.weight, end=spec.weight_end, steps=spec.weight_steps)


def _metric(*parts: str) -> str:
    """A valid name for a metric, because functions may log under any name."""
    return "/".join(_NOT_IN_A_NAME.sub("_", part) for part in parts)
