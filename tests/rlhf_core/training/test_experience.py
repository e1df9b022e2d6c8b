"""Token rewards, advantages and training rows, with the arithmetic in the comments."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.advantage.group import (
    DrGRPOAdvantage,
    GRPOAdvantage,
    OPOAdvantage,
    ReinforcePPBaselineAdvantage,
    RLOOAdvantage,
)
from rlhf_core.algorithms.advantage.token import GAEAdvantage, ReinforcePPAdvantage
from rlhf_core.algorithms.policy.clip import ClipCovLoss, ClipLoss
from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError
from rlhf_core.sequences import Sequences
from rlhf_core.training.experience import (
    ALL,
    Experience,
    StepAdvantages,
    TeacherLogprobs,
    add_distillation,
    drop_by_loss,
    estimate_in_blocks,
    estimate_step,
    split_into_blocks,
    token_rewards,
)
from rlhf_core.types import ActionSpan, Completion, Message, Prompt, Rollout

PROMPT = Prompt(id="p", messages=(Message("user", "hi"),), label="", source="test")


def rollout(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], reward: float) -> Rollout:
    logprobs = tuple(-0.5 for _ in token_ids)
    completion = Completion(token_ids, logprobs, "text", "stop", policy_version=0, seed=1)
    return Rollout(PROMPT, prompt_ids, completion, reward, {"gold": reward})


def experience(*rollouts: Rollout, old: float, ref: float, value: float) -> Experience:
    made = Experience.of(rollouts)
    numbers = {"old_logprobs": old, "ref_logprobs": ref, "old_values": value}
    return measured(made, {name: number * made.sequences.loss_mask for name, number in numbers.items()})


def measured(made: Experience, numbers: dict[str, Any]) -> Experience:
    """Return the experience with these numbers of every token."""
    flat = {name: np.asarray(values, np.float32) for name, values in numbers.items()}
    return replace(made, sequences=made.sequences.with_fields(**flat))


class Advantages(NamedTuple):
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor
    metrics: dict[str, float]


def estimate_advantages(made: Experience, **settings: Any) -> Advantages:
    """Return the advantages of a step in one block."""
    [one], metrics = estimate_in_blocks(made, [ALL], **settings)
    return Advantages(*one, metrics)


def estimated(made: Experience, config: PPOConfig, greedy: tuple[float, ...] = ()) -> StepAdvantages:
    """Return the advantages of a step as PPO asks a worker for them."""
    return estimate_step(
        made.sequences,
        answers=made.answers,
        config=config,
        teachers=made.teachers,
        function=None,
        turn_weights=[0.0] * len(made.answers),
        greedy=greedy,
        kl_coef=config.kl.coef,
        seed=1,
    )


GAE = GAEAdvantage(gae_lambda=1.0, whiten=False)


def test_a_rollout_becomes_one_sequence_whose_actions_are_the_completion():
    made = Sequences.of_answers([rollout((1, 2), (3, 4, 5), 1.0), rollout((8,), (9,), 0.0)])
    assert all(one.flags.contiguous for one in made.arrays)  # Ray maps only such ones without a copy
    assert made.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert made.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert made.offsets.tolist() == [0, 5, 7]
    assert made.fields["rollout_logprobs"].tolist() == [0.0, 0.0, -0.5, -0.5, -0.5, 0.0, -0.5]


def test_an_environments_tokens_are_no_actions_and_the_score_stands_on_the_last_action():
    spans = (ActionSpan(0, 1, 0), ActionSpan(2, 3, 0))
    completion = Completion((3, 4, 5, 6), (-0.5, 0.0, -0.5, 0.0), "text", "stop", 0, 1, spans)
    made = Sequences.of_answers([Rollout(PROMPT, (1, 2), completion, 2.0, {})])
    assert made.loss_mask.tolist() == [0, 0, 1, 0, 1, 0]
    rewards_BT = token_rewards(torch.tensor([2.0]), torch.ones(1, 4), torch.tensor([[1, 0, 1, 0]]), kl_coef=0.1)
    assert rewards_BT.tolist() == [pytest.approx([-0.1, 0.0, 1.9, 0.0])]


def test_padded_values_leave_the_prompt_out_and_have_zeros_on_the_right():
    made = experience(rollout((1, 2), (3, 4), 0.0), rollout((1,), (3,), 0.0), old=-1.0, ref=0.0, value=0.0)
    padded_BT = made.pad(made.sequences.fields["old_logprobs"])
    assert padded_BT.tolist() == [[-1.0, -1.0], [-1.0, 0.0]]
    assert made.flatten(padded_BT).tolist() == [0.0, 0.0, -1.0, -1.0, 0.0, -1.0]


def test_the_score_lands_on_the_last_valid_token_and_kl_on_every_one():
    mask_BT = torch.tensor([[1.0, 1.0, 0.0]])
    kl_BT = torch.tensor([[0.5, 0.25, 9.0]])
    rewards_BT = token_rewards(torch.tensor([2.0]), kl_BT, mask_BT, kl_coef=0.1)
    # -0.1 * 0.5 ; -0.1 * 0.25 + 2 ; padding carries nothing
    torch.testing.assert_close(rewards_BT, torch.tensor([[-0.05, 1.975, 0.0]]))


def test_gae_with_lambda_one_is_return_minus_value():
    made = experience(rollout((1,), (2, 3), 1.0), old=-1.0, ref=-1.5, value=0.25)
    result = estimate_advantages(made, estimator=GAE, group_size=1, kl_coef=0.1)
    # d = -1 - (-1.5) = 0.5 a token: rewards are -0.05 and 0.95, returns 0.90 and 0.95, values 0.25
    torch.testing.assert_close(result.returns_BT, torch.tensor([[0.90, 0.95]]))
    torch.testing.assert_close(result.advantages_BT, torch.tensor([[0.65, 0.70]]))
    assert result.metrics["kl/per_sequence"] == pytest.approx(1.0)
    assert result.metrics["reward/mean"] == 1.0


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        (GRPOAdvantage(), -(0.5**0.5), 0.5**0.5),  # mean 1, sample standard deviation sqrt(2)
        (DrGRPOAdvantage(), -1.0, 1.0),  # 0 and 2 about their mean
        (RLOOAdvantage(), -2.0, 2.0),
        (OPOAdvantage(), -2 / 3, 4 / 3),  # lengths 2 and 1: baseline (0 * 2 + 2 * 1) / 3 = 2/3
        # -1, -1 and 1 over three tokens: mean -1/3, variance 8/9
        (ReinforcePPBaselineAdvantage(), (-1 + 1 / 3) / (8 / 9) ** 0.5, (1 + 1 / 3) / (8 / 9) ** 0.5),
        # the returns of the tokens are 0, 0 and 2: mean 2/3, variance 8/9
        (ReinforcePPAdvantage(), (-2 / 3) / (8 / 9) ** 0.5, (4 / 3) / (8 / 9) ** 0.5),
    ],
    ids=lambda value: value.type if hasattr(value, "type") else "",
)
def test_every_estimator_without_a_value_model(estimator, first, second):
    made = experience(rollout((1,), (2, 3), 0.0), rollout((1,), (2,), 2.0), old=-1.0, ref=-1.0, value=0.0)
    result = estimate_advantages(made, estimator=estimator, group_size=2, kl_coef=0.0)
    torch.testing.assert_close(result.advantages_BT, torch.tensor([[first, first], [second, 0.0]]))
    assert result.metrics.get("reward/zero_variance_groups", 0.0) == 0.0


def test_equal_scores_make_a_group_without_variance_whatever_the_penalty():
    group = [rollout((1,), (2, 3), 1.0), rollout((1,), (2,), 1.0)]
    made = experience(*group, old=-1.0, ref=-1.5, value=0.0)
    result = estimate_advantages(made, estimator=RLOOAdvantage(), group_size=2, kl_coef=0.1)
    # Equal scores cancel; 0.5 of KL a token is 0.05 off at each, and the first token pays for both.
    torch.testing.assert_close(result.advantages_BT, torch.tensor([[-0.10, -0.05], [-0.05, 0.0]]))
    assert result.metrics["reward/zero_variance_groups"] == 1.0


# ------------------------------------------------------------ the penalty and the baseline of a group

LENGTHS, SCORES = (3, 1, 4, 2), (1.0, 0.0, 2.5, -0.5)
GROUPED = [RLOOAdvantage(), DrGRPOAdvantage(), ReinforcePPBaselineAdvantage(), OPOAdvantage()]


def two_groups() -> Experience:
    """Two groups of two; one answer has an environment's token in the middle, and every token its own log-ratio."""
    rollouts = []
    for row, (length, score) in enumerate(zip(LENGTHS, SCORES, strict=True)):
        made = rollout((1,), tuple(range(10, 10 + length)), score)
        if row == 2:
            spans = (ActionSpan(0, 2, 0), ActionSpan(3, 4, 0))
            made = replace(made, completion=replace(made.completion, spans=spans))
        rollouts.append(made)
    made = experience(*rollouts, old=-1.0, ref=-1.0, value=0.0)
    ratios = [[0.0, 0.5, -0.25, 0.75], [0.0, -1.0], [0.0, 0.125, 2.0, 0.0, -0.5], [0.0, 1.5, 0.25]]
    return measured(made, {"ref_logprobs": (-1.0 - np.concatenate(ratios)) * made.sequences.loss_mask})


