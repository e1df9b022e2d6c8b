"""Results by content, in memory and in a file that a kill may cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.rewards.batches import ResultCache
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt

PROMPT = Prompt("p", (Message("user", "2+2?"),), "4", "sums")
ANSWER = Completion((5, 6), (-0.5, -0.1), "4", "stop", 3, 7)
ONE = Generation(PROMPT, (1,), ANSWER)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, prompt=replace(PROMPT, label="5")),
        replace(ONE, prompt=replace(PROMPT, messages=(Message("user", "2+3?"),))),
        replace(ONE, prompt=replace(PROMPT, messages=(Message("system", "2+2?"),))),
        replace(ONE, completion=replace(ANSWER, text="5")),
        replace(ONE, completion=replace(ANSWER, token_ids=(5, 7))),
        replace(ONE, completion=replace(ANSWER, finish_reason="length")),
        replace(ONE, completion=replace(ANSWER, spans=(ActionSpan(0, 1, 3, 0.5),))),
        replace(ONE, completion=replace(ANSWER, extras={"turns": 2.0})),
    ],
)
def test_whatever_a_reward_can_see_is_part_of_the_key(other: Generation) -> None:
    cache = ResultCache("one", None)
    assert cache.key(other) != cache.key(ONE)


def test_who_sampled_the_answer_is_not_and_which_reward_is() -> None:
    cache = ResultCache("one", None)
    again = replace(ANSWER, seed=8, policy_version=4, logprobs=(-0.2, -0.3))
    assert cache.key(replace(ONE, completion=again)) == cache.key(ONE)
    assert ResultCache("two", None).key(ONE) != cache.key(ONE)


def test_a_file_cut_off_by_a_kill_is_read_up_to_there_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "work" / "cache.jsonl"
    cache = ResultCache("one", path)
    cache.add({"a": 0.1, "b": None})
    cache.add({"c": 3.0})
    path.write_text(path.read_text()[:-3])
    second = ResultCache("one", path)
    assert [second.known(key) for key in "abc"] == [True, True, False]
    assert (second.value("a"), second.value("b")) == (0.1, None)
    second.add({"c": 4.0})
    assert ResultCache("one", path).value("c") == 4.0


def test_a_file_from_before_there_were_scores_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    path.write_text('\n["a", 0.5]')
    cache = ResultCache("one", path)
    assert (cache.value("a"), cache.score("a")) == (0.5, None)
    cache.add({"b": 1.0}, {"b": 0.25})
    again = ResultCache("one", path)
    assert [(again.value(key), again.score(key)) for key in "ab"] == [(0.5, None), (1.0, 0.25)]
