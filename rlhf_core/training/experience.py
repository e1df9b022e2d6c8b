"""Convert scored rollouts to training samples: token rewards, advantages and returns.

Shapes: B rollouts, T completion tokens (padded to the longest), P prompts, G samples per prompt; B = P * G, and the
rollouts of a prompt are consecutive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
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
from rlhf_core.rows import Columns
from rlhf_core.types import (
    Column,
    PolicySample,
    Rollout,
    TokenSample,
    ValueSample,
    floats,
    joined,
    zeros,
)
from rlhf_core.user_code.dependencies import UserFunction

BLOCK = 2**24
"""Padded places (answers by tokens of the longest one) that are computed at once: 64 MiB in each of some dozen tensors."""


@dataclass(frozen=True)
class Experience:
    """Rollouts with the outputs of the models. Rows of `logprobs` and `values` cover the whole sequence (length L)."""

    rollouts: Sequence[Rollout]
    samples: Sequence[TokenSample]
    old_logprobs: Sequence[Column[float]]
    ref_logprobs: Sequence[Column[float]]
    """One row per sample, or empty if there is no reference."""
    values: Sequence[Column[float]]
    """One row per sample, or empty if there is no value model."""
    lessons: tuple["Lesson", ...] = ()
    """What each teacher makes of the samples, if there are any."""

    def part(self, start: int, end: int) -> "Experience":
        """Return some consecutive rollouts of a step without lessons."""
        rows = {name: getattr(self, name)[start:end] for name in ("rollouts", "samples", "old_logprobs")}
        return Experience(**rows, ref_logprobs=self.ref_logprobs[start:end], values=self.values[start:end])

    def __post_init__(self) -> None:
        for name in ("old_logprobs", "ref_logprobs", "values"):
            if not isinstance(given := getattr(self, name), Columns):
                object.__setattr__(self, name, tuple(map(floats, given)))


@dataclass(frozen=True)
class Lesson:
    """The log-probs of one teacher, with its weight; an empty row for a sample that it does not teach."""

    name: str
    weight: float
    logprobs: tuple[Column[float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", tuple(map(floats, self.logprobs)))


@dataclass(frozen=True)
class Advantages:
    """Advantages and returns per completion token, which the losses need, and the metrics of their computation."""

    advantages_BT: Tensor
    returns_BT: Tensor
    metrics: Metrics


def completion_tensor(rows: Sequence[Column[Any]], experience: Experience) -> Tensor:
    """Return the completion part of per-token rows (of length L) as a right-padded tensor (B, T)."""
    longest = max((len(one.completion.token_ids) for one in experience.rollouts), default=0)
    padded_BT = np.zeros((len(experience.rollouts), longest), np.float32)
    for padded_T, row, rollout in zip(padded_BT, rows, experience.rollouts, strict=True):
        padded_T[: len(rollout.completion.token_ids)] = row.data[len(rollout.prompt_ids) :]
    return torch.from_numpy(padded_BT)


def estimate_advantages(
    experience: Experience,
    *,
    estimator: Advantage | None,
    group_size: int,
    kl_coef: float,
    kl_credit: KLCredit = "token",
    turn_weights: Sequence[float] = (),
    function: UserFunction | None = None,
    greedy: Sequence[float] = (),
) -> Advantages:
    """Return advantages of `estimator` from rewards that include the KL penalty (`kl_coef` = 0 leaves it out).

    Token rewards (arXiv 2203.02155) are -kl_coef * k1 on every token, with k1 = log pi_old - log pi_ref, plus the
    rollout's reward on the last token. `turn_weights` (of each rollout) move that fraction of a turn's reward to the
    turn's own last token. gae and reinforce++ use token rewards. Group estimators compare whole answers, and `kl_credit` sets how the
    penalty enters:

    `token`: A_t = (reward after the group's baseline) - kl_coef * (sum of k1 from t on). The baseline contains rewards
    only, and each token pays the undiscounted penalty from itself on, as in OpenRLHF and REINFORCE++ (arXiv 2501.03262).

    `answer`: A_t = (reward - kl_coef * sum of k1) after the group's baseline, the same on every token. The penalty is a
    part of the answer's reward and so of the baseline, as in RLOO (arXiv 2402.14740), TRL and verl (`apply_kl_penalty`).

    reinforce++-baseline whitens the result. `function` is that of a custom estimator, `greedy` the rewards of greedy
    answers, for remax; without an `estimator` advantages are 0. Raises ConfigError for groups of fewer than two, and for a penalty without a reference.
    """
    [one], metrics = estimate_in_blocks(
        [experience],
        estimator=estimator,
        group_size=group_size,
        kl_coef=kl_coef,
        kl_credit=kl_credit,
        turn_weights=turn_weights,
        function=function,
        greedy=greedy,
    )
    return replace(one, metrics=metrics)


@dataclass(frozen=True)
class Block:
    """Some answers of a step: the tokens that the policy sampled, log pi_old and k1, 0 without a reference."""

    experience: Experience
    mask_BT: Tensor
    old_BT: Tensor
    kl_BT: Tensor

    @classmethod
    def of(cls, experience: Experience) -> "Block":
        mask_BT = completion_tensor([sample.loss_mask for sample in experience.samples], experience)
        old_BT = completion_tensor(experience.old_logprobs, experience)
        if not experience.ref_logprobs:
            return cls(experience, mask_BT, old_BT, torch.zeros_like(old_BT))
        ref_BT = completion_tensor(experience.ref_logprobs, experience)
        return cls(experience, mask_BT, old_BT, k1(old_BT, ref_BT) * mask_BT)  # k1 = log pi_old - log pi_ref

    def estimate(
        self,
        estimator: TokenAdvantage,
        *,
        kl_coef: float,
        turn_weights: Sequence[float],
        greedy: Sequence[float],
        alone: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns of an estimator from token rewards, not whitened unless it is `alone` in its step."""
        scores_B = torch.tensor([one.reward for one in self.experience.rollouts], dtype=torch.float32)
        rewards_BT = token_rewards(scores_B, self.kl_BT, self.mask_BT, kl_coef=kl_coef)
        if any(turn_weights):
            move_to_turns(rewards_BT, self.experience.rollouts, turn_weights)
        greedy_B = torch.tensor(greedy, dtype=torch.float32) if greedy else None
        values_BT = self.values_BT if estimator.uses_values else None
        tokens = TokenRewards(rewards=rewards_BT, loss_mask=self.mask_BT, values=values_BT, greedy=greedy_B)
        return estimator.estimate(tokens) if alone else estimator.by_answer(tokens)

    @cached_property
    def values_BT(self) -> Tensor:
        return completion_tensor(self.experience.values, self.experience)


def estimate_in_blocks(
    parts: Sequence[Experience],
    *,
    estimator: Advantage | None,
    group_size: int,
    kl_coef: float,
    kl_credit: KLCredit = "token",
    turn_weights: Sequence[float] = (),
    function: UserFunction | None = None,
    greedy: Sequence[float] = (),
) -> tuple[list[Advantages], Metrics]:
    """Return `estimate_advantages` of a step part by part, each padded to its own longest answer, and the step's metrics."""
    blocks = [Block.of(part) for part in parts]
    masks = [block.mask_BT for block in blocks]
    rollouts = [one for part in parts for one in part.rollouts]
    scores_B = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
    rewards = {"reward/mean": float(scores_B.mean()), "reward/std": float(scores_B.std(correction=0))}
    distance = _distance(blocks)
    metrics = rewards | _rollout_metrics(rollouts, blocks) | distance
    if kl_coef and not distance:
        rule = "the log-probs of a reference are missing"
        raise ConfigError("ppo.kl.coef", kl_coef, rule, "compute them, or set it to 0")
    if estimator is None:
        made = [(torch.zeros_like(mask_BT),) * 2 for mask_BT in masks]
    elif isinstance(estimator, GroupAdvantage):
        # Computed from the scores, not from sums of token rewards, whose rounding errors look like a spread of the group.
        penalties_B = torch.cat([block.kl_BT.sum(dim=1) for block in blocks])  # sum k1
        answers_B = scores_B - kl_coef * penalties_B if kl_credit == "answer" else scores_B  # R - kl_coef * sum k1
        compared_B = _compared(
            estimator, answers_B, torch.cat([each.sum(dim=1) for each in masks]), group_size, function
        )
        rows = compared_B.split([len(mask_BT) for mask_BT in masks])
        returns = [one_B.reshape(-1, 1) * mask_BT for one_B, mask_BT in zip(rows, masks, strict=True)]
        if kl_credit == "token":
            of_penalty = (discounted_returns(block.kl_BT, block.mask_BT, gamma=1.0) for block in blocks)
            returns = [one_BT - kl_coef * penalty_BT for one_BT, penalty_BT in zip(returns, of_penalty, strict=True)]
        made = list(zip(whitened(returns, masks) if estimator.whitened else returns, returns, strict=True))
        # Counted on the scores, because with a KL penalty no two rewards are equal.
        metrics["reward/zero_variance_groups"] = float(zero_variance_groups(scores_B.reshape(-1, group_size)))
    else:
        if greedy:
            metrics["reward/greedy"] = float(torch.tensor(greedy, dtype=torch.float32).mean())
        ends = [0, *accumulate(len(mask_BT) for mask_BT in masks)]
        alone = len(blocks) == 1
        made = [
            block.estimate(
                estimator, kl_coef=kl_coef, turn_weights=turn_weights[start:end], greedy=greedy[start:end], alone=alone
            )
            for block, (start, end) in zip(blocks, pairwise(ends), strict=True)
        ]
        if estimator.whitens and not alone:
            white = whitened([advantages_BT for advantages_BT, _ in made], masks)
            made = [(one, one if raw is of else of) for one, (raw, of) in zip(white, made, strict=True)]
        if estimator.uses_values:
            triples = ((one.values_BT, of, one.mask_BT) for one, (_, of) in zip(blocks, made, strict=True))
            metrics["value/explained_variance"] = explained_variance(triples)
    return [Advantages(*each, {}) for each in made], metrics


def in_blocks(experience: Experience, config: PPOConfig) -> list[Experience]:
    """Return a step in parts of whole groups with at most `BLOCK` places each; as it is where it cannot be divided."""
    estimator, count = config.estimator, len(experience.rollouts)
    lengths = [len(one.completion.token_ids) for one in experience.rollouts]
    own = isinstance(estimator, TokenAdvantage) and type(estimator).by_answer is TokenAdvantage.by_answer
    if count * max(lengths, default=0) <= BLOCK or own or config.distill or config.loss.chooses_tokens:
        return [experience]
    starts, longest = [0], 0
    for at in range(0, count, config.samples_per_prompt):
        longest = max(longest, *lengths[at : at + config.samples_per_prompt])
        if (at + config.samples_per_prompt - starts[-1]) * longest > BLOCK and at > starts[-1]:
            starts.append(at)
            longest = max(lengths[at : at + config.samples_per_prompt])
    return [experience.part(start, end) for start, end in pairwise([*starts, count])]


def with_lessons(advantages: Advantages, experience: Experience, *, reward_weight: float) -> Advantages:
    """Return the advantages of on-policy distillation, beside which those of the rewards have `reward_weight`.

    A_t = sum_m w_m (log pi_m - log pi_old) + reward_weight * A_t(rewards), with the teachers pi_m. Over the policy's own
    tokens the gradient is that of sum_m w_m KL(pi || pi_m) at each token, the tokens before it being given (arXiv
    2306.13649 with the reverse KL). `teacher/kl` is the mean over the tokens of -A_t, `teacher/kl/<name>` that of one teacher.
    """
    mask_BT = completion_tensor([sample.loss_mask for sample in experience.samples], experience)
    old_BT = completion_tensor(experience.old_logprobs, experience)
    total_BT, metrics = torch.zeros_like(old_BT), dict[str, float]()
    for lesson in experience.lessons:
        taught = torch.tensor([bool(row) for row in lesson.logprobs])
        rows = [row or old for row, old in zip(lesson.logprobs, experience.old_logprobs, strict=True)]
        gap_BT = (completion_tensor(rows, experience) - old_BT) * mask_BT  # log pi_m - log pi_old
        total_BT = total_BT + lesson.weight * gap_BT
        if bool(taught.any()):
            metrics[f"teacher/kl/{lesson.name}"] = float(-gap_BT.sum() / masked_count(mask_BT[taught]))
    metrics["teacher/kl"] = float(-total_BT.sum() / masked_count(mask_BT))
    mixed_BT = total_BT + reward_weight * advantages.advantages_BT
    return Advantages(mixed_BT, advantages.returns_BT, advantages.metrics | metrics)


def rows_to_train(
    experience: Experience,
    config: PPOConfig,
    *,
    function: UserFunction | None,
    turn_weights: Mapping[str, float],
    greedy: Sequence[float],
    kl_coef: float,
    seed: int,
) -> tuple[Sequence[PolicySample], Sequence[ValueSample], Metrics]:
    """Return the rows of the policy and of the value model, without masked answers and what the loss leaves out.

    `turn_weights` are by source; `seed` is that of the loss's choice.
    """
    in_reward = config.kl if isinstance(config.kl, KLInReward) else None
    parts = in_blocks(experience, config)
    estimated, metrics = estimate_in_blocks(
        parts,
        estimator=config.estimator,
        group_size=config.samples_per_prompt,
        kl_coef=kl_coef if in_reward else 0.0,
        kl_credit=in_reward.credit if in_reward else "token",
        turn_weights=[turn_weights[one.prompt.source] for one in experience.rollouts],
        function=function,
        greedy=greedy,
    )
    policy_rows, value_rows = list[PolicySample](), list[ValueSample]()
    masked_answers = 0.0
    for part, advantages in zip(parts, estimated, strict=True):
        if config.distill:
            advantages = with_lessons(advantages, part, reward_weight=config.distill.reward_weight)
        kept, advantages = trained_on(
            part, advantages, config.loss, masks=config.truncated_answers == "mask", seed=seed
        )
        policy_rows += policy_samples(kept, advantages)
        value_rows += value_samples(kept, advantages) if part.values else []
        masked_answers += advantages.metrics.get("rollout/masked", 0.0) * len(part.rollouts) / len(experience.rollouts)
        metrics |= advantages.metrics
    if "rollout/masked" in metrics:
        metrics["rollout/masked"] = masked_answers
    return policy_rows, value_rows, metrics


def trained_on(
    experience: Experience, advantages: Advantages, loss: PolicyMethod, *, masks: bool, seed: int
) -> tuple[Experience, Advantages]:
    """Return the trained rollouts: without truncated answers if the loss `masks` them, then the choice of `loss`.

    In this order: tokens that are in no loss must not take the place of others in what the loss draws.
    """
    if masks:
        experience, advantages = without_truncated(experience, advantages)
    if loss.chooses_tokens:
        advantages = with_loss_choice(advantages, experience, loss, seed=seed)
    return experience, advantages


def with_loss_choice(advantages: Advantages, experience: Experience, loss: PolicyMethod, *, seed: int) -> Advantages:
    """Return the advantages without those that `loss` removes by the step as a whole, and their share as a metric.

    The share is `policy/dropped_by_loss`, 0 where no token is left; returns stay, as they are the value's.
    """
    if not experience.rollouts:
        return replace(advantages, metrics=advantages.metrics | {"policy/dropped_by_loss": 0.0})
    mask_BT = completion_tensor([sample.loss_mask for sample in experience.samples], experience)
    old_BT = completion_tensor(experience.old_logprobs, experience)
    before_BT = advantages.advantages_BT
    after_BT = loss.step_advantages(before_BT, old_BT, mask_BT, seed=seed)
    dropped = float((after_BT != before_BT).sum() / masked_count(mask_BT))
    return Advantages(after_BT, advantages.returns_BT, advantages.metrics | {"policy/dropped_by_loss": dropped})


def without_truncated(experience: Experience, advantages: Advantages) -> tuple[Experience, Advantages]:
    """Return the rollouts that ended by themselves, for updates that mask truncated answers.

    Masked answers were part of their group's baseline and of the whitening; they are in no loss and in none of its
    counts: DAPO's overlong filtering, arXiv 2503.14476, section 3.4. The metric `rollout/masked` is their share.
    """
    ended = [at for at, one in enumerate(experience.rollouts) if one.completion.finish_reason != "length"]
    share = 1 - len(ended) / len(experience.rollouts)  # share of answers cut off at the token limit
    kept = Experience(
        rollouts=tuple(experience.rollouts[at] for at in ended),
        samples=tuple(experience.samples[at] for at in ended),
        old_logprobs=tuple(experience.old_logprobs[at] for at in ended),
        ref_logprobs=tuple(experience.ref_logprobs[at] for at in ended) if experience.ref_logprobs else (),
        values=tuple(experience.values[at] for at in ended) if experience.values else (),
    )
    longest = max((len(one.completion.token_ids) for one in kept.rollouts), default=0)
    rows = advantages.advantages_BT[ended, :longest], advantages.returns_BT[ended, :longest]
    return kept, Advantages(*rows, advantages.metrics | {"rollout/masked": share})


def _compared(
    estimator: GroupAdvantage, answers_B: Tensor, lengths_B: Tensor, group_size: int, function: UserFunction | None
) -> Tensor:
    """Return the advantage of each answer [B]."""
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
    """Return rewards (B, T): the KL penalty on every action, plus the score on the last action."""
    rewards_BT = -kl_coef * kl_BT * mask_BT  # r_t = -kl_coef * k1_t
    positions_T = torch.arange(mask_BT.shape[1])
    last_B = torch.where(mask_BT != 0, positions_T, -1).amax(dim=1)
    rewards_BT[torch.arange(len(scores_B)), last_B] += scores_B  # r_T = ... + R
    return rewards_BT


def move_to_turns(rewards_BT: Tensor, rollouts: Sequence[Rollout], weights: Sequence[float]) -> None:
    """Move the reward of each turn, times the weight of its rollout, from the last action to the turn's own, in place."""
    for row, rollout, weight in zip(rewards_BT, rollouts, weights, strict=True):
        spans = [span for span in rollout.completion.spans if span.end > span.start]
        for span in spans:
            row[span.end - 1] += weight * span.reward  # to the turn that earned it
            row[spans[-1].end - 1] -= weight * span.reward  # the sum over the answer stays R


def policy_samples(experience: Experience, advantages: Advantages) -> list[PolicySample]:
    """Return one sample per rollout for the policy loss, with per-token values of 0 on the prompt."""
    return [
        PolicySample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            rollout_logprobs=_after_prompt(rollout, rollout.completion.logprobs),
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=_after_prompt(rollout, row),
        )
        for rollout, sample, old, ref, row in zip(
            experience.rollouts,
            experience.samples,
            experience.old_logprobs,
            experience.ref_logprobs or (floats(()),) * len(experience.rollouts),
            advantages.advantages_BT.numpy(),
            strict=True,
        )
    ]


