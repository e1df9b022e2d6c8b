"""Convert scored rollouts to a training batch: token rewards, advantages and returns.

Rewards include the KL penalty (`kl_coef` = 0 leaves it out). Token rewards (arXiv 2203.02155), for gae and reinforce++, are
-kl_coef * k1 on every token, with k1 = log pi_old - log pi_ref, plus the rollout's reward on the last token. Group estimators
compare whole answers, and `kl_credit` sets how the penalty enters:
  `token`    A_t = (reward after the group's baseline) - kl_coef * (sum of k1 from t on). The baseline contains rewards only,
             and each token pays the undiscounted penalty from itself on, as in OpenRLHF and REINFORCE++ (arXiv 2501.03262).
  `answer`   A_t = (reward - kl_coef * sum of k1) after the group's baseline, the same on every token. The penalty is a part
             of the answer's reward and so of the baseline, as in RLOO (arXiv 2402.14740), TRL and verl.
reinforce++-baseline whitens the result.

Shapes: B rollouts, S tokens of all sequences together, T completion tokens (padded to the longest), P prompts, G samples
per prompt; B = P * G, and the rollouts of a prompt are consecutive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.algorithms.advantage.base import (
    GroupAdvantage,
    GroupRewards,
    TokenAdvantage,
    TokenRewards,
    zero_variance_groups,
)
from rlhf_core.algorithms.advantage.token import discounted_returns
from rlhf_core.algorithms.policy.clip import PolicyMethod
from rlhf_core.algorithms.token_math import Mismatch, explained_variance, k1, masked_count, schulman_k3, whitened
from rlhf_core.config.policy import Advantage, KLCredit, KLInReward, PPOConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics
from rlhf_core.sequences import Sequences
from rlhf_core.types import ActionSpan, Rollout
from rlhf_core.user_code.dependencies import UserFunction

BLOCK = 2**24
"""Padded places (answers by tokens of the longest one) that are computed at once: 64 MiB in each of some dozen tensors."""
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class ScoredAnswers:
    """Rewards and lengths of the rollouts of a step, and whether they were cut off."""

    rewards: NDArray[np.float32]
    """[B]"""
    truncated: NDArray[np.bool_]
    """[B], whether the answer was cut off at the token limit."""
    lengths: NDArray[np.int64]
    """[B], tokens of each completion."""
    turns: tuple[tuple[ActionSpan, ...], ...] = ()
    """The turns of each answer, if an environment rewarded any of them."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "ScoredAnswers":
        answers = [one.completion for one in rollouts]
        rewarded = any(span.reward for one in answers for span in one.spans)
        return cls(
            np.array([one.reward for one in rollouts], np.float32),
            np.array([one.finish_reason == "length" for one in answers], bool),
            np.array([len(one.token_ids) for one in answers], np.int64),
            tuple(one.spans for one in answers) if rewarded else (),
        )

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, eq=False)
class TeacherLogprobs:
    """The log-probs of one teacher, with its weight."""

    name: str
    weight: float
    logprobs: NDArray[np.float32]
    """[S], the policy's where the teacher does not teach."""
    teaches: NDArray[np.bool_]
    """[B], whether it teaches a rollout."""


@dataclass(frozen=True, eq=False)
class Experience:
    """The answers of a step and their tokens, with the outputs of the models.

    `sequences` has `rollout_logprobs` and, once measured, `old_logprobs`, `ref_logprobs` and `old_values`, the last two if
    there are such models.
    """

    answers: ScoredAnswers
    sequences: Sequences
    teachers: tuple[TeacherLogprobs, ...] = ()

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "Experience":
        """Rollouts before they are measured: prompt and completion of each as one sequence."""
        return cls(ScoredAnswers.of(rollouts), Sequences.of_answers(rollouts))

    @cached_property
    def completion_slices(self) -> list[slice]:
        """Where the completion of each rollout is in the flat arrays."""
        ends = self.sequences.offsets[1:]
        return [slice(*bounds) for bounds in zip((ends - self.answers.lengths).tolist(), ends.tolist(), strict=True)]

    def pad(self, values_S: NDArray[Any], rows: slice = ALL) -> Tensor:
        """The part of flat values that belongs to the completions of these rollouts, padded on the right by 0: (B, T)."""
        lengths = self.answers.lengths[rows]
        padded_BT = np.zeros((len(lengths), lengths.max(initial=0)), np.float32)
        for padded_T, span in zip(padded_BT, self.completion_slices[rows], strict=True):
            padded_T[: span.stop - span.start] = values_S[span]
        return torch.from_numpy(padded_BT)

    def flatten(self, *blocks: Tensor) -> NDArray[np.float32]:
        """The inverse of `pad`, [S], with 0 on the prompts: each block has the rollouts after the one before it."""
        values_S = np.zeros(len(self.sequences.token_ids), np.float32)
        rows = (values_T for values_BT in blocks for values_T in values_BT.numpy())
        for values_T, span in zip(rows, self.completion_slices, strict=True):
            values_S[span] = values_T[: span.stop - span.start]
        return values_S


