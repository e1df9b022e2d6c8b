"""From scored rollouts to training samples: token rewards, advantages and returns.

Shapes: B rollouts, T completion tokens (padded to the longest), P prompts, G samples per prompt; B = P * G, and the
rollouts of a prompt stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.advantage.base import (
    GroupAdvantage,
    GroupRewards,
    TokenRewards,
    whiten,
    zero_variance_groups,
)
from rlhf_core.algorithms.advantage.reinforce_pp import discounted_returns
from rlhf_core.algorithms.correction import mismatch_metrics
from rlhf_core.algorithms.kl import k1, k3
from rlhf_core.algorithms.value import explained_variance
from rlhf_core.config.policy import Advantage, KLCredit
from rlhf_core.errors import ConfigError, explain
from rlhf_core.interfaces import Metrics
from rlhf_core.types import PolicySample, Rollout, TokenSample, ValueSample
from rlhf_core.user_code.dependencies import UserFunction


@dataclass(frozen=True)
class Experience:
    """Rollouts as the models see them. `logprobs` and `values` rows are per token of the whole sequence (length L)."""

    rollouts: tuple[Rollout, ...]
    samples: tuple[TokenSample, ...]
    old_logprobs: tuple[tuple[float, ...], ...]
    ref_logprobs: tuple[tuple[float, ...], ...]
    """One row per sample, or empty where there is no reference."""
    values: tuple[tuple[float, ...], ...]
    """One row per sample, or empty where there is no value model."""


@dataclass(frozen=True)
class Advantages:
    """What the losses need: advantages and returns per completion token, and what was measured on the way."""

    advantages_BT: Tensor
    returns_BT: Tensor
    metrics: Metrics


def token_sample(rollout: Rollout) -> TokenSample:
    """Return prompt and completion as one sequence whose actions are the tokens that the policy sampled."""
    prompt, completion = rollout.prompt_ids, rollout.completion
    return TokenSample(token_ids=prompt + completion.token_ids, loss_mask=(0,) * len(prompt) + completion.action_mask)


def completion_tensor(rows: Sequence[Sequence[float]], experience: Experience) -> Tensor:
    """Return the completion part of per-token rows (length L each) as a right-padded tensor (B, T)."""
    parts = [
        torch.tensor(row[len(rollout.prompt_ids) :], dtype=torch.float32)
        for row, rollout in zip(rows, experience.rollouts, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def estimate_advantages(
    experience: Experience,
    *,
    estimator: Advantage,
    group_size: int,
    kl_coef: float,
    kl_credit: KLCredit = "token",
    turn_weight: float = 0.0,
    function: UserFunction | None = None,
) -> Advantages:
    """Return advantages by `estimator` from rewards with the KL penalty inside (`kl_coef` = 0 leaves it out).

    Token rewards (arXiv 2203.02155): -kl_coef * k1 on every token, k1 = log pi_old - log pi_ref, and the rollout's reward
    on the last one; with `turn_weight` that much of what each turn earned stands at the turn's own last token. gae and
    reinforce++ are of these. Group estimators compare whole answers, and the penalty comes in by `kl_credit`:

    `token`: A_t = (reward after the group's baseline) - kl_coef * (sum of k1 from t on). The baseline is of rewards alone,
    and a token pays for what comes from it on, undiscounted: OpenRLHF's `compute_advantages_and_returns`, whose baseline
    is subtracted before the penalty is put on each token and summed up; REINFORCE++ (arXiv 2501.03262) has the penalty
    per token, too.
    `answer`: A_t = (reward - kl_coef * sum of k1) after the group's baseline, the same on every token. The penalty is part
    of what an answer earns, and so of the baseline: RLOO (arXiv 2402.14740: r - beta log(pi/pi_ref) of the whole answer
    is what its baseline is of), as TRL's RLOO and verl (`apply_kl_penalty`) do it.

    What reinforce++-baseline whitens is the result. `function` is that of a custom estimator. Raises ConfigError for
    groups of fewer than two, and for a penalty without a reference.
    """
    mask_BT = completion_tensor([sample.loss_mask for sample in experience.samples], experience)
    old_BT = completion_tensor(experience.old_logprobs, experience)
    scores_B = torch.tensor([rollout.reward for rollout in experience.rollouts], dtype=torch.float32)
    metrics = _reward_metrics(scores_B) | _rollout_metrics(experience, old_BT, mask_BT)
    kl_BT = torch.zeros_like(old_BT)
    if experience.ref_logprobs:
        ref_BT = completion_tensor(experience.ref_logprobs, experience)
        kl_BT = k1(old_BT, ref_BT) * mask_BT
        metrics |= _kl_metrics(kl_BT, k3(old_BT, ref_BT), mask_BT)
    elif kl_coef:
        rule = "there are no log-probs of a reference"
        raise ConfigError(explain("ppo.kl_coef", kl_coef, rule, "measure them, or set it to 0"))
    rewards_BT = token_rewards(scores_B, kl_BT, mask_BT, kl_coef=kl_coef)
    if turn_weight:
        move_to_turns(rewards_BT, experience.rollouts, weight=turn_weight)

    if isinstance(estimator, GroupAdvantage):
        # From the scores and not from token rewards that add up to them: of a group that earned the same the sums
        # differ by rounding, and a spread that is rounding divided by itself looks like an advantage.
        answers_B = scores_B - kl_coef * kl_BT.sum(dim=1) if kl_credit == "answer" else scores_B
        advantages_BT = _compared(estimator, answers_B, mask_BT, group_size, function)
        if kl_credit == "token":
            advantages_BT = advantages_BT - kl_coef * discounted_returns(kl_BT, mask_BT, gamma=1.0)
        returns_BT = advantages_BT
        if estimator.whitened:
            advantages_BT = whiten(advantages_BT, mask_BT)
        # Of the scores: with a KL penalty inside, no two rewards are equal.
        metrics["reward/zero_variance_groups"] = float(zero_variance_groups(scores_B.reshape(-1, group_size)))
    else:
        values_BT = completion_tensor(experience.values, experience) if estimator.uses_values else None
        tokens = TokenRewards(rewards=rewards_BT, loss_mask=mask_BT, values=values_BT)
        advantages_BT, returns_BT = estimator.estimate(tokens)
        if values_BT is not None:
            metrics["value/explained_variance"] = float(explained_variance(values_BT, returns_BT, mask_BT))
    return Advantages(advantages_BT, returns_BT, metrics)


def _compared(
    estimator: GroupAdvantage, answers_B: Tensor, mask_BT: Tensor, group_size: int, function: UserFunction | None
) -> Tensor:
    """Return the advantage of each answer on all of its tokens [B, T]."""
    if group_size < 2:
        rule = f"the estimator {estimator.type!r} compares the samples of a prompt, at least 2"
        raise ConfigError(explain("ppo.samples_per_prompt", group_size, rule, "raise it, or use gae or reinforce++"))
    groups = GroupRewards(
        rewards=answers_B.reshape(-1, group_size),
        lengths=mask_BT.sum(dim=1).reshape(-1, group_size),
        function=None if function is None else function.load(key="advantage.function"),
    )
    return estimator.compare(groups).reshape(-1, 1) * mask_BT


def token_rewards(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, kl_coef: float) -> Tensor:
    """Return rewards (B, T): the KL penalty on every action and the score added on the last one."""
    rewards_BT = -kl_coef * kl_BT * mask_BT
    positions_T = torch.arange(mask_BT.shape[1])
    last_B = torch.where(mask_BT != 0, positions_T, -1).amax(dim=1)
    rewards_BT[torch.arange(len(scores_B)), last_B] += scores_B
    return rewards_BT


def move_to_turns(rewards_BT: Tensor, rollouts: Sequence[Rollout], *, weight: float) -> None:
    """Move `weight` times what each turn earned from the last action to the turn's own last one, in place."""
    for row, rollout in zip(rewards_BT, rollouts, strict=True):
        spans = [span for span in rollout.completion.spans if span.end > span.start]
        for span in spans:
            row[span.end - 1] += weight * span.reward
            row[spans[-1].end - 1] -= weight * span.reward


def policy_samples(experience: Experience, advantages: Advantages) -> list[PolicySample]:
    """Return one training row per rollout; per-token values are 0 on the prompt."""
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
            experience.ref_logprobs or ((),) * len(experience.rollouts),
            advantages.advantages_BT.tolist(),
            strict=True,
        )
    ]


