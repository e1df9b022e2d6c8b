"""Readers of the support world judge a reply by the message, as the gold reward judges it by the facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_core.config.data import SupportWorld
from rlhf_core.data.worlds.support import gold_reward, make_tables
from rlhf_core.data.worlds.support_readers import read_facts, reader_reward
from rlhf_core.errors import RewardError
from rlhf_core.types import Completion, Generation


def test_a_reader_gives_every_reply_the_gold_reward_without_its_facts() -> None:
    tables, _ = make_tables(SupportWorld(demonstrations=64, preferences=8, prompts=8, eval_prompts=64), seed=3)
    replies = [row.messages[-1].content for row in tables.demonstrations]
    judged = [
        Generation(prompt, (), Completion((), (), reply, "stop", 0, 0))
        for prompt, reply in zip(tables.eval_prompts, replies, strict=True)
    ]
    blind = [replace(one, prompt=replace(one.prompt, label="")) for one in judged]
    assert reader_reward(blind) == gold_reward(judged)
    assert len(set(reader_reward(blind))) > 3


def test_another_message_is_refused() -> None:
    with pytest.raises(RewardError, match="is not a customer's message of the support world"):
        read_facts("What is 2 + 2?")