def by_hand(made: Experience, estimator: str, kl_coef: float, *, inside: bool) -> list[list[float]]:
    """Group baseline and penalty, one Python float at a time.

    `inside`: the penalty is in the reward before the baseline (RLOO's paper, TRL, verl). Otherwise OpenRLHF's
    `compute_advantages_and_returns`: baseline, reward on the last action, penalty on each action, sums to come.
    """
    rows = []
    sequences = made.sequences
    columns = (sequences.fields["old_logprobs"], sequences.fields["ref_logprobs"], sequences.loss_mask)
    for length, *cells_of in zip(made.answers.lengths, *map(sequences.split, columns), strict=True):
        cells = list(zip(*(each.tolist() for each in cells_of), strict=True))[-length:]
        rows.append([kl_coef * (o - r) if m else None for o, r, m in cells])
    rewards = made.answers.rewards.tolist()
    if inside:
        rewards = [r - sum(k for k in row if k is not None) for r, row in zip(rewards, rows, strict=True)]
    advantages = []
    for i, row in enumerate(rows):
        group = [i - i % 2, i - i % 2 + 1]
        tokens = [sum(k is not None for k in rows[j]) for j in group]
        if estimator == "rloo":
            baseline = rewards[group[1 - i % 2]]
        elif estimator == "opo":
            baseline = sum(n * rewards[j] for n, j in zip(tokens, group, strict=True)) / sum(tokens)
        else:
            baseline = sum(rewards[j] for j in group) / 2
        reward = rewards[i] - baseline
        advantages.append(
            [
                0.0 if k is None else reward - (0.0 if inside else sum(later for later in row[t:] if later is not None))
                for t, k in enumerate(row)
            ]
        )
    if estimator == "reinforce++-baseline":
        actions = [
            a for row, ks in zip(advantages, rows, strict=True) for a, k in zip(row, ks, strict=True) if k is not None
        ]
        mean = sum(actions) / len(actions)
        std = (sum((a - mean) ** 2 for a in actions) / len(actions)) ** 0.5
        advantages = [
            [0.0 if k is None else (a - mean) / std for a, k in zip(row, ks, strict=True)]
            for row, ks in zip(advantages, rows, strict=True)
        ]
    return [row + [0.0] * (max(LENGTHS) - len(row)) for row in advantages]