def sampled_logprobs(rollouts: Sequence[Rollout]) -> list[Column[float]]:
    """Return the sampler's log-probs per token of the whole sequences, with 0 on the prompts."""
    return [_after_prompt(rollout, rollout.completion.logprobs) for rollout in rollouts]


def value_samples(experience: Experience, advantages: Advantages) -> list[ValueSample]:
    """Return one sample per rollout for the value loss."""
    return [
        ValueSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            old_values=values,
            returns=_after_prompt(rollout, row),
        )
        for rollout, sample, values, row in zip(
            experience.rollouts, experience.samples, experience.values, advantages.returns_BT.numpy(), strict=True
        )
    ]


def _after_prompt(rollout: Rollout, values: Column[float] | NDArray[np.float32]) -> Column[float]:
    tokens = len(rollout.completion.token_ids)
    answer = floats(values if len(values) == tokens else values[:tokens])
    return joined(zeros("f", len(rollout.prompt_ids), beside=answer), answer)


def _distance(blocks: Sequence[Block]) -> Metrics:
    """Return the metrics of the policy's distance from the reference; {} without one."""
    if not blocks[0].experience.ref_logprobs:
        return {}
    tokens = sum(block.mask_BT.sum() for block in blocks)
    k3s = [schulman_k3(block.kl_BT).sum() for block in blocks]  # 0 where k1 is
    return {
        "kl/per_token": float(sum(block.kl_BT.sum() for block in blocks) / tokens),
        "kl/per_sequence": float(torch.cat([block.kl_BT.sum(dim=1) for block in blocks]).mean()),
        "kl/k3": float(sum(k3s) / tokens),  # k3 = exp(-k1) - 1 + k1, never negative
    }


def _rollout_metrics(rollouts: Sequence[Rollout], blocks: Sequence[Block]) -> Metrics:
    masks = [block.mask_BT for block in blocks]
    sampled = (completion_tensor(sampled_logprobs(one.experience.rollouts), one.experience) for one in blocks)
    parts = [Mismatch.of(block.old_BT, mu_BT, block.mask_BT) for block, mu_BT in zip(blocks, sampled, strict=True)]
    entropy = -sum((block.old_BT * block.mask_BT).sum() for block in blocks)  # a sample of H = -E log pi
    return {
        "rollout/length": float(
            torch.cat([mask_BT.sum(dim=1) for mask_BT in masks]).mean()
        ),  # tokens that were sampled
        "rollout/truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/entropy": float(entropy / sum(mask_BT.sum() for mask_BT in masks)),
        **{f"mismatch/{name}": value for name, value in reduce(add, parts).metrics().items()},
    }
