"""The answers of a step: every prompt is asked as often as its group has members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import Sampler
from rlhf_core.types import Generation, Prompt, SamplingRequest, derive_seed


def sample(
    sampler: Sampler, chat: ChatTemplate, prompts: Sequence[Prompt], config: PPOConfig, *, step: int, seed: int
) -> list[Generation]:
    """Return `samples_per_prompt` completions per prompt, those of a prompt together, each from its own seed.

    A prompt that stands in `prompts` again goes on counting its samples, so it gets other seeds.
    """
    work: list[tuple[Prompt, tuple[int, ...], int]] = []
    drawn: Counter[str] = Counter()
    for prompt in prompts:
        ids = chat.prompt_ids(prompt.messages)
        work += [(prompt, ids, drawn[prompt.id] + i) for i in range(config.samples_per_prompt)]
        drawn[prompt.id] += config.samples_per_prompt
    requests = [SamplingRequest(ids, derive_seed(seed, "ppo", step, prompt.id, i)) for prompt, ids, i in work]
    completions = sampler.generate(requests, config.sampling)
    return [Generation(prompt, ids, completion) for (prompt, ids, _), completion in zip(work, completions, strict=True)]