# A handful of float32 operations on numbers below 4, whitened by a spread of about 1: each is off by at most
# 4 * 2^-24 = 2.4e-7, ten of them by 2.4e-6.
FLOAT32 = {"atol": 3e-6, "rtol": 0.0}


@pytest.mark.parametrize("credit", ["token", "answer"])
@pytest.mark.parametrize("estimator", GROUPED, ids=lambda one: one.type)
def test_the_penalty_counts_from_each_token_on_or_is_a_part_of_the_reward(estimator, credit):
    made = two_groups()
    found = estimate_advantages(made, estimator=estimator, group_size=2, kl_coef=0.1, kl_credit=credit).advantages_BT
    expected = by_hand(made, estimator.type, 0.1, inside=credit == "answer")
    torch.testing.assert_close(found, torch.tensor(expected), **FLOAT32)


def test_credit_for_turns_changes_no_advantage_of_whole_answers():
    made = two_groups()
    turns = (ActionSpan(0, 2, 0, reward=0.25), ActionSpan(3, 4, 0, reward=0.25))
    made = replace(made, answers=replace(made.answers, turns=((), (), turns, ())))
    by_turn = estimate_advantages(made, estimator=RLOOAdvantage(), group_size=2, kl_coef=0.1, turn_weights=[2.0] * 4)
    torch.testing.assert_close(by_turn.advantages_BT, torch.tensor(by_hand(made, "rloo", 0.1, inside=False)), **FLOAT32)


