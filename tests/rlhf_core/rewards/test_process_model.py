"""Reading a process reward model's scores. The trainer here judges by arithmetic, so that every number can be checked."""

from __future__ import annotations

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
    ProcessContract,
    judged,
    score_with_process_reward_model,
    verify_process_contract,
)
from rlhf_core.types import ActionSpan, Generation, TokenSample
from tests.rlhf_core.rewards.test_model import Words, generation

BREAK = 9


class Arithmetic:
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


TRAINER = cast(Trainer, Arithmetic())


def score(*generations: Generation, reduce: StepReduction = "min", max_length: int = 99) -> list[float]:
    return score_with_process_reward_model(
        TRAINER, Words(), Breaks(), generations, max_length=max_length, reduce=reduce
    )


@pytest.mark.parametrize(("reduce", "value"), [("min", 0.5), ("mean", 0.625), ("last", 0.75), ("product", 0.375)])
def test_the_steps_become_one_score(reduce: StepReduction, value: float) -> None:
    # steps end at token 1 (log 1 = 0, probability 1/2) and at token 3 (probability 3/4)
    assert score(generation(4, 1, BREAK, 3), generation(3), reduce=reduce) == pytest.approx([value, 0.75])


def test_only_step_ends_are_read_and_a_cut_step_at_its_last_token(caplog: pytest.LogCaptureFixture) -> None:
    whole = generation(1, BREAK, 3, BREAK, 19)
    assert judged(whole, Breaks(), max_length=99).loss_mask == (0, 0, 1, 0, 1, 0, 1)
    assert judged(whole, Breaks(), max_length=6) == TokenSample((7, 5, 1, 9, 3, 9), (0, 0, 1, 0, 1, 1))
    assert judged(whole, Breaks(), max_length=5) == TokenSample((7, 5, 1, 9, 3), (0, 0, 1, 0, 1))
    with caplog.at_level(logging.WARNING):
        assert score(whole, reduce="last", max_length=5) == pytest.approx([0.75])
    assert "truncated 1 of 1 sequences to the process reward model's 5 tokens" in caplog.text


def test_what_an_environment_wrote_is_no_step() -> None:
    one = generation(1, BREAK, 3, 8, BREAK, 8, 1, 3)
    # two versions of the policy wrote 1 9 3, an environment 8 9 8, the policy 1 3
    spans = (ActionSpan(0, 1, 0), ActionSpan(1, 3, 1), ActionSpan(6, 8, 1))
    episode = replace(one, completion=replace(one.completion, spans=spans))
    assert judged(episode, Breaks(), max_length=99).loss_mask == (0, 0, 1, 0, 1, 0, 0, 0, 0, 1)
    assert judged(episode, Breaks(), max_length=7).loss_mask == (0, 0, 1, 0, 1, 0, 0)  # cut in the environment's text
    assert judged(episode, Breaks(), max_length=9).loss_mask == (0, 0, 1, 0, 1, 0, 0, 0, 1)


def test_an_answer_without_tokens_is_read_where_the_prompt_ends() -> None:
    assert judged(generation(), Breaks(), max_length=99) == TokenSample((7, 5), (0, 1))
    assert score(generation()) == pytest.approx([5 / 6])


def test_a_model_with_another_tokenizer_or_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt p1"):
        score(generation(3, prompt_ids=(7, 5, 1)))


def write_contract(folder: Path, **changes: object) -> Path:
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


def test_a_contract_that_holds_is_read_as_written(tmp_path: Path) -> None:
    contract = ProcessContract.read(write_contract(tmp_path))
    assert contract.probe[0] == TokenSample((7, 1, 3), (0, 1, 1))
    assert (contract.max_length, contract.separator, contract.reduce) == (64, "\n", "min")
    verify_process_contract(TRAINER, contract)


def test_a_step_score_that_moved_is_named(tmp_path: Path) -> None:
    moved = write_contract(tmp_path, probe_step_scores=[[0.0, math.log(3)], [math.log(2) + 4e-4]])
    with pytest.raises(ArtifactError, match=r"process_reward_model\.probe\[2\] = 0\.693"):
        verify_process_contract(TRAINER, ProcessContract.read(moved))


@pytest.mark.parametrize("changes", [{"reduce": "max"}, {"probe_step_ends": [[1]]}, {"probe": None}])
def test_what_is_no_contract_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ArtifactError, match="is not a valid contract of a process reward model"):
        ProcessContract.read(write_contract(tmp_path, **changes))


def test_the_contract_of_a_reward_model_is_another(tmp_path: Path) -> None:
    content = {"max_length": 4, "probe": [[1, 2]], "probe_scores": [0.5]}
    (tmp_path / "contract.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="KeyError"):
        ProcessContract.read(tmp_path)
