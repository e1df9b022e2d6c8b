"""Open the rewards of a configuration: start processes, lease and verify models, connect clients."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, assert_never

from rlhf_core.algorithms.token_math import EnsembleReduction, ensemble_score, loaded_torch
from rlhf_core.config.rewards import (
    EnsembleReward,
    EpisodeReward,
    FunctionReward,
    GenerativeReward,
    JudgeReward,
    ProcessRewardModelReward,
    RemoteReward,
    RewardModelReward,
    RewardsConfig,
    RewardSpec,
    Term,
)
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import StepSplitter
from rlhf_core.interfaces import ModelSpec, RewardFunction, Trainer
from rlhf_core.models.architecture import length_limit, read_config
from rlhf_core.rewards import remote
from rlhf_core.rewards.batches import BatchedReward, ResultCache, Reward, RewardOutcome
from rlhf_core.rewards.generative import GenerativeModel
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.rewards.judge import Judge
from rlhf_core.rewards.model import (
    Contract,
    ProcessContract,
    score_with_process_reward_model,
    score_with_reward_model,
    verify_contract,
    verify_process_contract,
)
from rlhf_core.schema.base import keyed
from rlhf_core.stage.context import StageContext
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import Generation, ModelRef
from rlhf_core.user_code.dependencies import user_code_digest

# ---------------------------------------------------------------- Combine several reward models to one reward


def score_with_ensemble(
    members: Sequence[RewardFunction], generations: Sequence[Generation], *, reduce: EnsembleReduction, k: float
) -> RewardOutcome:
    """Reduce the scores of all members to one per generation; `k` weighs the standard deviation that is subtracted.

    Logs `disagreement`, the standard deviation of the members' scores (of the population), and `lower_bound`, their mean
    minus it: under optimization the reward of answers on which members disagree is the least trustworthy.
    """
    scores_MB = loaded_torch().tensor([member(generations) for member in members])
    spread_B = scores_MB.std(dim=0, correction=0)
    values = tuple(float(score) for score in ensemble_score(scores_MB, reduce=reduce, k=k))
    count = len(generations)
    logs = {
        "disagreement": (float(spread_B.sum()), count),
        "lower_bound": (float((scores_MB.mean(dim=0) - spread_B).sum()), count),
    }
    return RewardOutcome(values, logs=logs)


# ---------------------------------------------------------------- terms

SHAPING = frozenset({"weight", "weight_end", "weight_steps", "normalise", "clip"})
"""Fields of a term, as keys have them, that do not change the values it is given."""

REMOTE_FAILED_CALLS = 6
"""Each failed call costs all tries of the client. 6 halvings find one bad answer in a batch of 64."""


def open_terms(
    config: RewardsConfig, reward_models: Mapping[str, ModelRef], context: StageContext, leases: ExitStack
) -> dict[str, Reward]:
    """Open the rewards by name, in the order of the terms; `leases` close them.

    Rewards that run elsewhere are opened first: errors show up in a second, before a model is loaded.
    """
    opened = {
        name: open_elsewhere(
            name,
            spec,
            context.work / "rewards",
            leases,
            functions=context.functions,
            notes=context.notes,
            seed=context.seed,
        )
        for name, spec in config.terms.items()
        if isinstance(spec, (FunctionReward, RemoteReward, JudgeReward))
    }
    return {
        name: opened[name] if name in opened else _open_here(name, spec, reward_models, context, leases)
        for name, spec in config.terms.items()
    }


def open_elsewhere(
    name: str,
    spec: FunctionReward | RemoteReward | JudgeReward,
    folder: Path,
    leases: ExitStack,
    *,
    functions: Mapping[str, str] = MappingProxyType({}),
    notes: str = "",
    seed: int = 0,
) -> BatchedReward:
    """Open a reward that runs in other processes; its cache is in `folder`.

    A function whose digest differs from its digest in `functions` is refused whenever a process loads it; reads beyond
    its key are noted in the file `notes`.
    """
    path = folder / f"{sha256_text(name)[:16]}.jsonl"
    cache = ResultCache(identity(spec), path) if spec.cache else None
    batched = partial(BatchedReward, name, on_failure=spec.on_failure, compares=spec.compares, cache=cache)
    match spec:
        case FunctionReward():
            workers = _start_workers(name, spec, leases, functions, notes)
            size = 0 if workers[0].is_async else _batch_size(spec)
            return batched([worker.outcome for worker in workers], batch_size=size, retries=spec.retries)
        case RemoteReward():
            client = remote.RemoteRewardClient(
                name,
                spec.urls,
                timeout_s=spec.timeout_s,
                retries=spec.retries,
                token_env=spec.token_env,
            )
            return batched(
                [leases.enter_context(client)] * len(spec.urls),
                batch_size=_batch_size(spec),
                retries=0,  # the client's own, from one server to the next
                failed_calls=REMOTE_FAILED_CALLS,
            )
        case JudgeReward():
            judge = leases.enter_context(Judge(name, spec, seed=seed))
            # One at a time: each verdict is cached as soon as it is paid for.
            return batched([judge.outcome] * spec.concurrency, batch_size=1, retries=0)
        case _:
            assert_never(spec)


def identity(spec: Term) -> str:
    """Digest of everything that decides a term's values: for a function, this includes the source of its module.

    The key of a stage holds the same facts; this one outlives a change of weights.
    """
    facts = {name: value for name, value in keyed(spec).items() if name not in SHAPING}
    source = user_code_digest(spec.function) if isinstance(spec, FunctionReward) else ""
    return sha256_text(canonical_json([facts, source]))


def episode_reward(generations: Sequence[Generation]) -> RewardOutcome:
    """Sum an environment's rewards over an episode's spans; None for a completion without spans.

    Includes the scores that an agent returned besides its rewards, if any.
    """
    episodes = [generation.completion.spans for generation in generations]
    scores = tuple(generation.completion.score for generation in generations)
    return RewardOutcome(
        tuple(sum(span.reward for span in spans) if spans else None for spans in episodes),
        scores=scores if any(score is not None for score in scores) else (),
    )


def _start_workers(
    name: str, spec: FunctionReward, leases: ExitStack, functions: Mapping[str, str], notes: str
) -> list[IsolatedReward]:
    """Start the processes: the first alone, to check that the function can be loaded."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = spec.memory_mb * 2**20 if spec.memory_mb else machine // 2 // spec.workers
    code = {spec.function: functions[spec.function]} if spec.function in functions else {}
    settings = WorkerSettings(
        arguments=spec.arguments, protocol=spec.protocol, code=code, notes=notes, memory_bytes=memory
    )

    start = partial(
        IsolatedReward,
        name,
        spec.function,
        timeout_s=spec.timeout_s,
        settings=settings,
        batch_size=_batch_size(spec),
        compares=spec.compares,
    )
    workers = [leases.enter_context(start())]
    with ThreadPoolExecutor(spec.workers) as pool:
        others = [pool.submit(start) for _ in range(1, spec.workers)]
        workers += [leases.enter_context(one.result()) for one in others]
    return workers