def test_without_a_reference_nothing_is_measured_of_it_and_a_penalty_is_an_error():
    made = two_groups()
    made = replace(made, sequences=made.sequences.select_fields("rollout_logprobs", "old_logprobs", "old_values"))
    result = estimate_advantages(made, estimator=RLOOAdvantage(), group_size=2, kl_coef=0.0)
    assert not [name for name in result.metrics if name.startswith("kl/")]
    measured = estimate_advantages(two_groups(), estimator=RLOOAdvantage(), group_size=2, kl_coef=0.0)
    assert torch.equal(result.advantages_BT, measured.advantages_BT)
    with pytest.raises(ConfigError, match=r"ppo\.kl\.coef = 0\.1: the log-probs of a reference are missing"):
        estimate_advantages(made, estimator=RLOOAdvantage(), group_size=2, kl_coef=0.1)


def test_training_rows_are_zero_on_the_prompt_and_keep_the_samplers_logprobs():
    made = experience(rollout((1, 9), (2, 3), 1.0), old=-1.0, ref=-1.0, value=0.5)
    result = estimate_advantages(made, estimator=GAE, group_size=1, kl_coef=0.0)
    assert made.sequences.fields["rollout_logprobs"].tolist() == [0.0, 0.0, -0.5, -0.5]
    assert made.flatten(result.advantages_BT).tolist() == [0.0, 0.0, 0.5, 0.5]
    assert made.flatten(result.returns_BT).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert made.sequences.fields["old_values"].tolist() == [0.0, 0.0, 0.5, 0.5]


def test_each_turn_gets_its_own_reward_and_the_last_action_the_rest():
    spans = (ActionSpan(0, 2, 0, reward=1.0), ActionSpan(3, 5, 0, reward=0.5))
    completion = Completion((3, 4, 5, 6, 7), (-0.5, -0.5, 0.0, -0.5, -0.5), "text", "stop", 0, 1, spans)
    made = experience(Rollout(PROMPT, (1, 2), completion, 4.0, {}), old=-0.5, ref=-0.5, value=0.0)
    estimates = estimate_advantages(made, estimator=GAE, group_size=1, kl_coef=0.0, turn_weights=[2.0])
    # 2 * 1 at the end of the first turn, 4 - 2 * 1 = 2 at the last action; advantages are the sums to come
    assert estimates.returns_BT.tolist() == [[4.0, 4.0, 0.0, 2.0, 2.0]]
    whole = estimate_advantages(made, estimator=GAE, group_size=1, kl_coef=0.0)
    assert whole.returns_BT.tolist() == [[4.0, 4.0, 0.0, 4.0, 4.0]]


def test_turns_that_split_equal_rewards_differently_leave_the_group_without_a_gradient():
    def played(*earned: float) -> Rollout:
        spans = tuple(ActionSpan(i, i + 1, 0, reward=reward) for i, reward in enumerate(earned))
        completion = Completion((3,) * len(earned), (-0.5,) * len(earned), "text", "stop", 0, 1, spans)
        return Rollout(PROMPT, (1, 2), completion, 0.3, {})

    made = experience(played(0.1, 0.2), played(0.3), old=-0.5, ref=-0.5, value=0.0)
    estimator = GRPOAdvantage(eps=1e-9)
    found = estimate_advantages(made, estimator=estimator, group_size=2, kl_coef=0.0, turn_weights=[1.0] * 2)
    # 0.1 + (0.3 - 0.1) is not 0.3 in float32, and that difference over a spread made of it would be +-0.68
    assert found.advantages_BT.abs().max() == 0.0


def cut_off(made: Experience, *rows: int) -> Experience:
    """Return the experience with answers that ended at the token limit."""
    truncated = np.isin(np.arange(len(made.answers)), rows)
    return replace(made, answers=replace(made.answers, truncated=truncated))


