"""Reading a reward model's scores. The trainer here scores by arithmetic, so that every number can be checked."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlhf_core.algorithms.token_math import StepReduction
from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.interfaces import Trainer
from rlhf_core.rewards.model import (
    Contract,
    ProcessContract,
    judged,
    score_with_process_reward_model,
    score_with_reward_model,
    verify_contract,
    verify_process_contract,
)
from rlhf_core.rewards.terms import score_with_ensemble
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt, TokenSample


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


def test_the_tokens_are_scored_as_sampled_without_an_added_end_token():
    scores = score_with_reward_model(TRAINER, Words(), [generation(30, 40), generation(2)], max_length=99)
    assert scores == [4 + 0.040, 3 + 0.002]


def test_a_sequence_beyond_the_contract_is_cut_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert score_with_reward_model(TRAINER, Words(), [generation(30, 40, 50)], max_length=4) == [4 + 0.040]
    assert "truncated 1 of 1 sequences to the reward model's 4 tokens" in caplog.text


def test_a_reward_model_with_another_tokenizer_or_template_is_refused():
    with pytest.raises(ConfigError, match="prompt p1"):
        score_with_reward_model(TRAINER, Words(), [generation(30, prompt_ids=(7, 5, 1))], max_length=99)


def test_the_tokens_of_an_episode_may_follow_a_prompt_that_no_template_renders():
    one = generation(30, 40, prompt_ids=(7, 5, 1))  # tools or an environment's first words behind the prompt
    spans = (ActionSpan(0, 1, 0),)
    episode = replace(one, completion=replace(one.completion, spans=spans, text="word30 word40"))
    assert score_with_reward_model(TRAINER, Words(), [episode], max_length=99) == [5 + 0.040]
    foreign = replace(one, completion=replace(one.completion, spans=spans, text="le mot"))
    with pytest.raises(ConfigError, match="decodes the tokens of the episode to another text"):
        score_with_reward_model(TRAINER, Words(), [foreign], max_length=99)


def test_probe_scores_that_hold_pass(tmp_path):
    verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, 3.009 + 9e-5]))


@pytest.mark.parametrize("moved", [3.009 + 4e-4, float("nan")])
def test_a_probe_score_that_moved_is_named(tmp_path, moved):
    with pytest.raises(ArtifactError, match=r"reward_model\.probe\[1\] = 3\.009"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, moved]))


def test_scores_that_were_computed_in_bfloat16_are_compared_less_strictly(tmp_path):
    verify_contract(TRAINER, write_contract(tmp_path, scores=[2.0, 3.015625]))  # 3 + 2^-6: a bfloat16 number
    with pytest.raises(ArtifactError, match=r"tolerance of 0\.1;"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.0, 4.0]))
    with pytest.raises(ArtifactError, match=r"tolerance of 0\.0001;"):
        verify_contract(TRAINER, write_contract(tmp_path, scores=[2.002, 3.015625]))


def test_a_folder_without_a_contract_is_not_a_reward_model(tmp_path):
    with pytest.raises(ArtifactError, match=r"contract\.json"):
        Contract.read(tmp_path)


# ---------------------------------------------------------------- process reward models

BREAK = 9


class Logits:
    """The logit of a step is the logarithm of its last token: token 1 has probability 1/2, token 3 has 3/4."""

    def step_scores(self, samples: Sequence[TokenSample]) -> list[tuple[float, ...]]:
        return [
            tuple(math.log(token) for token, mask in zip(one.token_ids, one.loss_mask, strict=True) if mask)
            for one in samples
        ]


class Breaks:
    """A step ends with the token before a 9."""

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        inner = [place for place, token in enumerate(token_ids[1:]) if token == BREAK]
        return (*inner, len(token_ids) - 1) if token_ids else ()


JUDGE = cast(Trainer, Logits())


def score(*generations: Generation, reduce: StepReduction = "min", max_length: int = 99) -> list[float]:
    return score_with_process_reward_model(JUDGE, Words(), Breaks(), generations, max_length=max_length, reduce=reduce)


@pytest.mark.parametrize(("reduce", "value"), [("min", 0.5), ("mean", 0.625), ("last", 0.75), ("product", 0.375)])
def test_the_steps_become_one_score(reduce, value):
    # steps end at token 1 (log 1 = 0, probability 1/2) and at token 3 (probability 3/4)
    assert score(generation(4, 1, BREAK, 3), generation(3), reduce=reduce) == pytest.approx([value, 0.75])


def test_only_step_ends_are_read_and_a_cut_step_at_its_last_token(caplog):
    whole = generation(1, BREAK, 3, BREAK, 19)
    assert judged(whole, Breaks(), max_length=99).loss_mask == (0, 0, 1, 0, 1, 0, 1)
    assert judged(whole, Breaks(), max_length=6) == TokenSample((7, 5, 1, 9, 3, 9), (0, 0, 1, 0, 1, 1))
    assert judged(whole, Breaks(), max_length=5) == TokenSample((7, 5, 1, 9, 3), (0, 0, 1, 0, 1))
    with caplog.at_level(logging.WARNING):
        assert score(whole, reduce="last", max_length=5) == pytest.approx([0.75])
    assert "truncated 1 of 1 sequences to the process reward model's 5 tokens" in caplog.text


def test_what_an_environment_wrote_is_no_step():
    one = generation(1, BREAK, 3, 8, BREAK, 8, 1, 3)
    # two versions of the policy wrote 1 9 3, an environment 8 9 8, the policy 1 3
    spans = (ActionSpan(0, 1, 0), ActionSpan(1, 3, 1), ActionSpan(6, 8, 1))
    episode = replace(one, completion=replace(one.completion, spans=spans))
    assert judged(episode, Breaks(), max_length=99).loss_mask == (0, 0, 1, 0, 1, 0, 0, 0, 0, 1)
    assert judged(episode, Breaks(), max_length=7).loss_mask == (0, 0, 1, 0, 1, 0, 0)  # cut in the environment's text
    assert judged(episode, Breaks(), max_length=9).loss_mask == (0, 0, 1, 0, 1, 0, 0, 0, 1)


def test_an_answer_without_tokens_is_read_where_the_prompt_ends():
    assert judged(generation(), Breaks(), max_length=99) == TokenSample((7, 5), (0, 1))
    assert score(generation()) == pytest.approx([5 / 6])


def test_a_process_model_with_another_tokenizer_or_template_is_refused():
    with pytest.raises(ConfigError, match="prompt p1"):
        score(generation(3, prompt_ids=(7, 5, 1)))


def write_process_contract(folder: Path, **changes: object) -> Path:
    content = {
        "max_length": 64,
        "separator": "\n",
        "reduce": "min",
        "probe": [[7, 1, 3], [7, 2]],
        "probe_step_ends": [[1, 2], [1]],
        "probe_step_scores": [[0.0, math.log(3)], [math.log(2)]],
    }
    (folder / "contract.json").write_text(json.dumps(content | changes))
    return folder


def test_a_contract_that_holds_is_read_as_written(tmp_path):
    contract = ProcessContract.read(write_process_contract(tmp_path))
    assert contract.probe[0] == TokenSample((7, 1, 3), (0, 1, 1))
    assert (contract.max_length, contract.separator, contract.reduce) == (64, "\n", "min")
    verify_process_contract(JUDGE, contract)


def test_a_step_score_that_moved_is_named(tmp_path):
    moved = write_process_contract(tmp_path, probe_step_scores=[[0.0, math.log(3)], [math.log(2) + 4e-4]])
    with pytest.raises(ArtifactError, match=r"process_reward_model\.probe\[2\] = 0\.693"):
        verify_process_contract(JUDGE, ProcessContract.read(moved))


@pytest.mark.parametrize("changes", [{"reduce": "max"}, {"probe_step_ends": [[1]]}, {"probe": None}])
def test_what_is_no_contract_is_refused(tmp_path, changes):
    with pytest.raises(ArtifactError, match="is not a valid contract of a process reward model"):
        ProcessContract.read(write_process_contract(tmp_path, **changes))


def test_the_contract_of_a_reward_model_is_another(tmp_path):
    write_contract(tmp_path, scores=[0.5, 0.5])
    with pytest.raises(ArtifactError, match="KeyError"):
        ProcessContract.read(tmp_path)


# ---------------------------------------------------------------- ensembles

ANSWERS = [generation(3), generation(3, 3)]


def first(generations: Sequence[Generation]) -> list[float]:
    return [1.0 * len(one.completion.token_ids) for one in generations]


def second(generations: Sequence[Generation]) -> list[float]:
    return [3.0 for _ in generations]


@pytest.mark.parametrize(
    ("reduce", "k", "scores"),
    [
        ("mean", 1.0, [2.0, 2.5]),
        ("min", 1.0, [1.0, 2.0]),
        ("mean_minus_std", 1.0, [1.0, 2.0]),  # (1, 3): mean 2, std 1; (2, 3): mean 2.5, std 0.5
        ("mean_minus_std", 2.0, [0.0, 1.5]),
    ],
)
def test_each_answer_is_reduced_over_the_members(reduce, k, scores):
    outcome = score_with_ensemble([first, second], ANSWERS, reduce=reduce, k=k)
    assert outcome.values == pytest.approx(scores)


def test_disagreement_and_the_lower_bound_are_logged_however_the_scores_are_reduced():
    logs = score_with_ensemble([first, second], ANSWERS, reduce="mean", k=1.0).logs
    assert logs["disagreement"] == (pytest.approx(1.0 + 0.5), 2)  # (1, 3) and (2, 3)
    assert logs["lower_bound"] == (pytest.approx(1.0 + 2.0), 2)