@dataclass(frozen=True)
class PaddedAnswers:
    """Some answers of a step: the tokens that the policy sampled, log pi_old and k1, 0 without a reference."""

    experience: Experience
    rows: slice
    mask_BT: Tensor
    old_BT: Tensor
    kl_BT: Tensor

    @classmethod
    def of(cls, experience: Experience, rows: slice) -> "PaddedAnswers":
        sequences = experience.sequences
        mask_BT = experience.pad(sequences.loss_mask, rows)
        old_BT = experience.pad(sequences.fields["old_logprobs"], rows)
        kl_BT = torch.zeros_like(old_BT)
        if "ref_logprobs" in sequences.fields:
            kl_BT = k1(old_BT, experience.pad(sequences.fields["ref_logprobs"], rows)) * mask_BT
        return cls(experience, rows, mask_BT, old_BT, kl_BT)

    def rewards(
        self, estimator: TokenAdvantage, *, kl_coef: float, turn_weights: Sequence[float], greedy: Sequence[float]
    ) -> TokenRewards:
        """The input of an estimator that uses token rewards."""
        answers, rows = self.experience.answers, self.rows
        rewards_BT = token_rewards(torch.tensor(answers.rewards[rows]), self.kl_BT, self.mask_BT, kl_coef=kl_coef)
        if answers.turns and any(turn_weights[rows]):
            move_to_turns(rewards_BT, answers.turns[rows], turn_weights[rows])
        greedy_B = torch.tensor(greedy[rows], dtype=torch.float32) if greedy else None
        values_BT = self.values_BT if estimator.uses_values else None
        return TokenRewards(rewards=rewards_BT, loss_mask=self.mask_BT, values=values_BT, greedy=greedy_B)

    @cached_property
    def values_BT(self) -> Tensor:
        return self.experience.pad(self.experience.sequences.fields["old_values"], self.rows)


def estimate_in_blocks(
    experience: Experience,
    rows: Sequence[slice],
    *,
    estimator: Advantage | None,
    group_size: int,
    kl_coef: float,
    kl_credit: KLCredit = "token",
    turn_weights: Sequence[float] = (),
    function: UserFunction | None = None,
    greedy: Sequence[float] = (),
) -> tuple[list[tuple[Tensor, Tensor]], Metrics]:
    """Compute the advantages and returns of each block of rows, padded to its longest answer, and the step's metrics.

    `turn_weights`, of each rollout, move that fraction of a turn's reward to the turn's own last token. `function` is the
    user's for a custom estimator, `greedy` the rewards of greedy answers for remax. Without an `estimator` advantages are 0.
    Raises ConfigError for groups of fewer than two, and for a penalty without a reference.
    """
    blocks = [PaddedAnswers.of(experience, each) for each in rows]
    scores_B = torch.tensor(experience.answers.rewards)
    rewards = {"reward/mean": float(scores_B.mean()), "reward/std": float(scores_B.std(correction=0))}
    distance = _kl_metrics(blocks)
    metrics = rewards | _rollout_metrics(blocks) | distance
    if kl_coef and not distance:
        rule = "the log-probs of a reference are missing"
        raise ConfigError("ppo.kl.coef", kl_coef, rule, "compute them, or set it to 0")
    if estimator is None:
        made = [(torch.zeros_like(block.mask_BT),) * 2 for block in blocks]
    elif isinstance(estimator, GroupAdvantage):
        made = _compared_advantages(
            blocks, scores_B, estimator, group_size, kl_coef=kl_coef, kl_credit=kl_credit, function=function
        )
        # Counted on the scores, because with a KL penalty no two rewards are equal. A single answer is no group.
        if group_size > 1:
            metrics["reward/zero_variance_groups"] = float(zero_variance_groups(scores_B.reshape(-1, group_size)))
    else:
        if greedy:
            metrics["reward/greedy"] = float(torch.tensor(greedy, dtype=torch.float32).mean())
        made = _token_advantages(blocks, estimator, kl_coef=kl_coef, turn_weights=turn_weights, greedy=greedy)
        if estimator.uses_values:
            triples = ((one.values_BT, of, one.mask_BT) for one, (_, of) in zip(blocks, made, strict=True))
            metrics["value/explained_variance"] = explained_variance(triples)
    return made, metrics