MASKED: dict[str, Any] = {
    "samples_per_prompt": 2,
    "advantage": {"type": "rloo"},
    "truncated_answers": "mask",
    "kl": {"coef": 0.0},
}


def test_masked_answers_are_in_the_baseline_and_in_no_row():
    made = cut_off(two_groups(), 1)
    whole = estimated(made, PPOConfig(**MASKED | {"truncated_answers": "train"}))
    step = estimated(made, PPOConfig(**MASKED))
    assert step.metrics["rollout/masked"] == 0.25 and "rollout/masked" not in whole.metrics
    assert step.rows.tolist() == [0, 2, 3] and whole.rows.tolist() == [0, 1, 2, 3]
    for mine, others in ((step.advantages, whole.advantages), (step.returns, whole.returns)):
        rows = zip(made.sequences.split(mine), made.sequences.split(others), strict=True)
        assert [one.tolist() == other.tolist() for one, other in rows] == [True] * 4
    assert step.advantages[1] == SCORES[0] - SCORES[1], "the answer that was cut off is its baseline"


def test_teachers_add_their_log_probs_to_the_advantages_of_the_rewards():
    made = experience(rollout((1, 2), (3, 4), 1.0), rollout((1,), (5,), 0.0), old=-0.5, ref=-0.5, value=0.0)
    both = TeacherLogprobs(
        "both", 0.75, np.array([0.0, 0.0, -0.1, -0.9, 0.0, -2.5], np.float32), np.array([True, True])
    )
    # does not teach the second answer, where it has the policy's own
    first = TeacherLogprobs(
        "first", 0.25, np.array([0.0, 0.0, -1.5, -0.5, 0.0, -0.5], np.float32), np.array([True, False])
    )
    rewarded = estimate_advantages(made, estimator=DrGRPOAdvantage(), group_size=2, kl_coef=0.0)  # 0.5 and -0.5
    taught_BT, metrics = add_distillation(
        rewarded.advantages_BT, replace(made, teachers=(both, first)), reward_weight=2.0
    )
    # log pi_m - log pi_old: of both 0.4, -0.4 and -2; of first -1 and 0
    by_hand = [[0.75 * 0.4 - 0.25 * 1 + 1, 0.75 * -0.4 + 1], [0.75 * -2 - 1, 0.0]]
    assert taught_BT.tolist() == [pytest.approx(row, abs=1e-6) for row in by_hand]
    assert metrics["teacher/kl/both"] == pytest.approx(2 / 3, abs=1e-6)
    assert metrics["teacher/kl/first"] == pytest.approx(1 / 2, abs=1e-6)  # over two tokens
    assert metrics["teacher/kl"] == pytest.approx((0.75 * 2 + 0.25 * 1) / 3, abs=1e-6)
    alone = estimate_advantages(made, estimator=None, group_size=2, kl_coef=0.0)
    assert alone.advantages_BT.tolist() == [[0.0, 0.0], [0.0, 0.0]] and alone.metrics["reward/mean"] == 0.5


def test_where_every_answer_was_cut_off_nothing_is_left():
    made = cut_off(two_groups(), 0, 1, 2, 3)
    step = estimated(made, PPOConfig(**MASKED, loss={"type": "clip_cov"}))
    assert len(step.rows) == 0
    assert (step.metrics["rollout/masked"], step.metrics["policy/dropped_by_loss"]) == (1.0, 0.0)


def test_a_loss_chooses_among_the_tokens_that_are_trained_on():
    seen = []

    class Chooses(ClipCovLoss):
        def step_advantages(self, advantages_BL: Any, old_logprobs_BL: Any, loss_mask_BL: Any, *, seed: int) -> Any:
            seen.append((tuple(advantages_BL.shape), tuple(old_logprobs_BL.shape), int(loss_mask_BL.sum())))
            return torch.zeros_like(advantages_BL)

    longest = LENGTHS.index(max(LENGTHS))
    made = cut_off(two_groups(), longest)
    step = estimated(made, PPOConfig(**MASKED).model_copy(update={"loss": Chooses()}))
    rest = [length for row, length in enumerate(LENGTHS) if row != longest]
    assert seen == [((3, max(rest)), (3, max(rest)), sum(rest))] and longest not in step.rows
    split = made.sequences.split(step.advantages)
    assert not any(split[row].any() for row in step.rows) and step.returns.any()


