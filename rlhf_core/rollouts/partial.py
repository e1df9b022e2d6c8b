"""Continue unfinished answers in a later step, with the weights of that step (partial rollouts).

Sampling goes in rounds of `partial_tokens` tokens per answer and ends, for a step, with the round after which
`prompts_per_step` groups are whole. What is unfinished then stays in the pool, so that no step waits for the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.order import rows_from
from rlhf_core.data.rollout_log import Pool
from rlhf_core.errors import SamplingError, explain
from rlhf_core.interfaces import Sampler
from rlhf_core.types import ActionSpan, Completion, Generation, Prompt, SamplingRequest, derive_seed


def draw_groups(
    pool: Pool, sampler: Sampler, chat: ChatTemplate, prompts: Sequence[Prompt], config: PPOConfig, *, seed: int
) -> tuple[list[Generation], Pool]:
    """Return the `prompts_per_step` oldest groups that are whole, and the pool that they leave.

    First new groups fill the pool up to `in_flight_groups`. After max_tokens / partial_tokens rounds all of it is whole,
    and it holds at least `prompts_per_step` groups: so this ends whatever the answers' lengths are.
    """
    size = config.samples_per_prompt
    missing = config.groups_in_flight - len(pool.samples) // size
    samples = [*pool.samples, *begun_groups(pool.begun, missing, chat, prompts, config, seed=seed)]
    for _ in range(config.sampling.max_tokens // config.partial_tokens):
        samples = after_a_round(samples, sampler, chat, config)
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        whole = [number for number, group in enumerate(groups) if all(is_finished(one, config) for one in group)]
        if len(whole) >= config.prompts_per_step:
            taken = whole[: config.prompts_per_step]
            left = [one for number, group in enumerate(groups) if number not in taken for one in group]
            return [one for number in taken for one in groups[number]], Pool(pool.begun + missing, tuple(left))
    rule = f"the sampler ended answers early: {len(whole)} of {config.prompts_per_step} groups are whole"
    raise SamplingError(explain("ppo.partial_tokens", config.partial_tokens, rule, "please report this as a bug"))


def begun_groups(
    first: int, count: int, chat: ChatTemplate, prompts: Sequence[Prompt], config: PPOConfig, *, seed: int
) -> list[Generation]:
    """Return the samples of `count` new groups, from number `first` on, without a token yet; each has its own seed."""
    samples = []
    for number, prompt in enumerate(rows_from(first, prompts, count=count, seed=seed), start=first):
        ids = chat.prompt_ids(prompt.messages)
        for member in range(config.samples_per_prompt):
            own = derive_seed(seed, "ppo", "group", number, prompt.id, member)
            samples.append(Generation(prompt, ids, Completion((), (), "", "length", 0, own)))
    return samples


def after_a_round(
    samples: Sequence[Generation], sampler: Sampler, chat: ChatTemplate, config: PPOConfig
) -> list[Generation]:
    """Return the samples in order, those that were unfinished with at most `partial_tokens` more tokens, in one batch.

    A segment's seed derives from its sample's seed and its number, so a restart draws the same.
    """
    unfinished = [number for number, one in enumerate(samples) if not is_finished(one, config)]
    requests = [
        SamplingRequest(one.prompt_ids + one.completion.token_ids, _segment_seed(one.completion))
        for one in (samples[number] for number in unfinished)
    ]
    segments = sampler.generate(requests, config.sampling.model_copy(update={"max_tokens": config.partial_tokens}))
    after = list(samples)
    for number, segment in zip(unfinished, segments, strict=True):
        one = samples[number]
        after[number] = Generation(one.prompt, one.prompt_ids, _longer(one.completion, segment, chat))
    return after


def is_finished(sample: Generation, config: PPOConfig) -> bool:
    """Return whether an answer ended by itself or has `max_tokens` tokens."""
    made = sample.completion
    return made.finish_reason == "stop" or len(made.token_ids) >= config.sampling.max_tokens


def _segment_seed(completion: Completion) -> int:
    return derive_seed(completion.seed, "segment", len(completion.spans))


def _longer(completion: Completion, segment: Completion, chat: ChatTemplate) -> Completion:
    """Return the completion with a segment behind it: a span of its own, with the version that sampled it."""
    token_ids = completion.token_ids + segment.token_ids
    span = ActionSpan(len(completion.token_ids), len(token_ids), segment.policy_version)
    return Completion(
        token_ids=token_ids,
        logprobs=completion.logprobs + segment.logprobs,
        text=chat.decode(token_ids),  # of all of it: a character may lie across the border
        finish_reason=segment.finish_reason,
        policy_version=segment.policy_version,
        seed=completion.seed,
        spans=(*completion.spans, span),
    )
