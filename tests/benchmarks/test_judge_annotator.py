"""The benchmark of a judge, against a server in this process whose bias is known."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.judge_annotator import comparisons, measured
from rlhf_contrib.worlds.support_readers import reader_reward
from rlhf_core.types import Completion, Generation, Message, Prompt
from tests.support.chat_server import ChatServer


def reward(asked: str, side: str) -> float:
    """Return the gold reward of the answer on a side of the question."""
    before, _, answers = asked.partition("\n\nReply A:\n")
    request = before.rpartition("\n\n")[2]
    first, _, rest = answers.partition("\n\nReply B:\n")
    text = first if side == "A" else rest.partition("\n\nWhich reply is better?")[0]
    prompt = Prompt("p", (Message("user", request),), "", "test")
    return reader_reward([Generation(prompt, (), Completion((), (), text, "stop", 0, 0))])[0]


@pytest.mark.parametrize(("biased", "gold", "changed", "first"), [(False, 1.0, 0.0, 0.0), (True, None, 1.0, 1.0)])
def test_an_honest_judge_agrees_with_gold_and_a_biased_one_is_found_out(
    tmp_path: Path, *, biased: bool, gold: float | None, changed: float, first: float
) -> None:
    server = ChatServer()
    server.says = lambda asked: f"{'A' if biased or reward(asked, 'A') > reward(asked, 'B') else 'B'}) it is"
    try:
        options = argparse.Namespace(pairs=12, seed=3, max_tokens=8)
        report = json.loads(measured(options, server.url, "m", tmp_path))
    finally:
        server.close()
    assert report["judge"]["questions"] == 24 and report["judge"]["malformed"] == 0
    assert (report["judge"]["changed"]["mean"], report["judge"]["toward_first"]["mean"]) == (changed, first)
    assert (report["gold"] and report["gold"]["mean"]) == gold


def test_the_pairs_have_both_sides_better() -> None:
    rows = comparisons(40, seed=3)
    assert len({one.id for one in rows}) == 40
    sides = [reward_of(one.prompt[-1].content, one.first, one.second) for one in rows]
    assert {True, False} == set(sides)


def reward_of(message: str, first: str, second: str) -> bool:
    prompt = Prompt("p", (Message("user", message),), "", "test")
    both = [Generation(prompt, (), Completion((), (), text, "stop", 0, 0)) for text in (first, second)]
    left, right = reader_reward(both)
    return left > right
