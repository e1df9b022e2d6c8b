"""The answers of a step: every prompt is asked as often as its group has members.

With an agent an answer is an episode: turns of the policy and, between them, what its environment said.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from rlhf_core.agents.episodes import Episode, play
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import Metrics, Sampler
from rlhf_core.stage.context import StageContext
from rlhf_core.types import Completion, Generation, Prompt, SamplingRequest, derive_seed


def open_environments(
    agent: AgentConfig | None, policy: Path, leases: ExitStack, context: StageContext
) -> Environments | None:
    """Start the agent's processes, which end with `leases`; None without an agent. `policy` is the policy's folder."""
    if agent is None:
        return None
    opened = Environments(agent, tokenizer=str(policy), functions=context.functions, files=context.files)
    return leases.enter_context(opened)


def sample(
    sampler: Sampler,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    step: int,
    seed: int,
    environments: Environments | None = None,
) -> list[Generation]:
    """Return `samples_per_prompt` completions per prompt, those of a prompt together, each from its own seed.

    A prompt that stands in `prompts` again goes on counting its samples, so it gets other seeds.
    """
    chat = chat if environments is None else chat.with_tools(environments.tools)
    work: list[Episode] = []
    drawn: Counter[str] = Counter()
    for prompt in prompts:
        ids = chat.prompt_ids(prompt.messages)
        numbers = range(drawn[prompt.id], drawn[prompt.id] + config.samples_per_prompt)
        work += [Episode(prompt, ids, derive_seed(seed, "ppo", step, prompt.id, i)) for i in numbers]
        drawn[prompt.id] += config.samples_per_prompt
    drawn_answers = answers(sampler, chat, work, config.sampling, environments)
    return [Generation(one.prompt, ids, completion) for one, (ids, completion) in zip(work, drawn_answers, strict=True)]


def answers(
    sampler: Sampler,
    chat: ChatTemplate,
    work: Sequence[Episode],
    sampling: SamplingConfig,
    environments: Environments | None,
) -> list[tuple[tuple[int, ...], Completion]]:
    """Return one completion per prompt of `work`, played with `environments` if there are any, with the prompt's tokens."""
    if environments is None:
        requests = [SamplingRequest(one.prompt_ids, one.seed) for one in work]
        completions = sampler.generate(requests, sampling)
        return [(one.prompt_ids, completion) for one, completion in zip(work, completions, strict=True)]
    played = play(sampler, chat, work, environments, environments.config, sampling)
    return [(one.prompt_ids, one.completion) for one in played]


def episode_metrics(completions: Sequence[Completion]) -> Metrics:
    """Return turns, failures and the means of what the environments report; nothing for answers that are no episodes."""
    episodes = [completion for completion in completions if completion.spans or completion.failure]
    if not episodes:
        return {}
    extras: defaultdict[str, list[float]] = defaultdict(list)
    for completion in episodes:
        for name, value in completion.extras.items():
            extras[name].append(value)
    return {
        "rollout/turns": fmean(len(completion.spans) for completion in episodes),
        "rollout/failed_episodes": fmean(bool(completion.failure) for completion in episodes),
        **{f"episode/{name}": fmean(values) for name, values in sorted(extras.items())},
    }
