"""The planner compared with publications: docs/cluster.md has the count and the rows that miss, as the program prints them."""

from pathlib import Path

import pytest

from benchmarks.published import OPENRLHF, PUBLISHED, SUPPORT, VERL, agrees, planned, table

MISSES = {("Qwen3 30B-A3B", 32), ("Llama 2 70B", 32), ("Qwen3 4B", 8)}
"""Model and GPUs; of Qwen3 4B the run on B200."""


@pytest.fixture(scope="module")
def pairs():
    return [(one, planned(one)) for one in PUBLISHED]


def test_the_page_has_the_count_and_the_rows_that_miss(pairs):
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
    lines = list(table(pairs))
    missed = [line for line in lines if line.endswith("| **no** |")]
    count = next(line for line in lines if line.endswith(" agree."))
    assert len(missed) == 3 and [line for line in (lines[0], *missed, count) if line not in page] == []
    assert f"plans {len(pairs)} configurations" in page


@pytest.mark.parametrize(
    ("source", "model", "work", "gpus", "card"),
    [
        (VERL, "Qwen2.5 72B", "grpo", 8, "h100"),
        (VERL, "Qwen2.5 32B", "grpo", 4, "h100"),
        (OPENRLHF, "Mixtral 8x7B", "sft", 8, "a100"),
        (SUPPORT, "Llama 2 70B", "ppo", 16, "a100"),
        (OPENRLHF, "Llama 3 8B", "ppo", 8, "a100"),
        (SUPPORT, "Llama 2 7B", "ppo", 4, "rtx4090"),
    ],
)
def test_sizes_that_others_run_fit(pairs, source, model, work, gpus, card):
    [made] = [
        made
        for one, made in pairs
        if (one.source, one.model, one.work, one.gpus, one.card) == (source, model, work, gpus, card)
    ]
    assert made.fits, [(load.where, load.total / 1e9, load.limit / 1e9) for load in made.loads]


def test_all_but_the_rows_that_are_known_to_miss_agree(pairs):
    missed = [(one, made) for one, made in pairs if not agrees(one, made)]
    assert {(one.model, one.gpus) for one, _ in missed} == MISSES and len(missed) == len(MISSES)
    assert {one.card for one, _ in missed if one.model == "Qwen3 4B"} == {"b200"}