def _compared_advantages(
    blocks: Sequence[PaddedAnswers],
    scores_B: Tensor,
    estimator: GroupAdvantage,
    group_size: int,
    *,
    kl_coef: float,
    kl_credit: KLCredit,
    function: UserFunction | None,
) -> list[tuple[Tensor, Tensor]]:
    """Advantages and returns of each block by an estimator that compares the answers to a prompt.

    Computed from the scores, not from sums of token rewards, whose rounding errors look like a spread of the group.
    """
    masks = [block.mask_BT for block in blocks]
    penalties_B = torch.cat([block.kl_BT.sum(dim=1) for block in blocks])  # sum k1
    answers_B = scores_B - kl_coef * penalties_B if kl_credit == "answer" else scores_B  # R - kl_coef * sum k1
    lengths_B = torch.cat([each.sum(dim=1) for each in masks])
    compared_B = _group_advantages(estimator, answers_B, lengths_B, group_size, function)
    rows = compared_B.split([len(mask_BT) for mask_BT in masks])
    returns = [one_B.reshape(-1, 1) * mask_BT for one_B, mask_BT in zip(rows, masks, strict=True)]
    if kl_credit == "token":
        of_penalty = (discounted_returns(block.kl_BT, block.mask_BT, gamma=1.0) for block in blocks)
        returns = [one_BT - kl_coef * penalty_BT for one_BT, penalty_BT in zip(returns, of_penalty, strict=True)]
    return list(zip(whitened(returns, masks) if estimator.whitened else returns, returns, strict=True))


def _token_advantages(
    blocks: Sequence[PaddedAnswers],
    estimator: TokenAdvantage,
    *,
    kl_coef: float,
    turn_weights: Sequence[float],
    greedy: Sequence[float],
) -> list[tuple[Tensor, Tensor]]:
    """Advantages and returns of each block by an estimator that uses token rewards; whitened over all blocks."""
    rewards = (block.rewards(estimator, kl_coef=kl_coef, turn_weights=turn_weights, greedy=greedy) for block in blocks)
    if len(blocks) == 1:
        return list(map(estimator.estimate, rewards))
    made = list(map(estimator.by_answer, rewards))
    if not estimator.whitens:
        return made
    white = whitened([advantages_BT for advantages_BT, _ in made], [block.mask_BT for block in blocks])
    return [(one, one if raw is of else of) for one, (raw, of) in zip(white, made, strict=True)]


