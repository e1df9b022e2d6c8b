"""The scored rollouts of each step of policy optimisation, those of a prompt together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.order import rows_at
from rlhf_core.data.rollout_log import RolloutLog
from rlhf_core.interfaces import Sampler
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.answers import sample
from rlhf_core.rollouts.dynamic_sampling import sampled_until_decided
from rlhf_core.rollouts.validity import valid_groups
from rlhf_core.types import Prompt, Rollout, derive_seed


@dataclass(frozen=True)
class RolloutSource:
    """Draws prompts, samples answers and scores them. Every sample has its own seed, so a restart changes nothing."""

    config: PPOConfig
    sampler: Sampler
    score: Scorer
    chat: ChatTemplate
    prompts: Sequence[Prompt]
    log: RolloutLog
    seed: int

    def collect(self, step: int, *, policy: str) -> list[Rollout]:
        """Return the scored rollouts of a step, whole groups without invalid ones.

        Those that the same policy (by digest) made before a kill are taken again. RewardError if no group is valid.
        """
        kept = self.log.read(step, policy=policy)
        if kept is not None:
            self.score.restore(kept.scorer)
            return valid_groups(kept.rollouts, group_size=self.config.samples_per_prompt)
        if self.config.dynamic_sampling:
            groups, size = self.config.prompts_per_step, self.config.samples_per_prompt
            rollouts = sampled_until_decided(
                lambda number: self._draw(step, number), self.config.dynamic_sampling, groups=groups, group_size=size
            )
        else:
            rollouts = self._draw(step, 0)
        self.log.write(step, rollouts, self.score.state(), policy=policy)
        self.log.forget(before=step - self.config.checkpoint_every)
        return valid_groups(rollouts, group_size=self.config.samples_per_prompt)

    def _draw(self, step: int, number: int) -> list[Rollout]:
        salted = derive_seed(self.seed, "round", number) if number else self.seed
        batch = rows_at(step, self.prompts, count=self.config.prompts_per_step, seed=salted)
        return self.score(sample(self.sampler, self.chat, batch, self.config, step=step, seed=salted))
