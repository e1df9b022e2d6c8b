"""Build the sampler and the scorer of policy optimization from the configuration.

The training loop makes the same calls for all of them:

    sampler.load_weights(policy.weights, version=step)
    drawn = sampler.generate(step)
    rollouts = score(step, drawn)

| setting            | part                                                                              |
|--------------------|-----------------------------------------------------------------------------------|
| `staleness`        | `AheadSampler` around the sampler: samples later steps while the caller trains      |
| `partial_tokens`   | `draw_groups` in the place of `WholeAnswers`: unfinished answers continue in a later step |
| `dynamic_sampling` | `DynamicScoring` around the rewards: replaces groups that carry no gradient         |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from rlhf_core.agents.process import Environments
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import Pool, RolloutLog
from rlhf_core.interfaces import Sampler
from rlhf_core.rewards.scoring import Scorer, open_scorer
from rlhf_core.rollouts.answers import AheadSampler, OnPolicySampler, StepSampler, WholeAnswers, draw_groups
from rlhf_core.rollouts.guard import HeldOut, RunGuard
from rlhf_core.rollouts.scored_step import DynamicScoring, StepScorer
from rlhf_core.stage.context import StageContext
from rlhf_core.store.failures import Counts
from rlhf_core.types import Generation, Prompt, RewardModelRef


@contextmanager
def open_rollouts(
    config: PPOConfig,
    engine: Sampler,
    scorer: Scorer,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    log: RolloutLog,
    *,
    seed: int,
    environments: Environments | None = None,
    note_failed: Callable[[int, Counts], None] = lambda step, counts: None,
) -> Iterator[tuple[StepSampler, StepScorer]]:
    """Yield the sampler and the scorer of each step. Leave the `with` block before the lease of `engine` ends.

    Every sample has its own seed, so a restart draws the same answers. `note_failed` is called with the number that a
    step has once it is made and how many of its answers failed, before they are written to the `log`.
    """
    whole = WholeAnswers(engine, chat, prompts, config, seed=seed, environments=environments)

    def draw_partial(step: int, pool: Pool) -> tuple[list[Generation], Pool]:
        return draw_groups(pool, engine, chat, prompts, config, seed=seed)

    sampler = OnPolicySampler(engine, log, draw_partial if config.partial_tokens else whole)
    groups, size = config.prompts_per_step, config.samples_per_prompt
    dynamic: DynamicScoring | None = None
    if config.dynamic_sampling is not None:
        dynamic = DynamicScoring(scorer, whole.sample_round, config.dynamic_sampling, groups, size)
    score = StepScorer(
        scorer=scorer,
        log=log,
        group_size=size,
        keep_steps=config.checkpoint_every,
        note_failed=note_failed,
        dynamic=dynamic,
    )
    if not config.staleness:
        yield sampler, score
        return
    with AheadSampler(sampler, staleness=config.staleness, steps=config.steps, group_size=size) as ahead:
        yield ahead, score


def open_guard(
    config: PPOConfig,
    engine: Sampler,
    sampler: StepSampler,
    scorer: Scorer,
    chat: ChatTemplate,
    held_out: Sequence[Prompt],
    reward_models: Mapping[str, RewardModelRef],
    environments: Environments | None,
    context: StageContext,
    leases: ExitStack,
) -> RunGuard:
    """Return the guard of a run; `leases` hold the engines of its independent rewards."""
    if config.evaluate is None:
        return RunGuard(config, sampler, None, context)
    independent = config.evaluate.independent
    evaluated = HeldOut(
        config.evaluate,
        held_out,
        engine=engine,
        chat=chat,
        sampling=config.sampling,
        seed=context.seed,
        environments=environments,
        scorer=scorer.comparable(),
        independent=leases.enter_context(open_scorer(independent, reward_models, context)) if independent else None,
        note_failed=context.failed,
    )
    return RunGuard(config, sampler, evaluated, context)
