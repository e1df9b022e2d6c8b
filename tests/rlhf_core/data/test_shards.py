"""Generations and rollouts in shards: what is written is what is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from rlhf_core.data.shards import (
    read_generations,
    read_index,
    read_rollouts,
    shard_path,
    shards,
    write_generations,
    write_index,
    write_rollouts,
)
from rlhf_core.errors import DataError
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt, Rollout

PROMPT = Prompt("p1", (Message("user", "Hi"),), '{"answer": 3}', "world")
COMPLETION = Completion((5, 6, 2), (-0.1, -0.2, -1 / 3), "Hello.", "stop", 4, 2**31 - 1)
EPISODE = Completion(
    (5, 6, 2), (-0.1, 0.0, -1 / 3), "a", "length", 5, 1, (ActionSpan(0, 1, 4), ActionSpan(2, 3, 5, 0.5)), "", {"x": 0.5}
)
BROKEN = Completion((), (), "", "stop", 4, 2, (), "the environment crashed")


def test_generations_of_all_shards_come_back_in_order(tmp_path: Path) -> None:
    rows = [Generation(PROMPT, (1, number), COMPLETION) for number in range(3)]
    write_generations(tmp_path, 1, rows[2:])
    write_generations(tmp_path, 0, rows[:2])
    assert [path.name for path in shards(tmp_path)] == ["shard-00000.parquet", "shard-00001.parquet"]
    assert read_generations(tmp_path) == rows


def test_rollouts_come_back_with_exact_logprobs_and_components(tmp_path: Path) -> None:
    turns = replace(PROMPT, conversational=True)
    rows = [Rollout(turns, (1, 2), COMPLETION, 1 / 7, {"b": 2.0, "a": -1.0}), Rollout(PROMPT, (), EPISODE, 0.0, {})]
    write_rollouts(tmp_path, 0, rows)
    assert read_rollouts(tmp_path) == rows


def test_scores_come_back_and_are_none_in_shards_from_before_there_were_any(tmp_path: Path) -> None:
    graded = replace(EPISODE, score=0.5)
    write_rollouts(tmp_path / "new", 0, [Rollout(PROMPT, (), graded, 0.0, {}, score=1.0)])
    assert read_rollouts(tmp_path / "new") == [Rollout(PROMPT, (), graded, 0.0, {}, score=1.0)]
    old = pq.read_table(shard_path(tmp_path / "new", 0)).drop_columns(["episode_score", "score"])
    (tmp_path / "old").mkdir()
    pq.write_table(old, shard_path(tmp_path / "old", 0))
    assert read_rollouts(tmp_path / "old") == [Rollout(PROMPT, (), EPISODE, 0.0, {})]


def test_the_index_comes_back(tmp_path: Path) -> None:
    write_index(tmp_path, {"count": 3, "policy": "ab", "sampling": {"temperature": 1.0}})
    assert read_index(tmp_path) == {"count": 3, "policy": "ab", "sampling": {"temperature": 1.0}}


def test_an_interrupted_write_leaves_no_shard(tmp_path: Path) -> None:
    unwritable = Generation(PROMPT, ("not a number",), COMPLETION)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="not a number"):
        write_generations(tmp_path, 0, [unwritable])
    assert not shard_path(tmp_path, 0).exists()
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_rollout_keeps_its_reason_and_has_no_reward(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 0, [Rollout(PROMPT, (1,), BROKEN, math.nan, {}, "no reward: the environment crashed")])
    (row,) = read_rollouts(tmp_path)
    assert math.isnan(row.reward)
    assert row.invalid == "no reward: the environment crashed"
    assert row.completion == BROKEN


def test_a_folder_without_shards_or_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no shard"):
        read_generations(tmp_path)
    with pytest.raises(DataError, match="index"):
        read_index(tmp_path)