def sampled_logprobs(rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
    """Return the sampler's log-probs per token of the whole sequences, 0 on the prompts."""
    return [_after_prompt(rollout, rollout.completion.logprobs) for rollout in rollouts]


def value_samples(experience: Experience, advantages: Advantages) -> list[ValueSample]:
    """Return one row per rollout for the value loss."""
    return [
        ValueSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            old_values=values,
            returns=_after_prompt(rollout, row),
        )
        for rollout, sample, values, row in zip(
            experience.rollouts, experience.samples, experience.values, advantages.returns_BT.tolist(), strict=True
        )
    ]


def _after_prompt(rollout: Rollout, values: Sequence[float]) -> tuple[float, ...]:
    return (0.0,) * len(rollout.prompt_ids) + tuple(values[: len(rollout.completion.token_ids)])


def _reward_metrics(scores_B: Tensor) -> Metrics:
    return {"reward/mean": float(scores_B.mean()), "reward/std": float(scores_B.std(correction=0))}


def _kl_metrics(kl_BT: Tensor, k3_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """Return how far the policy is from the reference; `kl_BT` is 0 outside the mask."""
    tokens = mask_BT.sum()
    return {
        "kl/per_token": float(kl_BT.sum() / tokens),
        "kl/per_sequence": float(kl_BT.sum(dim=1).mean()),
        "kl/k3": float((k3_BT * mask_BT).sum() / tokens),
    }


def _rollout_metrics(experience: Experience, old_BT: Tensor, mask_BT: Tensor) -> Metrics:
    rollouts = experience.rollouts
    sampled_BT = completion_tensor(sampled_logprobs(rollouts), experience)
    mismatch = mismatch_metrics(old_BT, sampled_BT, mask_BT)
    return {
        "rollout/length": float(mask_BT.sum(dim=1).mean()),
        "rollout/truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/entropy": float(-(old_BT * mask_BT).sum() / mask_BT.sum()),
        **{f"mismatch/{name}": float(value) for name, value in mismatch.items()},
    }