def _batch_size(spec: FunctionReward | RemoteReward) -> int:
    """The number of answers per call. If answers are compared, a call takes exactly the answers to one prompt."""
    return 1 if spec.compares == "group" else spec.batch_size


def _open_here(
    name: str, spec: RewardSpec, reward_models: Mapping[str, ModelRef], context: StageContext, leases: ExitStack
) -> Reward:
    match spec:
        case GenerativeReward():
            ref = reward_models[spec.model]
            folder, trainer = context.path(ref), _lease_scorer(ref, context, leases, head="lm")
            longest = length_limit(read_config(folder))
            return GenerativeModel(name, spec, trainer, ChatTemplate.load(folder), longest=longest)
        case RewardModelReward():
            return _with_outcome(_open_reward_model(reward_models[spec.model], context, leases))
        case ProcessRewardModelReward():
            return _with_outcome(_open_process_reward_model(spec, reward_models[spec.model], context, leases))
        case EnsembleReward():
            members = [_open_reward_model(reward_models[one], context, leases) for one in spec.models]
            return partial(score_with_ensemble, members, reduce=spec.reduce, k=spec.k)
        case EpisodeReward():
            return episode_reward
        case _:
            raise TypeError(f"{type(spec).__name__} runs elsewhere")


def _with_outcome(score: RewardFunction) -> Reward:
    return lambda generations: RewardOutcome(tuple(score(generations)))


def _open_reward_model(ref: ModelRef, context: StageContext, leases: ExitStack) -> RewardFunction:
    contract, chat = Contract.read(context.path(ref)), ChatTemplate.load(context.path(ref))
    trainer = _lease_scorer(ref, context, leases)
    verify_contract(trainer, contract)
    return partial(score_with_reward_model, trainer, chat, max_length=contract.max_length)


def _open_process_reward_model(
    term: ProcessRewardModelReward, ref: ModelRef, context: StageContext, leases: ExitStack
) -> RewardFunction:
    contract, chat = ProcessContract.read(context.path(ref)), ChatTemplate.load(context.path(ref))
    trainer = _lease_scorer(ref, context, leases)
    verify_process_contract(trainer, contract)
    return partial(
        score_with_process_reward_model,
        trainer,
        chat,
        StepSplitter(chat, contract.separator),
        max_length=contract.max_length,
        reduce=contract.reduce if term.reduce == "model" else term.reduce,
    )


def _lease_scorer(
    ref: ModelRef, context: StageContext, leases: ExitStack, *, head: Literal["score", "lm"] = "score"
) -> Trainer:
    spec = ModelSpec(path=str(context.path(ref)), head=head, lora=None, seed=context.seed)
    return leases.enter_context(context.runtime.trainer("reward_model", spec, None))
