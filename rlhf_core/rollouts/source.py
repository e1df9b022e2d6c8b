"""The scored rollouts of each step of policy optimisation, those of a prompt together.

Step s trains on what the weights of step max(0, s - staleness) sampled. That is a fixed schedule: which weights answer
which prompts with which seeds does not depend on who is faster, so a resumed run has the same bytes, with overlap too.
With `staleness` > 0 one thread loads weights and samples while the caller trains. On Ray these are different processes; a
sampler in this process shares its cores with the training. Scoring waits for the step, since the trainers' workers do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf_core.agents.process import Environments
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.order import rows_at
from rlhf_core.data.rollout_log import POOL, Drawn, Pool, RolloutLog, read_drawn, read_pool, write_drawn, write_pool
from rlhf_core.errors import DataError, explain
from rlhf_core.interfaces import Metrics, Sampler, Trainer, Weights
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.answers import episode_metrics, sample
from rlhf_core.rollouts.background import Background, Inline
from rlhf_core.rollouts.dynamic_sampling import is_decided, sampled_until_decided
from rlhf_core.rollouts.partial import draw_groups
from rlhf_core.rollouts.validity import has_whole_group, valid_groups
from rlhf_core.store.failures import Counts
from rlhf_core.types import Generation, Prompt, Rollout, derive_seed


class RolloutSource:
    """Draws prompts, samples answers and scores them. Every sample has its own seed, so a restart changes nothing.

    `note_failed` is told, by step, how many answers failed before they are kept. `waited_s` is how long the last step waited
    for its answers. Leave the `with` block before the sampler's lease ends.

    >>> with RolloutSource(config, sampler, score, chat, prompts, log, seed) as source:   # doctest: +SKIP
    ...     rollouts = source.rollouts(0, policy)
    """

    def __init__(
        self,
        config: PPOConfig,
        sampler: Sampler,
        score: Scorer,
        chat: ChatTemplate,
        prompts: Sequence[Prompt],
        log: RolloutLog,
        seed: int,
        environments: Environments | None = None,
        note_failed: Callable[[int, Counts], None] = lambda step, counts: None,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._score = score
        self._chat = chat
        self._prompts = prompts
        self._log = log
        self._seed = seed
        self._environments = environments
        self._note_failed = note_failed
        self._jobs: Background | Inline = Background("sampling") if config.staleness else Inline()
        self._loaded: Future[None] | None = None
        self._drawn: dict[int, Future[Drawn]] = {}
        """What was asked for and not taken yet, by step."""
        self._asked = 0
        """All steps below were asked for."""
        self._pool = Pool()  # the jobs' own while one may run
        self.waited_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.close(interrupted=kind is not None and not issubclass(kind, Exception))

    def rollouts(self, step: int, policy: Trainer) -> tuple[list[Rollout], Metrics]:
        """Return the scored rollouts of a step, whole groups without invalid ones, and `rollout/*` of how old they are.

        `policy` is at the weights of this step. Those that the same policy (by digest) made before a kill are taken
        again. RewardError if no group is valid; whatever went wrong while sampling ahead is raised here, too.
        """
        clock = time.perf_counter()
        self._ask(step, policy)
        drawn = self._jobs.result(self._drawn.pop(step))
        self.waited_s = time.perf_counter() - clock
        rollouts = self._scored(step, drawn)
        ahead = len(self._drawn) * self._config.prompts_per_step
        begun = ahead + len(drawn.pool.samples) // self._config.samples_per_prompt
        # The segments of partial rollouts are spans as well, and no turns.
        episodes = episode_metrics([one.completion for one in drawn.generations]) if self._config.agent else {}
        return rollouts, staleness(rollouts, step) | episodes | self._fillers(rollouts) | {
            "rollout/in_flight": float(begun)
        }

    def save(self, folder: Path) -> None:
        """Wait for what is being sampled and write all that was not taken yet: newer weights could not make it again."""
        write_drawn(folder, {step: self._jobs.result(drawn) for step, drawn in self._drawn.items()})
        write_pool(folder / POOL, self._pool)

    def load(self, folder: Path, step: int) -> None:
        """Go on at `step` from what `save` wrote. DataError if rollouts are missing that older weights made.

        A step of whose groups none was played to its end is asked for again, with those after it, of the weights of then.
        """
        kept = read_drawn(folder)
        self._asked = min(step + self._config.staleness, self._config.steps)
        if sorted(kept) != list(range(step, self._asked)):
            rule = (
                f"rollouts of the steps {step} to {self._asked - 1} should wait here, there are those of {sorted(kept)}"
            )
            raise DataError(explain("checkpoint.rollouts", str(folder), rule, "start the stage over with --force"))
        size = self._config.samples_per_prompt
        usable = takewhile(lambda one: has_whole_group(one[1].generations, group_size=size), sorted(kept.items()))
        self._drawn = {number: _done(one) for number, one in usable}
        self._asked = step + len(self._drawn)
        self._pool = read_pool(folder / POOL)

    # ------------------------------------------------------------ asking ahead

    def _ask(self, step: int, policy: Trainer) -> None:
        """Let the policy of this step sample for all steps up to `step + staleness` that were not asked for."""
        end = min(step + self._config.staleness + 1, self._config.steps)
        if self._asked >= end:
            return
        if self._loaded is not None:
            # Only the newest weights can be sent from a GPU, and no more than two sets are kept waiting anywhere.
            self._jobs.result(self._loaded)
        weights = policy.weights()
        self._loaded = self._jobs.submit(partial(self._load_weights, weights, step))
        for number in range(self._asked, end):
            self._drawn[number] = self._jobs.submit(partial(self._draw, number, weights.digest))
        self._asked = end

    def _load_weights(self, weights: Weights, version: int) -> None:
        self._sampler.load_weights(weights, version=version)

    def _draw(self, step: int, digest: str) -> Drawn:
        kept = self._log.read(step, policy=digest)
        if kept is not None:
            self._pool = kept.pool
            generations = [Generation(one.prompt, one.prompt_ids, one.completion) for one in kept.rollouts]
        elif self._config.partial_tokens:
            generations, self._pool = draw_groups(
                self._pool, self._sampler, self._chat, self._prompts, self._config, seed=self._seed
            )
        else:
            generations = self._answers(step, 0)
        return Drawn(digest, generations, self._pool)

    def _answers(self, step: int, number: int) -> list[Generation]:
        salted = derive_seed(self._seed, "round", number) if number else self._seed
        batch = rows_at(step, self._prompts, count=self._config.prompts_per_step, seed=salted)
        return sample(
            self._sampler, self._chat, batch, self._config, step=step, seed=salted, environments=self._environments
        )

    # ------------------------------------------------------------ scoring

    def _fillers(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return how many groups of a step dynamic sampling took for want of better ones when its rounds were over."""
        bounds, size = self._config.dynamic_sampling, self._config.samples_per_prompt
        if bounds is None:
            return {}
        groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        return {"rollout/undecided_groups": float(sum(not is_decided(group, bounds) for group in groups))}

    def _scored(self, step: int, drawn: Drawn) -> list[Rollout]:
        groups, size = self._config.prompts_per_step, self._config.samples_per_prompt
        self._score.at_step(step)
        kept = self._log.read(step, policy=drawn.policy)
        if kept is not None:
            self._score.restore(kept.scorer)
            return valid_groups(kept.rollouts, group_size=size)
        if self._config.dynamic_sampling:

            def draw(number: int) -> list[Rollout]:
                return self._score(self._answers(step, number) if number else drawn.generations)

            rollouts = sampled_until_decided(draw, self._config.dynamic_sampling, groups=groups, group_size=size)
        else:
            rollouts = self._score(drawn.generations)
        valid = valid_groups(rollouts, group_size=size)  # first: a step without any is not kept, but scored again
        self._note_failed(step, self._score.failed())  # before they are kept: a kill in between would keep them unnoted
        self._log.write(step, rollouts, self._score.state(), policy=drawn.policy, pool=drawn.pool)
        self._log.forget(before=step - self._config.checkpoint_every)
        return valid


def staleness(rollouts: Sequence[Rollout], step: int) -> Metrics:
    """Return how many updates the policy of `step` is ahead of those that sampled, over the sampled tokens."""
    ages: list[tuple[int, int]] = []  # age, tokens
    for rollout in rollouts:
        made = rollout.completion
        spans = [(span.policy_version, span.end - span.start) for span in made.spans]
        ages += [(step - version, tokens) for version, tokens in spans or [(made.policy_version, len(made.token_ids))]]
    mean = sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages)
    return {"rollout/staleness": mean, "rollout/staleness_max": float(max(age for age, _ in ages))}


def _done(drawn: Drawn) -> Future[Drawn]:
    future: Future[Drawn] = Future()
    future.set_result(drawn)
    return future
