"""What a loss on preferences must know of its whole step: AOT's order, KTO's mean KL; and LD-DPO's sums."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss, RewardShift
from rlhf_core.algorithms.preference.dpo import AOTLoss, DPOLoss
from rlhf_core.sequences import Sequences
from rlhf_core.training.fit import Carried
from rlhf_core.training.objectives.preference import (
    BCOObjective,
    KTOObjective,
    PairObjective,
    RunningShift,
    answer_logprob,
)
from rlhf_core.types import AnswerSample, PreferenceSample, TokenSample

TOKEN = TokenSample((1, 2), (0, 1))
CHOSEN, REJECTED = [-3.0, -9.0, -5.0], [-4.0, -5.0, -8.0]
REF_CHOSEN, REF_REJECTED = [-4.0, -6.0, -5.5], [-4.5, -8.0, -5.0]
PAIRS = [PreferenceSample(TOKEN, TOKEN, c, r) for c, r in zip(REF_CHOSEN, REF_REJECTED, strict=True)]


class Says:
    """A trainer whose log-probs are given: one number per sample, on its second token."""

    def __init__(self, sums: Sequence[float]) -> None:
        self._sums = sums

    def logprobs(self, samples: Sequences, *, temperature: float) -> NDArray[np.float32]:
        assert len(samples) == len(self._sums)
        assert temperature == 1.0
        return np.array([number for value in self._sums for number in (0.0, value)], np.float32)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("paired", [True, False])
def test_dpo_on_matched_pairs_is_aot_on_the_whole_step(paired):
    # paired: margins 1, -4, 3 and the reference's 0.5, 2, -0.5: sorted differences -4 + 0.5, 1 - 0.5, 3 - 2
    # else: log-ratios 1, -3, 0.5 and 0.5, 3, -3: sorted -3 + 3, 0.5 - 0.5, 1 - 3
    differences = [-3.5, 0.5, 1.0] if paired else [0.0, 0.0, -2.0]
    expected = sum(softplus(-0.1 * difference) for difference in differences) / 3
    rows = AOTLoss(paired=paired).rearranged(PAIRS, CHOSEN, REJECTED)
    if paired:
        logits = [c - r - (row.ref_chosen_logprob - row.ref_rejected_logprob)
                  for c, r, row in zip(CHOSEN, REJECTED, rows, strict=True)]  # fmt: skip
        assert sum(softplus(-0.1 * logit) for logit in logits) / 3 == pytest.approx(expected, rel=1e-12)
        assert [row.ref_rejected_logprob for row in rows] == REF_REJECTED  # so that the rewards stay of their size
    else:
        assert [row.ref_chosen_logprob for row in rows] == [-6.0, -5.5, -4.0]  # log-ratios -3, 0.5, 1
        assert [row.ref_rejected_logprob for row in rows] == [-5.0, -4.5, -8.0]  # log-ratios -3, 0.5, 3


def test_aot_looks_ahead_with_the_policys_own_logprobs_and_the_others_do_not():
    both = [value for pair in zip(CHOSEN, REJECTED, strict=True) for value in pair]
    objective = PairObjective(loss=AOTLoss(), nll_coef=0.0, length_alpha=1.0)
    trainer: Any = Says(both)
    assert objective.look_ahead(trainer, PAIRS) == (objective, AOTLoss().rearranged(PAIRS, CHOSEN, REJECTED))
    plain = PairObjective(loss=DPOLoss(), nll_coef=0.0, length_alpha=1.0)
    assert plain.look_ahead(trainer, PAIRS) == (plain, PAIRS)


@pytest.mark.parametrize(("sums", "kl"), [([-1.0, -3.0], 0.5), ([-4.0, -3.0], 0.0)])
def test_kto_takes_the_mean_log_ratio_of_the_step_and_never_less_than_zero(sums, kl):
    rows = [AnswerSample(TOKEN, True, -2.0, TOKEN, -2.0), AnswerSample(TOKEN, False, -2.0, TOKEN, -3.0)]
    trainer: Any = Says(sums)
    objective, samples = KTOObjective(loss=KTOLoss(), kl=9.0).look_ahead(trainer, rows)
    # (-1 + 2 - 3 + 3) / 2 = 0.5 ; (-4 + 2 - 3 + 3) / 2 = -1, clamped
    assert objective == KTOObjective(loss=KTOLoss(), kl=kl)
    assert samples == rows


def test_tokens_beyond_the_other_answers_length_count_alpha():
    sample, other = TokenSample((1, 2, 3, 4), (0, 1, 1, 1)), TokenSample((1, 2, 9, 9, 9, 9), (0, 1, 0, 0, 0, 0))
    # one trained token in the other answer: -1 counts whole, -2 and -4 a half
    assert answer_logprob((0.0, -1.0, -2.0, -4.0), sample, other, alpha=0.5) == -4.0
    assert answer_logprob((0.0, -1.0, -2.0, -4.0), sample, other, alpha=1.0) == -7.0


def test_bco_carries_its_means_from_step_to_step_and_through_a_checkpoint():
    rows = [AnswerSample(TOKEN, True, -2.0, TOKEN, -2.0), AnswerSample(TOKEN, False, -2.0, TOKEN, -2.0)]
    loss = BCOLoss(beta=0.5, shift_decay=0.75)
    ahead = RunningShift(BCOObjective(loss))
    trainer: Any = Says([-1.0, -5.0])
    assert ahead.evaluated(trainer, rows)[0].shift == RewardShift(0.5, -1.5), "before the first step: of these rows"
    assert ahead.state() == {"desirable": None, "undesirable": None}, "and nothing is remembered of them"
    # rewards 0.5 (-1 + 2) = 0.5 and 0.5 (-5 + 2) = -1.5; then 0.5 (3 + 2) = 2.5 and 0.5 (1 + 2) = 1.5
    assert ahead(trainer, rows)[0].shift.delta == -0.5
    later: Any = Says([3.0, 1.0])
    objective, samples = ahead(later, rows)
    assert objective.shift == RewardShift(0.75 * 0.5 + 0.25 * 2.5, 0.75 * -1.5 + 0.25 * 1.5) and samples == rows
    assert ahead.evaluated(trainer, rows)[0] == objective
    resumed = RunningShift(BCOObjective(loss))
    resumed.restore(json.loads(json.dumps(ahead.state())))
    assert resumed(trainer, rows)[0] == ahead(trainer, rows)[0]
    assert isinstance(ahead, Carried) and not isinstance(PairObjective(DPOLoss(), 0.0, 1.0).look_ahead, Carried)
