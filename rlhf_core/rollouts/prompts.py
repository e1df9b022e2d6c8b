"""Choose the prompts of a run of policy optimization: their order, the sources in use, and those that are held out."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import check_sources
from rlhf_core.data.tables import DIFFICULTY, content_id, read_prompts
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.types import Prompt, derive_seed


def split_prompts(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts of the sources in use, and the held-out ones; ConfigError if a source has none left."""
    used = sources_used(config, prompts, key=key)
    rows, held_out = hold_out(used, config.evaluate)
    for source in {one.source for one in used} - {one.source for one in rows} if config.mixture else ():
        rule = f"holds out all prompts of the source {source}"
        raise ConfigError(f"{key}.evaluate.prompts", len(held_out), rule, "lower it, or take its share away")
    return rows, held_out


def ordered_prompts(config: PPOConfig, folder: Path, *, key: str) -> list[Prompt]:
    """Return the prompts as they are or, by `order`, those with the highest mean reward first; ConfigError without means."""
    prompts, difficulty = read_prompts(folder), folder / DIFFICULTY
    if config.order != "easy_first":
        return prompts
    if not difficulty.is_file():
        rule = "the prompts come without their difficulty"
        raise ConfigError(f"{key}.order", config.order, rule, 'take those of a select stage with type = "prompts"')
    means = {row["id"]: row["mean"] for row in json.loads(difficulty.read_text(encoding="utf-8"))["prompts"]}
    return sorted(prompts, key=lambda prompt: -means[prompt.id])


def sources_used(config: PPOConfig, prompts: Sequence[Prompt], *, key: str) -> list[Prompt]:
    """Return the prompts of the sources in the mixture, or all; ConfigError for a source that there is not, or without a term."""
    sources = {prompt.source for prompt in prompts}
    for source in config.mixture:
        if source not in sources:
            rule = f"no prompt has this source; {nearest(source, sorted(sources))}"
            raise ConfigError(f"{key}.mixture.{source} = {config.mixture[source]}: {rule}")
    used = {source for source, share in config.mixture.items() if share} or sources
    config.check_agents(sources, key=key)
    check_sources(config.rewards, used, known=sources, key=f"{key}.rewards")
    if config.distill:
        config.distill.check_sources(used, key=f"{key}.distill")
    return [prompt for prompt in prompts if prompt.source in used]


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
        raise ConfigError("ppo.evaluate.prompts", config.prompts, rule, "lower it, or provide more prompts")
    chosen = sorted(by_content, key=lambda content: (derive_seed("held-out", content), content))[: config.prompts]
    held_out = set(chosen)
    return [one for one in prompts if content_id(one.messages) not in held_out], [by_content[one] for one in chosen]
