"""Reading a reward model's scores. The trainer here scores by arithmetic, so that every number can be checked."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.interfaces import Trainer
from rlhf_core.rewards.model import Contract, score_with_reward_model, verify_contract
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt


class Arithmetic:
    """Scores a sequence by its length plus a thousandth of its last token."""

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        return [len(sequence) + sequence[-1] / 1000 for sequence in sequences]


class Words:
    """Renders a conversation to the lengths of its messages."""

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(len(message.content) for message in messages)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"word{token}" for token in ids)


TRAINER = cast(Trainer, Arithmetic())
PROMPT = Prompt("p1", (Message("system", "be kind"), Message("user", "hello")), "", "test")  # renders to (7, 5)


def generation(*token_ids: int, prompt_ids: tuple[int, ...] = (7, 5)) -> Generation:
    return Generation(PROMPT, prompt_ids, Completion(token_ids, (-1.0,) * len(token_ids), "text", "length", 0, 0))


def write_contract(folder: Path, *, scores: list[float]) -> Contract:
    content = {"max_length": 4, "eos_token_id": 2, "probe": [[1, 2], [1, 2, 9]], "probe_scores": scores}
    (folder / "contract.json").write_text(json.dumps(content))
    return Contract.read(folder)


def test_the_tokens_are_scored_as_sampled_without_an_added_end_token() -> None:
    scores = score_with_reward_model(TRAINER, Words(), [generation(30, 40), generation(2)], max_length=99)
    assert scores == [4 + 0.040, 3 + 0.002]


def test_a_sequence_beyond_the_contract_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert score_with_reward_model(TRAINER, Words(), [generation(30, 40, 50)], max_length=4) == [4 + 0.040]
    assert "truncated 1 of 1 sequences to the reward model's 4 tokens" in caplog.text


def test_a_reward_model_with_another_tokenizer_or_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt p1"):
        score_with_reward_model(TRAINER, Words(), [generation(30, prompt_ids=(7, 5, 1))], max_length=99)


def test_the_tokens_of_an_episode_may_follow_a_prompt_that_no_template_renders() -> None:
    one = generation(30, 40, prompt_ids=(7, 5, 1))  # tools or an environment's first words behind the prompt
    spans = (ActionSpan(0, 1, 0),)
    episode = replace(one, completion=replace(one.completion, spans=spans, text="word30 word40"))
    assert score_with_reward_model(TRAINER, Words(), [episode], max_length=99) == [5 + 0.040]
    foreign = replace(one, completion=replace(one.completion, spans=spans, text="le mot"))
    with pytest.raises(ConfigError, match="decodes the tokens of the episode to another text"):
        score_with_reward_model(TRAINER, Words(), [foreign], max_length=99)


def test_probe_scores_that_hold_pass(tmp_path: Path) -> None:
    verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, 3.009 + 9e-5]))


@pytest.mark.parametrize("moved", [3.009 + 4e-4, float("nan")])
def test_a_probe_score_that_moved_is_named(tmp_path: Path, moved: float) -> None:
    with pytest.raises(ArtifactError, match=r"reward_model\.probe\[1\] = 3\.009"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, moved]))


def test_scores_that_were_computed_in_bfloat16_are_compared_less_strictly(tmp_path: Path) -> None:
    verify_contract(TRAINER, write_contract(tmp_path, scores=[2.0, 3.015625]))  # 3 + 2^-6: a bfloat16 number
    with pytest.raises(ArtifactError, match=r"tolerance of 0\.1;"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.0, 4.0]))
    with pytest.raises(ArtifactError, match=r"tolerance of 0\.0001;"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, 3.015625]))


def test_a_folder_without_a_contract_is_not_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"contract\.json"):
        Contract.read(tmp_path)
