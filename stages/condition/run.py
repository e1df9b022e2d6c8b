"""Conditional SFT (arXiv 2308.12050): prompts name the level of the answer, so that the best one can be requested.

The rewards of all rollouts are cut into levels by their quantiles. As data for `sft`, each answer follows its prompt
with its own level; as prompts for `generate`, each asks for the best level that the answers reached.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhf_core.data.mixing import split_by_prompt
from rlhf_core.data.shards import read_rollouts
from rlhf_core.data.tables import read_prompts, write_demonstrations, write_prompts
from rlhf_core.errors import DataError
from rlhf_core.stage.context import StageContext
from rlhf_core.types import DemonstrationsRef, Message, Prompt, PromptsRef, Rollout, RolloutsRef
from stages.condition import ConditionConfig
from stages.select.run import demonstrations

TABLE_ROWS = 16  # in the tracker


def run(
    config: ConditionConfig, *, rollouts: RolloutsRef, prompts: PromptsRef | None = None, context: StageContext
) -> DemonstrationsRef | PromptsRef:
    """Build the answers of `rollouts` after prompts with their level, or `prompts` that request the best level."""
    everything = read_rollouts(context.path(rollouts))
    valid = [one for one in everything if not one.invalid]
    kept = [one for one in valid if not (config.drop_truncated and one.completion.finish_reason == "length")]
    levels = reward_levels([rollout.reward for rollout in kept], levels=config.levels)
    check_levels(config, levels, context)
    best = max(levels)
    if prompts is not None:
        conditioned = [asking(prompt, best, template=config.template) for prompt in read_prompts(context.path(prompts))]
        write_prompts(context.out, conditioned)
        return context.commit(PromptsRef, metrics={"prompts": len(conditioned), "level": best})

    asked = [
        replace(one, prompt=asking(one.prompt, level, template=config.template))
        for one, level in zip(kept, levels, strict=True)
    ]
    splits = split_by_prompt(asked, lambda one: one.prompt.id, fraction=config.eval_fraction, seed=context.seed)
    for name, part in splits.items():
        write_demonstrations(context.out / f"{name}.parquet", demonstrations(part))
    record(kept, levels, context)
    counts = {f"level_{level}": float(count) for level, count in sorted(Counter(levels).items())}
    counts |= {name: float(len(part)) for name, part in splits.items()}
    counts |= {"truncated": float(len(valid) - len(kept)), "invalid": float(len(everything) - len(valid))}
    return context.commit(DemonstrationsRef, metrics=counts | {"level": float(best)})


def reward_levels(rewards: Sequence[float], *, levels: int) -> list[int]:
    """The level, 1 to `levels`, of each reward: 1 plus the number of quantiles j / levels that lie below the reward.

    The j-th quantile is the least reward that at least j / levels of all do not exceed.

    >>> reward_levels([0.1, 0.4, 0.2, 0.3], levels=2)
    [1, 2, 1, 2]
    """
    ranked = sorted(rewards)
    quantiles = [ranked[max(0, -(-number * len(ranked) // levels) - 1)] for number in range(1, levels) if ranked]
    return [1 + bisect_left(quantiles, reward) for reward in rewards]


def check_levels(config: ConditionConfig, levels: Sequence[int], context: StageContext) -> None:
    """Raise DataError if all answers have one level, as it would carry no information."""
    if len(set(levels)) < 2:
        rule = f"{len(levels)} complete answers fall into {len(set(levels))} of the {config.levels} levels; at least 2 are needed"
        raise DataError(
            f"{context.label}.rollouts", sorted(set(levels)), rule, "sample more answers, or use a finer reward"
        )


def asking(prompt: Prompt, level: int, *, template: str) -> Prompt:
    """A copy of `prompt` with the level in its last message; id and label are unchanged."""
    # Not str.format: braces in a prompt are its own. The level first, or a prompt with the text {level} would get it.
    *before, last = prompt.messages
    content = template.replace("{level}", str(level)).replace("{prompt}", last.content)
    return replace(prompt, messages=(*before, Message(last.role, content)))


def record(rollouts: Sequence[Rollout], levels: Sequence[int], context: StageContext) -> None:
    """Record the first answers with their levels as a table."""
    rows = [
        [one.prompt.messages[-1].content, level, one.completion.text, one.reward]
        for one, level in zip(rollouts[:TABLE_ROWS], levels, strict=False)
    ]
    context.tracker.table("samples/levels", ["prompt", "level", "completion", "reward"], rows)
