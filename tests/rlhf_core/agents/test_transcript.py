from __future__ import annotations

import pytest

from rlhf_core.agents.conversation import Transcript, turn_seed
from rlhf_core.types import ActionSpan, Completion


def said(*token_ids: int) -> Completion:
    return Completion(token_ids, (-0.5,) * len(token_ids), "", "stop", 4, 0)


def decode(token_ids: object) -> str:
    return str(token_ids)


def test_text_fits_only_if_a_token_can_be_sampled_after_it() -> None:
    text = Transcript((1, 2), seed=7, limit=8)
    text.add_action(said(3, 4))
    assert text.room == 4 and not text.add_text((5, 5, 5, 5))
    assert text.add_text((5, 5, 5)) and text.request(9).max_tokens == 1
    assert text.request(9).prompt_ids == (1, 2, 3, 4, 5, 5, 5)


def test_an_episode_ends_with_its_last_sampled_token() -> None:
    text = Transcript((1, 2), seed=7, limit=20)
    text.add_action(said(3, 4))
    text.earn(0.5)
    text.add_text((5, 5))
    played = text.result(decode, finish_reason="length", failure="it hung")
    assert played.prompt_ids == (1, 2) and played.completion.token_ids == (3, 4)
    assert played.completion.spans == (ActionSpan(0, 2, 4, 0.5),)
    assert (played.completion.failure, played.completion.seed, played.completion.policy_version) == ("it hung", 7, 4)


def test_an_episode_that_failed_before_its_first_turn_has_no_tokens() -> None:
    completion = Transcript((1, 2), seed=7, limit=20).result(decode, finish_reason="stop", failure="no").completion
    assert completion.token_ids == () and completion.spans == ()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_finite(reward: float) -> None:
    text = Transcript((1, 2), seed=7, limit=20)
    text.add_action(said(3))
    with pytest.raises(ValueError, match="must be finite"):
        text.earn(reward)


def test_every_turn_has_a_seed_of_its_own() -> None:
    assert turn_seed(7, 0) == 7
    assert len({turn_seed(7, turn) for turn in range(50)} | {turn_seed(8, turn) for turn in range(50)}) == 100
