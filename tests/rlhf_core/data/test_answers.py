"""Answers as messages: what an environment wrote is never an assistant's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_core.data.chat import answer_message
from rlhf_core.errors import DataError
from rlhf_core.types import ActionSpan, Message
from tests.support.workshop import rollout


def test_an_answer_is_one_message_of_the_assistant_whoever_of_the_policy_s_versions_wrote_it() -> None:
    one = rollout("p", "text", 1.0, tokens=4)
    in_rounds = replace(one.completion, spans=(ActionSpan(0, 2, 0), ActionSpan(2, 4, 1)))
    for completion in (one.completion, in_rounds):
        assert answer_message(replace(one, completion=completion)) == Message("assistant", "text")


def test_an_episode_is_no_answer() -> None:
    one = rollout("p", "move, board, move", 1.0, tokens=4)
    episode = replace(one, completion=replace(one.completion, spans=(ActionSpan(0, 1, 0), ActionSpan(3, 4, 0))))
    with pytest.raises(DataError, match="rollouts = 'p': 2 of its 4 tokens come from an environment"):
        answer_message(episode)
