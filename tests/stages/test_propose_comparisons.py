"""The stage that proposes comparisons: what it writes, counts and refuses."""

from pathlib import Path

import pytest

from rlhf_core.annotation.proposing import read_comparisons
from rlhf_core.data.shards import write_index, write_rollouts
from rlhf_core.errors import DataError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Rollout, RolloutsRef
from stages.propose_comparisons import ProposeComparisonsConfig
from tests.support.workshop import Workshop, rollout


def rollouts(store: ArtifactStore, folder: Path, rows: list[Rollout]) -> RolloutsRef:
    write_rollouts(folder, 0, rows)
    write_index(folder, {"policy": "p"})
    return store.external(RolloutsRef, folder)


def answers(policy: str, prompts: int = 20) -> list[Rollout]:
    return [
        rollout(f"p{n}", f"{policy} {text} {n}", float(value))
        for n in range(prompts)
        for value, text in enumerate("ab")
    ]


def test_answers_of_two_policies_are_compared_within_the_budget(tmp_path, store):
    inputs = {"rollouts": {name: rollouts(store, tmp_path / name, answers(name)) for name in ("sft", "ppo")}}
    shop = Workshop(store)
    config = ProposeComparisonsConfig(budget=30, pairs_per_prompt=2, repeat_fraction=0.1, attention_fraction=0.1)
    ref, decision = shop.run("propose_comparisons", config, inputs)
    rows = read_comparisons(store.path(ref))
    assert sum(row.trains for row in rows) == 30
    assert (sum(bool(row.repeats) for row in rows), sum(bool(row.expected) for row in rows)) == (3, 3)
    assert {"sft", "ppo"} <= {row.first_policy for row in rows}
    metrics = shop.metrics(decision)
    assert (metrics["prompts"], metrics["candidates"], metrics["pairs"], metrics["comparisons"]) == (20, 120, 30, 36)


def test_truncated_answers_are_not_shown_unless_wanted(tmp_path, store):
    rows = [rollout("p", "whole", 1.0), rollout("p", "cut", 0.0, finish_reason="length")]
    inputs = {"rollouts": {"sft": rollouts(store, tmp_path / "sft", rows)}}
    with pytest.raises(DataError, match="the answers to 1 prompts hold no two different valid ones; sample more"):
        Workshop(store).run("propose_comparisons", ProposeComparisonsConfig(), inputs)
    ref, _ = Workshop(store).run("propose_comparisons", ProposeComparisonsConfig(drop_truncated=False), inputs)
    assert len(read_comparisons(store.path(ref))) == 1