def split_into_blocks(experience: Experience, config: PPOConfig) -> list[slice]:
    """Split a step into rows of whole groups with at most `BLOCK` places, if its formulas allow that."""
    estimator, lengths = config.estimator, experience.answers.lengths.tolist()
    whole = isinstance(estimator, TokenAdvantage) and type(estimator).by_answer is TokenAdvantage.by_answer
    if len(lengths) * max(lengths, default=0) <= BLOCK or whole or config.distill or config.loss.chooses_tokens:
        return [ALL]
    size = config.samples_per_prompt
    rows = max(1, BLOCK // (size * max(lengths))) * size
    return [slice(start, start + rows) for start in range(0, len(lengths), rows)]


def add_distillation(rewarded_BT: Tensor, experience: Experience, *, reward_weight: float) -> tuple[Tensor, Metrics]:
    """Add the advantages of on-policy distillation to the advantages from rewards, which get `reward_weight`.

    A_t = sum_m w_m (log pi_m - log pi_old) + reward_weight * A_t(rewards), with the teachers pi_m. Over the policy's
    own tokens the gradient equals the gradient of sum_m w_m KL(pi || pi_m) at each token, given the tokens before it
    (arXiv 2306.13649 with the reverse KL). `teacher/kl` is the mean over the tokens of -A_t, `teacher/kl/<name>` the
    mean for one teacher.
    """
    mask_BT = experience.pad(experience.sequences.loss_mask)
    old_BT = experience.pad(experience.sequences.fields["old_logprobs"])
    total_BT, metrics = torch.zeros_like(old_BT), dict[str, float]()
    for teacher in experience.teachers:
        gap_BT = (experience.pad(teacher.logprobs) - old_BT) * mask_BT  # log pi_m - log pi_old
        total_BT = total_BT + teacher.weight * gap_BT
        if teacher.teaches.any():
            taught_BT = mask_BT[torch.tensor(teacher.teaches)]
            metrics[f"teacher/kl/{teacher.name}"] = float(-gap_BT.sum() / masked_count(taught_BT))
    metrics["teacher/kl"] = float(-total_BT.sum() / masked_count(mask_BT))
    return total_BT + reward_weight * rewarded_BT, metrics


@dataclass(frozen=True, eq=False)
class StepAdvantages:
    """The advantages of a step, for the tokens of all its sequences."""

    advantages: NDArray[np.float32]
    """[S], 0 on prompts, on sequences that are not trained on, and where the loss drops a token."""
    returns: NDArray[np.float32]
    """[S]"""
    rows: NDArray[np.int64]
    """Numbers of the sequences to train on."""
    metrics: Metrics


def estimate_step(
    sequences: Sequences,
    *,
    answers: ScoredAnswers,
    teachers: tuple[TeacherLogprobs, ...],
    config: PPOConfig,
    function: UserFunction | None,
    turn_weights: Sequence[float],
    greedy: Sequence[float],
    kl_coef: float,
    seed: int,
) -> StepAdvantages:
    """Estimate the advantages of a measured step, and choose the rows for training.

    `turn_weights` and `greedy` (for remax) have one number per answer; `seed` is for losses that draw tokens.
    """
    experience = Experience(answers, sequences, teachers)
    in_reward = config.kl if isinstance(config.kl, KLInReward) else None
    estimates, metrics = estimate_in_blocks(
        experience,
        split_into_blocks(experience, config),
        estimator=config.estimator,
        group_size=config.samples_per_prompt,
        kl_coef=kl_coef if in_reward else 0.0,
        kl_credit=in_reward.credit if in_reward else "token",
        turn_weights=turn_weights,
        function=function,
        greedy=greedy,
    )
    # Truncated answers were part of their group's baseline and of the whitening; they are in no loss and in none of its
    # counts: DAPO's overlong filtering, arXiv 2503.14476, section 3.4.
    masks = config.truncated_answers == "mask"
    rows = np.flatnonzero(~(answers.truncated & masks))
    if masks:
        metrics["rollout/masked"] = 1 - len(rows) / len(answers)
    advantages, returns = map(list, zip(*estimates, strict=True))
    # Either of these needs the whole step: it is one block.
    if config.distill:
        advantages[0], of_teachers = add_distillation(
            advantages[0], experience, reward_weight=config.distill.reward_weight
        )
        metrics |= of_teachers
    if config.loss.chooses_tokens:
        advantages[0], metrics["policy/dropped_by_loss"] = drop_by_loss(
            advantages[0], experience, rows, config.loss, seed=seed
        )
    return StepAdvantages(experience.flatten(*advantages), experience.flatten(*returns), rows, metrics)


def drop_by_loss(
    advantages_BT: Tensor, experience: Experience, rows: NDArray[np.int64], loss: PolicyMethod, *, seed: int
) -> tuple[Tensor, float]:
    """Set the advantages that `loss` removes, by the step as a whole, to 0; also compute the fraction of removed tokens.

    Only `rows` take part: tokens that are in no loss must not displace others when the loss draws tokens.
    """
    if not len(rows):
        return advantages_BT, 0.0
    rows_B, longest = torch.tensor(rows), int(experience.answers.lengths[rows].max())
    flat = experience.sequences.loss_mask, experience.sequences.fields["old_logprobs"]
    mask_BT, old_BT = (experience.pad(values_S)[rows_B, :longest] for values_S in flat)
    before_BT, kept_BT = advantages_BT[rows_B, :longest], advantages_BT.clone()
    after_BT = loss.step_advantages(before_BT, old_BT, mask_BT, seed=seed)
    kept_BT[rows_B, :longest] = after_BT
    return kept_BT, float((after_BT != before_BT).sum() / masked_count(mask_BT))


def _group_advantages(
    estimator: GroupAdvantage, answers_B: Tensor, lengths_B: Tensor, group_size: int, function: UserFunction | None
) -> Tensor:
    """The advantage of each answer [B]."""
    if group_size < 2:
        rule = f"the estimator {estimator.type!r} compares the samples of a prompt and needs at least 2"
        raise ConfigError("ppo.samples_per_prompt", group_size, rule, "raise it, or use gae or reinforce++")
    groups = GroupRewards(
        rewards=answers_B.reshape(-1, group_size),
        lengths=lengths_B.reshape(-1, group_size),
        function=None if function is None else function.load(key="advantage.function"),
    )
    return estimator.compare(groups).reshape(-1)


def token_rewards(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, kl_coef: float) -> Tensor:
    """Compute rewards (B, T): the KL penalty on every action, plus the score on the last action."""
    rewards_BT = -kl_coef * kl_BT * mask_BT  # r_t = -kl_coef * k1_t
    positions_T = torch.arange(mask_BT.shape[1])
    last_B = torch.where(mask_BT != 0, positions_T, -1).amax(dim=1)
    rewards_BT[torch.arange(len(scores_B)), last_B] += scores_B  # r_T = ... + R
    return rewards_BT


def move_to_turns(rewards_BT: Tensor, turns: Sequence[Sequence[ActionSpan]], weights: Sequence[float]) -> None:
    """Move each turn's reward, times the weight of its answer, from the last action to the turn's last one, in place."""
    for row, spans, weight in zip(rewards_BT, turns, weights, strict=True):
        acted = [span for span in spans if span.end > span.start]
        for span in acted:
            row[span.end - 1] += weight * span.reward  # to the turn that earned it
            row[acted[-1].end - 1] -= weight * span.reward  # the sum over the answer stays R


def _kl_metrics(blocks: Sequence[PaddedAnswers]) -> Metrics:
    """Distance of the policy from the reference; {} without a reference."""
    if "ref_logprobs" not in blocks[0].experience.sequences.fields:
        return {}
    tokens = sum(block.mask_BT.sum() for block in blocks)
    k3s = [schulman_k3(block.kl_BT).sum() for block in blocks]  # 0 where k1 is
    return {
        "kl/per_token": float(sum(block.kl_BT.sum() for block in blocks) / tokens),
        "kl/per_sequence": float(torch.cat([block.kl_BT.sum(dim=1) for block in blocks]).mean()),
        "kl/k3": float(sum(k3s) / tokens),  # k3 = exp(-k1) - 1 + k1, never negative
    }


def _rollout_metrics(blocks: Sequence[PaddedAnswers]) -> Metrics:
    masks = [block.mask_BT for block in blocks]
    step = blocks[0].experience
    sampled = (step.pad(step.sequences.fields["rollout_logprobs"], block.rows) for block in blocks)
    parts = [Mismatch.of(block.old_BT, mu_BT, block.mask_BT) for block, mu_BT in zip(blocks, sampled, strict=True)]
    entropy = -sum((block.old_BT * block.mask_BT).sum() for block in blocks)  # a sample of H = -E log pi
    return {
        "rollout/length": float(torch.cat([mask_BT.sum(dim=1) for mask_BT in masks]).mean()),  # sampled tokens
        "rollout/truncated": int(step.answers.truncated.sum()) / len(step.answers),
        "rollout/entropy": float(entropy / sum(mask_BT.sum() for mask_BT in masks)),
        **{f"mismatch/{name}": value for name, value in reduce(add, parts).metrics().items()},
    }
