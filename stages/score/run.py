"""Scoring: rewards for existing generations. A change of the reward scores them again without sampling again."""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from rlhf_core.config.rewards import check_sources
from rlhf_core.data.shards import read_generations, read_index, read_rollouts, shards, write_index, write_rollouts
from rlhf_core.errors import DataError, RewardError
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.batches import whole_groups
from rlhf_core.rewards.model import check_reward_models
from rlhf_core.rewards.rubrics import check_rubrics
from rlhf_core.rewards.scoring import Scorer, component_means, open_scorer
from rlhf_core.stage.context import StageContext
from rlhf_core.types import Generation, GenerationsRef, ModelRef, Rollout, RolloutsRef
from stages.score import ScoreConfig

SHARD_ROWS = 1024
"""Generations scored and kept at a time."""
TABLE_ROWS = 8  # in the tracker


def run(
    config: ScoreConfig, *, generations: GenerationsRef, reward_models: dict[str, ModelRef], context: StageContext
) -> RolloutsRef:
    """Score every generation; return the rollouts in the same order, each with its reward and components."""
    check_reward_models(config.rewards, reward_models)
    source = context.path(generations)
    rows = read_generations(source)
    if not rows:
        raise DataError("score.generations", generations.uri, "contains no generations", "generate again")
    check_sources(config.rewards, {row.prompt.source for row in rows}, key=f"{context.label}.rewards")
    check_rubrics(
        config.rewards, list({row.prompt.id: row.prompt for row in rows}.values()), key=f"{context.label}.rewards"
    )

    folder = context.work / "shards"
    score_shards(config, rows, reward_models, folder, context)
    rollouts = read_rollouts(folder)
    check_some_are_valid(rollouts, folder)
    for path in shards(folder):  # copied, not moved: a kill in between must not lose them
        shutil.copyfile(path, context.out / path.name)
    facts = {"generations": generations.digest, "rewards": config.rewards.model_dump(mode="json")}
    write_index(context.out, read_index(source) | facts)
    record_table(rollouts, context)
    return context.commit(RolloutsRef, metrics=reward_metrics(rollouts))


def score_shards(
    config: ScoreConfig,
    rows: Sequence[Generation],
    reward_models: dict[str, ModelRef],
    folder: Path,
    context: StageContext,
) -> None:
    """Write the shards that an earlier attempt did not finish; rewards are opened only if a shard is missing."""
    pieces = whole_groups(rows, at_least=SHARD_ROWS)
    done = len(shards(folder))
    if done == len(pieces):
        return
    with open_scorer(config.rewards, reward_models, context) as score:
        restore(score, folder, done)
        for index in range(done, len(pieces)):
            score.at_step(0)  # nothing is optimized here: the weights keep their initial values
            rollouts = score(pieces[index])
            keep(score, folder, index)  # before its shard, so that every finished shard has its state
            metrics = reward_metrics(rollouts) | score.logs()
            context.failed(index + 1, score.failed())
            context.metrics(index + 1, metrics)  # before the shard as well: a finished shard is not scored again
            write_rollouts(folder, index, rollouts)
            mean = metrics.get("reward/mean", math.nan)
            context.progress(index + 1, len(pieces), f"reward {mean:.3f}")
            if context.stopping():
                context.stop()


def check_some_are_valid(rollouts: Sequence[Rollout], folder: Path) -> None:
    """Raise RewardError when none of the rollouts has a reward; their shards are removed, so that the next attempt scores again."""
    if all(rollout.invalid for rollout in rollouts):
        shutil.rmtree(folder)
        raise RewardError("rewards", rollouts[0].invalid, "none of the rollouts has a reward", "fix the reward")


def keep(score: Scorer, folder: Path, shard: int) -> None:
    """Write the scorer's state after `shard`, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _state_path(folder, shard)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(score.state()), encoding="utf-8")
    temporary.replace(path)


def restore(score: Scorer, folder: Path, done: int) -> None:
    """Restore the scorer to its state after the first `done` shards."""
    if done:
        score.restore(json.loads(_state_path(folder, done - 1).read_text(encoding="utf-8")))


def reward_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Distribution of the reward, mean of each component, and possible gain by selection.

    `reward/best` is the mean over prompts of the best reward. `reward/undecided` is the share of prompts whose answers
    all earn the same, so that they yield neither pairs nor group advantages. Invalid rollouts are counted in
    `reward/invalid` and nowhere else; if all are invalid, this is the only metric.
    """
    if all(rollout.invalid for rollout in rollouts):
        return {"reward/invalid": 1.0}
    rewards = [rollout.reward for rollout in rollouts if not rollout.invalid]
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.invalid:
            groups[rollout.prompt.id].append(rollout.reward)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/best": fmean(max(group) for group in groups.values()),
        "reward/undecided": fmean(max(group) == min(group) for group in groups.values()),
        "reward/invalid": 1 - len(rewards) / len(rollouts),
    } | component_means(rollouts)


def record_table(rollouts: Sequence[Rollout], context: StageContext) -> None:
    """Record the best and the worst answers as a table."""
    valid = [rollout for rollout in rollouts if not rollout.invalid]
    ranked = sorted(valid, key=lambda rollout: rollout.reward, reverse=True)
    shown = [("best", one) for one in ranked[:TABLE_ROWS]] + [("worst", one) for one in ranked[-TABLE_ROWS:][::-1]]
    rows = [
        [rank, one.prompt.messages[-1].content, one.completion.text, one.reward, json.dumps(one.reward_components)]
        for rank, one in shown
    ]
    context.tracker.table("samples/rewards", ["rank", "prompt", "completion", "reward", "components"], rows)


def _state_path(folder: Path, shard: int) -> Path:
    return folder / f"state-{shard:05d}.json"