def test_a_loss_may_take_tokens_away_by_the_step_as_a_whole():
    made = two_groups()
    whole = estimate_advantages(made, estimator=RLOOAdvantage(), group_size=2, kl_coef=0.0)
    assert not ClipLoss.chooses_tokens and ClipCovLoss.chooses_tokens
    # every log pi_old is -1, so all covariances are 0: only bounds around it draw, and they draw all
    assert whole.advantages_BT.any()
    chosen_BT, dropped = drop_by_loss(
        whole.advantages_BT, made, np.arange(4), ClipCovLoss(fraction=1.0, cov_low=-1.0), seed=0
    )
    assert not chosen_BT.any() and dropped == 1.0
    assert whole.advantages_BT.any(), "the advantages that were given stay"


def uneven_step() -> Experience:
    """Six groups of two answers of unequal lengths, with figures that differ everywhere."""
    dice = torch.Generator().manual_seed(5)
    made, numbers = [], []
    for at in range(12):
        length = 1 + at * 7 % 9
        logprobs = (-torch.rand(length, generator=dice)).tolist()
        reason = "length" if at % 4 == 3 else "stop"
        completion = Completion(range(3, 3 + length), logprobs, "", reason, policy_version=0, seed=at)
        made.append(Rollout(PROMPT, (1, 2, 9)[: 1 + at % 3], completion, float(torch.randn(1, generator=dice)), {}))
        numbers.append([(-torch.rand(len(made[-1].prompt_ids) + length, generator=dice)).numpy() for _ in range(3)])
    names = ("old_logprobs", "ref_logprobs", "old_values")
    columns = map(np.concatenate, zip(*numbers, strict=True))
    return measured(Experience.of(tuple(made)), dict(zip(names, columns, strict=True)))


IN_BLOCKS = {
    "gae": {"advantage": {"type": "gae"}, "kl": {"coef": 0.1}},
    "gae, not whitened": {"advantage": {"type": "gae", "whiten": False}},
    "reinforce++": {"advantage": {"type": "reinforce++"}, "kl": {"coef": 0.1}, "truncated_answers": "mask"},
    "remax": {"advantage": {"type": "remax"}},
    "the spread of the step": {
        "advantage": {"type": "grpo", "std": "batch"},
        "kl": {"in": "loss"},
        "truncated_answers": "mask",
    },
    "whitened groups": {"advantage": {"type": "reinforce++-baseline"}, "kl": {"coef": 0.1}},
    "by length": {"advantage": {"type": "opo"}, "kl": {"coef": 0.1, "in": "loss"}},
    "penalty in the baseline": {"advantage": {"type": "rloo"}, "kl": {"coef": 0.1, "credit": "answer"}},
}


@pytest.mark.parametrize("case", IN_BLOCKS)
def test_a_step_that_is_computed_in_blocks_is_the_step(monkeypatch, case):
    step, config = uneven_step(), PPOConfig(samples_per_prompt=2, **IN_BLOCKS[case])
    greedy = tuple(at / 8 for at in range(12)) if case == "remax" else ()
    whole = estimated(step, config, greedy)
    longest = int(step.answers.lengths.max())
    monkeypatch.setattr("rlhf_core.training.experience.BLOCK", 5 * longest)
    monkeypatch.setattr("rlhf_core.algorithms.token_math.PART", 1)  # a row of a block at a time
    ends = [0, 4, 8, 12]
    assert split_into_blocks(step, config) == list(map(slice, ends, ends[1:]))
    parts = estimated(step, config, greedy)
    # Sums of a dozen float32 numbers in another order.
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)
    assert parts.rows.tolist() == whole.rows.tolist()
    for mine, others in ((parts.advantages, whole.advantages), (parts.returns, whole.returns)):
        assert mine.tolist() == pytest.approx(others.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"loss": {"type": "clip_cov"}}, {"distill": {"teachers": {"a": 1.0}, "reward_weight": 1.0}}]
)
def test_what_needs_the_whole_step_is_computed_whole(monkeypatch, changes):
    monkeypatch.setattr("rlhf_core.training.experience.BLOCK", 30)
    step = uneven_step()
    config = PPOConfig(samples_per_prompt=2, advantage={"type": "rloo"}, **changes)
    assert split_into_blocks(step, config) == [ALL]
