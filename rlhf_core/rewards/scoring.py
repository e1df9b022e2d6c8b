"""From generations to rollouts: every term, then composition and shaping."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rlhf_core.config.rewards import (
    EnsembleReward,
    FunctionReward,
    OverlongPenalty,
    ProcessRewardModelReward,
    RewardModelReward,
    RewardsConfig,
    RewardSpec,
)
from rlhf_core.errors import ConfigError, explain
from rlhf_core.interfaces import ModelSpec, RewardFunction
from rlhf_core.rewards.composition import compose
from rlhf_core.rewards.functions import score_functions
from rlhf_core.rewards.isolation import IsolatedReward
from rlhf_core.rewards.model import Contract, score_with_reward_model, verify_contract
from rlhf_core.rewards.shaping import RunningNormaliser, clipped, soft_overlong
from rlhf_core.stage import StageContext
from rlhf_core.types import Generation, ProcessRewardModelRef, RewardModelRef, Rollout


class Scorer:
    """Scores generations with opened terms. Holds the running normaliser: `state` and `restore` are for checkpoints."""

    def __init__(self, config: RewardsConfig, rewards: Mapping[str, RewardFunction]) -> None:
        self._config = config
        self._rewards = rewards
        self._normaliser = RunningNormaliser.empty()

    def __call__(self, generations: Sequence[Generation]) -> list[Rollout]:
        """Return one rollout per generation, in order; RewardError names the reward and the prompt."""
        components = score_functions(self._rewards, generations)
        rewards = self._shaped(compose(components, self._config))
        if self._config.overlong is not None:
            penalties = overlong_penalties(generations, self._config.overlong)
            rewards = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            components["overlong"] = penalties
        return [
            Rollout(
                prompt=generation.prompt,
                prompt_ids=generation.prompt_ids,
                completion=generation.completion,
                reward=rewards[index],
                reward_components={name: values[index] for name, values in components.items()},
            )
            for index, generation in enumerate(generations)
        ]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON)."""
        return asdict(self._normaliser)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._normaliser = RunningNormaliser(**state)

    def _shaped(self, rewards: list[float]) -> list[float]:
        if self._config.normalise == "running":
            self._normaliser = self._normaliser.updated(rewards)
            rewards = self._normaliser.normalised(rewards)
        return clipped(rewards, limit=self._config.clip) if self._config.clip else rewards


@contextmanager
def open_scorer(
    config: RewardsConfig, reward_models: Mapping[str, RewardModelRef], context: StageContext
) -> Iterator[Scorer]:
    """Yield a scorer whose reward models are leased, and verified against their contracts, and whose functions run.

    ConfigError when a term names a reward model that the stage was not given or a function that does not exist;
    ArtifactError when a reward model does not score its probes as it did after training.
    """
    check_reward_models(config, reward_models)
    with ExitStack() as leases:
        rewards: dict[str, RewardFunction] = {}
        for name, spec in config.terms.items():  # functions first: they fail in a second, before a model is loaded
            if isinstance(spec, FunctionReward):
                isolated = IsolatedReward(name, spec.function, timeout_s=spec.timeout_s)
                rewards[name] = leases.enter_context(isolated)
        for name, spec in config.terms.items():
            match spec:
                case RewardModelReward():
                    rewards[name] = _open_reward_model(reward_models[spec.model], context, leases)
                case ProcessRewardModelReward():
                    rewards[name] = _open_process_reward_model(spec, reward_models[spec.model], context, leases)
                case EnsembleReward():
                    rewards[name] = _open_ensemble(spec, reward_models, context, leases)
        yield Scorer(config, {name: rewards[name] for name in config.terms})


def check_reward_models(config: RewardsConfig, reward_models: Mapping[str, RewardModelRef]) -> None:
    """Raise ConfigError when a term names a reward model that is not among the inputs, or one that judges steps."""
    for name, spec in config.terms.items():
        for key, model in _models_of(spec):
            if model not in reward_models:
                near = difflib.get_close_matches(model, reward_models, n=1)
                given = f"did you mean {near[0]}?" if near else f"the stage has {sorted(reward_models) or 'none'}"
                rule = "the stage was not given this reward model"
                raise ConfigError(explain(f"rewards.terms.{name}.{key}", model, rule, given))
            steps = isinstance(reward_models[model], ProcessRewardModelRef)
            if steps and not isinstance(spec, ProcessRewardModelReward):
                rule, remedy = "it judges steps and not whole answers", 'set type = "process_reward_model"'
                raise ConfigError(explain(f"rewards.terms.{name}.{key}", model, rule, remedy))


def overlong_penalties(generations: Sequence[Generation], config: OverlongPenalty) -> list[float]:
    """Return the penalty <= 0 of each generation by the number of its completion tokens."""
    return [
        soft_overlong(
            len(generation.completion.token_ids),
            max_tokens=config.max_tokens,
            buffer_tokens=config.buffer_tokens,
            factor=config.factor,
        )
        for generation in generations
    ]


def _open_reward_model(ref: RewardModelRef, context: StageContext, leases: ExitStack) -> RewardFunction:
    from rlhf_core.data.chat import ChatTemplate

    folder = context.path(ref)
    contract, chat = Contract.read(folder), ChatTemplate.load(folder)
    spec = ModelSpec(path=str(folder), head="score", lora=None, seed=context.seed)
    trainer = leases.enter_context(context.runtime.trainer("reward_model", spec, None))
    verify_contract(trainer, contract)
    return partial(score_with_reward_model, trainer, chat, max_length=contract.max_length)


def _models_of(spec: RewardSpec) -> list[tuple[str, str]]:
    """Return key -> name of the reward models that a term asks for."""
    match spec:
        case RewardModelReward() | ProcessRewardModelReward():
            return [("model", spec.model)]
        case EnsembleReward():
            return [(f"models[{index}]", model) for index, model in enumerate(spec.models)]
        case FunctionReward():
            return []


def _open_process_reward_model(
    term: ProcessRewardModelReward, ref: RewardModelRef, context: StageContext, leases: ExitStack
) -> RewardFunction:
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.data.steps import StepSplitter
    from rlhf_core.rewards.process_model import (
        ProcessContract,
        score_with_process_reward_model,
        verify_process_contract,
    )

    folder = context.path(ref)
    contract, chat = ProcessContract.read(folder), ChatTemplate.load(folder)
    spec = ModelSpec(path=str(folder), head="score", lora=None, seed=context.seed)
    trainer = leases.enter_context(context.runtime.trainer("reward_model", spec, None))
    verify_process_contract(trainer, contract)
    return partial(
        score_with_process_reward_model,
        trainer,
        chat,
        StepSplitter(chat, contract.separator),
        max_length=contract.max_length,
        reduce=contract.reduce if term.reduce == "model" else term.reduce,
    )


def _open_ensemble(
    term: EnsembleReward, reward_models: Mapping[str, RewardModelRef], context: StageContext, leases: ExitStack
) -> RewardFunction:
    from rlhf_core.rewards.ensemble import score_with_ensemble

    members = [_open_reward_model(reward_models[name], context, leases) for name in term.models]
    return partial(score_with_ensemble, members, reduce=term.reduce, k=term.k)
