"""Lease the engines of policy optimization: sampler, policy, reference, value model, rewards and teachers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Sampler, Trainer
from rlhf_core.models.router_replay import check_router_replay
from rlhf_core.rewards.scoring import Scorer, open_scorer
from rlhf_core.rollouts.answers import OpenEnvironments, expect_weights
from rlhf_core.rollouts.held_out import HeldOut
from rlhf_core.stage.context import StageContext
from rlhf_core.training.moving_reference import AdaptersOff, MovingReference
from rlhf_core.types import ModelRef, PolicyRef, ProcessRewardModelRef, Prompt


@dataclass(frozen=True)
class Models:
    """The engines of one run, leased from the runtime.

    Only gae has a `value_model`, and only a run with `kl.coef` > 0 a `reference`.
    """

    sampler: Sampler
    policy: Trainer
    reference: Trainer | MovingReference | AdaptersOff | None
    value_model: Trainer | None
    scorer: Scorer
    teachers: Mapping[str, Trainer]
    """Of a run with `distill`."""


def lease_models(
    config: PPOConfig,
    policy: PolicyRef,
    reference: PolicyRef,
    reward_models: dict[str, ModelRef],
    teachers: Mapping[str, PolicyRef],
    critic: ModelRef | None,
    context: StageContext,
    leases: ExitStack,
) -> Models:
    """Lease the engines: the value model starts from `critic`, else from a reward model if there is one, else from the policy."""
    weighted = config.distill.teachers if config.distill else {}
    for name in weighted:
        check_teacher(name, teachers, policy, context)
    if config.router_replay:
        check_router_replay(context.path(policy), key=f"{context.label}.router_replay")
    value_model: Trainer | None = None
    frozen: Trainer | MovingReference | AdaptersOff | None = None
    if config.uses_values:
        # By name, and not by the order of a mapping, which does not survive a file.
        scoring = {name: ref for name, ref in reward_models.items() if not isinstance(ref, PolicyRef)}
        names = sorted(scoring, key=lambda name: (isinstance(scoring[name], ProcessRewardModelRef), name))
        start = critic or (reward_models[names[0]] if names else policy)
        if critic:
            from rlhf_core.models.loading import check_same_tokens  # imports peft, which only workers need otherwise

            check_same_tokens(context.path(policy), context.path(critic), key=f"{context.label}.critic")
        spec = context.model(start, "value", lora=config.value.lora)
        value_model = leases.enter_context(context.runtime.trainer("value_model", spec, config.value.optimizer))
    sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))
    expect_weights(sampler)  # each step begins with a load
    actor = context.model(policy, lora=config.lora)
    trained = leases.enter_context(context.runtime.trainer("policy", actor, config.optimizer))
    if config.kl.reference_sync:
        start_path, sync = context.path(reference), config.kl.reference_sync
        frozen = MovingReference(context.runtime, start_path, context.work, sync, seed=context.seed, leases=leases)
    elif config.uses_reference and config.lends_reference(reference.digest, policy.digest):
        frozen = AdaptersOff(trained)
    elif config.uses_reference:
        frozen = leases.enter_context(context.runtime.trainer("reference", context.model(reference), None))
    scorer = leases.enter_context(open_scorer(config.rewards, reward_models, context, config.agent_keys()))
    teaching = {
        name: leases.enter_context(context.runtime.trainer("teacher", context.model(teachers[name]), None))
        for name in weighted
    }
    return Models(sampler, trained, frozen, value_model, scorer, teaching)


def check_teacher(name: str, teachers: Mapping[str, PolicyRef], policy: PolicyRef, context: StageContext) -> None:
    """Raise ConfigError if a teacher is missing, or if its vocabulary differs from the vocabulary of `policy`."""
    from rlhf_core.models.loading import shared_vocabulary  # imports peft, as above

    key = f"{context.label}.distill.teachers.{name}"
    if name not in teachers:
        raise ConfigError(key, None, "is not among the given teachers", "give a policy of this name")
    shared_vocabulary(context.path(policy), context.path(teachers[name]), key=key)


def open_held_out(
    config: PPOConfig,
    models: Models,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    reward_models: dict[str, ModelRef],
    environments: OpenEnvironments,
    context: StageContext,
    leases: ExitStack,
) -> HeldOut | None:
    """Open the evaluation on held-out `prompts`, if there is one; `leases` hold the engines of its independent rewards."""
    if config.evaluate is None:
        return None
    scorers = {"reward": models.scorer.comparable()}
    if independent := config.evaluate.independent:
        scorers["independent"] = leases.enter_context(open_scorer(independent, reward_models, context))
    return HeldOut(
        config=config.evaluate,
        prompts=prompts,
        engine=models.sampler,
        chat=chat,
        sampling=config.sampling,
        seed=context.seed,
        environments=environments,
        scorers=scorers,
        note_failed=context.failed,
    )
