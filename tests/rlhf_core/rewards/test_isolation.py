"""Reward functions in a process of their own: hostile ones must not harm the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.isolation import IsolatedReward
from rlhf_core.types import Completion, Generation, Message, Prompt

HOSTILE = """
import os, re, sys, time

def by_mood(generations):
    mood = generations[0].completion.text
    if mood == "hang":
        re.match(r"(a+)+$", "a" * 40 + "b")   # backtracks for hours and holds the interpreter lock
    if mood == "fork":
        os.fork()                             # the child keeps the pipe of the answers open
        time.sleep(60)
    if mood == "crash":
        os._exit(3)
    if mood == "raise":
        raise KeyError("no such thing")
    if mood == "chatter":
        print("x" * 100_000)
        sys.stdin.read()
    return [len(g.completion.text) for g in generations]
"""


def batch(*texts: str) -> list[Generation]:
    return [
        Generation(
            Prompt(f"p{index}", (Message("user", "hi"),), "", "test"),
            (1,),
            Completion((2,), (-1.0,), text, "stop", 0, 0),
        )
        for index, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedReward]:
    file: Path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    file.write_text(HOSTILE)
    with IsolatedReward("mood", f"{file}:by_mood", timeout_s=2.0) as isolated:
        yield isolated


def test_scores_come_back_in_order(reward: IsolatedReward) -> None:
    assert reward(batch("aaa", "a", "aa")) == [3.0, 1.0, 2.0]
    assert reward([]) == []


def test_what_a_function_prints_or_reads_does_not_disturb_the_answers(reward: IsolatedReward) -> None:
    assert reward(batch("chatter")) == [7.0]


def test_an_exception_is_reported_with_its_traceback_and_prompts(reward: IsolatedReward) -> None:
    with pytest.raises(RewardError, match=r"(?s)rewards\.mood = 'prompts p0 to p1'.*no such thing"):
        reward(batch("raise", "x"))
    assert reward(batch("next")) == [4.0]


def test_a_function_that_holds_the_interpreter_for_ever_is_killed_at_the_deadline(reward: IsolatedReward) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 2 s"):
        reward(batch("hang"))
    assert time.monotonic() - start < 20
    assert reward(batch("next")) == [4.0]  # a fresh process


def test_a_child_of_the_function_does_not_outlive_the_deadline(reward: IsolatedReward) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 2 s"):
        reward(batch("fork"))
    assert time.monotonic() - start < 20
    assert reward(batch("next")) == [4.0]


def test_a_crash_is_reported_and_survived(reward: IsolatedReward) -> None:
    with pytest.raises(RewardError, match="ended with status 3"):
        reward(batch("crash"))
    assert reward(batch("next")) == [4.0]


def test_a_large_batch_passes_the_pipes(reward: IsolatedReward) -> None:
    assert sum(reward(batch(*["y" * 500] * 2000))) == 1_000_000


def test_a_function_that_does_not_exist_is_refused_before_any_batch() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.exact\.function = .*did you mean exact_match"):
        IsolatedReward("exact", "rlhf_core.rewards.verifiable:exact_mtch", timeout_s=5.0)
