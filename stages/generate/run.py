"""Sampling: n answers to every prompt, unscored, so that selection, scoring and debugging can share them.

Every sample has a separate seed, derived from (run seed, round, prompt, index). Finished shards outlive a killed run,
and a shard is always sampled in one call: a restart with the same `shard_size` repeats the batches of an uninterrupted
run, and so its bits. In other shards, or another order of prompts, log-probs are the same to rounding, and tokens too
unless two candidates are closer than that (docs/keys.md).
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rlhf_core.agents.episodes import Episode
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import count_rows, finished_shards, read_generations, shards, write_generations, write_index
from rlhf_core.data.tables import read_prompts
from rlhf_core.errors import DataError
from rlhf_core.interfaces import Metrics, Sampler
from rlhf_core.rollouts.answers import SINGLE_TURN, OpenEnvironments, answers, episode_metrics, open_environments
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.failures import failed_episodes
from rlhf_core.types import Generation, GenerationsRef, Message, PolicyRef, Prompt, PromptsRef, chunks, derive_seed
from stages.generate import GenerateConfig

TABLE_ROWS = 16  # in the tracker


def run(
    config: GenerateConfig,
    *,
    policy: PolicyRef,
    prompts: PromptsRef,
    asked: PromptsRef | None = None,
    context: StageContext,
) -> GenerationsRef:
    """Draw `samples_per_prompt` answers of `policy` to each prompt; answers to the same prompt are consecutive.

    `asked` are the prompts as sent to this policy, by id; the answers are kept as answers to `prompts`.
    """
    chat = ChatTemplate.load(context.path(policy))
    given = read_prompts(context.path(prompts))
    config.check_agents({prompt.source for prompt in given}, key=context.label)
    questions = chosen(given, config)

    folder = context.work / "shards"
    put = {row.id: row.messages for row in read_prompts(context.path(asked))} if asked is not None else {}
    sample_shards(config, questions, chat, context.path(policy), folder, context, put=put)
    for path in shards(folder):  # copied, not moved: a kill in between must not lose them
        shutil.copyfile(path, context.out / path.name)

    generations = read_generations(context.out)
    write_index(
        context.out,
        {
            "count": len(generations),
            "samples_per_prompt": config.samples_per_prompt,
            "policy": policy.digest,
            "prompts": prompts.digest,
            "template": chat.digest,
            "sampling": config.sampling.model_dump(),
        },
    )
    record_table(generations, context)
    return context.commit(GenerationsRef, metrics=generation_metrics(generations))


def chosen(prompts: Sequence[Prompt], config: GenerateConfig) -> list[Prompt]:
    """Select the prompts to answer. Raises DataError if none is left."""
    found = list(prompts[: config.max_prompts] if config.max_prompts else prompts)
    if not found:
        raise DataError("generate.prompts", len(found), "there are no prompts to answer", "prepare more prompts")
    return found


def sample_shards(
    config: GenerateConfig,
    prompts: Sequence[Prompt],
    chat: ChatTemplate,
    policy: Path,
    folder: Path,
    context: StageContext,
    *,
    put: Mapping[str, tuple[Message, ...]],
) -> None:
    """Write the shards that earlier attempts did not finish; the sampler is not started if all are finished.

    Earlier attempts may have used another `shard_size`: the number of answered prompts is read from their rows, and the
    remaining prompts are divided anew.
    """
    finished = finished_shards(folder)
    answered = sum(map(count_rows, finished)) // config.samples_per_prompt
    pieces = chunks(prompts[answered:], config.shard_size)
    if not pieces:
        return
    with ExitStack() as leases:
        environments = open_environments(config, policy, leases, context)  # first: it fails in a second
        sampler = leases.enter_context(context.runtime.sampler(policy))
        for index, piece in enumerate(pieces, start=len(finished)):
            generations = sample(sampler, chat, piece, config, seed=context.seed, put=put, environments=environments)
            # before the shard is written: a finished shard is not sampled again
            context.failed(index + 1, failed_episodes(generations, config.agent_keys()))
            context.metrics(index + 1, generation_metrics(generations))
            write_generations(folder, index, generations)
            context.progress(index + 1, len(finished) + len(pieces), f"{len(generations)} answers")
            if context.stopping():
                context.stop()


def sample(
    sampler: Sampler,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    config: GenerateConfig,
    *,
    seed: int,
    put: Mapping[str, tuple[Message, ...]],
    environments: OpenEnvironments = SINGLE_TURN,
) -> list[Generation]:
    """Sample `samples_per_prompt` generations per prompt, each from its own seed.

    A prompt whose id is in `put` is sent with those messages; the generation has the prompt itself and its tokens.
    """
    chat_of = environments.templates(chat)
    asked = [replace(prompt, messages=put[prompt.id]) if prompt.id in put else prompt for prompt in prompts]
    work = [
        Episode(prompt, ids, derive_seed(seed, "generate", config.round, prompt.id, i))
        for prompt in asked
        for ids in [chat_of(prompt).prompt_ids(prompt.messages)]
        for i in range(config.samples_per_prompt)
    ]
    own = [prompt for prompt in prompts for _ in range(config.samples_per_prompt)]
    drawn = answers(sampler, chat, work, config.sampling, environments)
    return [
        Generation(prompt, chat_of(prompt).prompt_ids(prompt.messages) if prompt.id in put else ids, completion)
        for prompt, (ids, completion) in zip(own, drawn, strict=True)
    ]


def generation_metrics(generations: Sequence[Generation]) -> Metrics:
    """Length (sampled tokens), entropy estimate (nats per token), truncation and variety of the answers.

    `entropy` is the mean of -log p over sampled tokens, `distinct` the mean over prompts of the share of different
    texts among the answers to one prompt.
    """
    completions = [generation.completion for generation in generations]
    logprobs = [
        logprob
        for completion in completions
        for logprob, sampled in zip(completion.logprobs, completion.action_mask, strict=True)
        if sampled
    ]
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for generation in generations:
        texts[generation.prompt.id].append(generation.completion.text)
    return episode_metrics(completions) | {
        "length_mean": fmean(completion.action_mask.count(1) for completion in completions),
        "entropy": -fmean(logprobs) if logprobs else 0.0,
        "truncated": fmean(completion.finish_reason == "length" for completion in completions),
        "distinct": fmean(len(set(answers)) / len(answers) for answers in texts.values()),
    }


def record_table(generations: Sequence[Generation], context: StageContext) -> None:
    """Record the first answers as a table."""
    rows = [
        [
            one.prompt.messages[-1].content,
            one.completion.text,
            len(one.completion.token_ids),
            one.completion.finish_reason,
        ]
        for one in generations[:TABLE_ROWS]
    ]
    context.tracker.table("samples/generations", ["prompt", "completion", "tokens", "finish_reason"], rows)
