"""Sample the answers of a step: `samples_per_prompt` for each prompt.

With an agent an answer is an episode: turns of the policy with the environment's observations between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Protocol, TypeVar

from rlhf_core.agents.episodes import Episode, play
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.order import rows_at
from rlhf_core.data.rollout_log import POOL, Drawn, Pool, RolloutLog, read_pool, write_pool
from rlhf_core.interfaces import Metrics, Sampler, Weights
from rlhf_core.stage.context import StageContext
from rlhf_core.types import Completion, Generation, Prompt, SamplingRequest, derive_seed

T = TypeVar("T")
DrawAnswers = Callable[[int, Pool], tuple[list[Generation], Pool]]
"""(step, pool of unfinished answers) -> the answers of the step, and the pool that is left."""


class StepSampler(Protocol):
    """Samples the answers of each step of policy optimization; `load_weights` before each `generate`."""

    @property
    def ahead(self) -> int:
        """Return how many later steps are being sampled."""
        ...

    def load_weights(self, weights: Callable[[], Weights], *, version: int) -> None:
        """Sample with `weights()` from now on, the policy's weights after `version` updates."""
        ...

    def generate(self, step: int) -> Drawn:
        """Return the answers of `step`, those of a prompt together."""
        ...

    def borrow(self, weights: Callable[[], Weights], *, version: int, job: Callable[[], T]) -> T:
        """Return what `job` returns, which may use the engine while it holds `weights()`; nothing else is sampled then."""
        ...

    def save(self, folder: Path) -> None:
        """Write all answers, finished or not, that no step has taken yet."""
        ...

    def load(self, folder: Path, step: int) -> None:
        """Continue at `step` from what `save` wrote."""
        ...


class OnPolicySampler:
    """A `StepSampler` that samples each step when it is asked for, with the weights that were loaded last.

    A step that the same policy (by digest) sampled and the log has, since a run was killed, is taken from the log.
    """

    def __init__(self, engine: Sampler, log: RolloutLog, draw: DrawAnswers) -> None:
        self._engine = engine
        self._log = log
        self._draw = draw
        self._policy = ""
        self._pool = Pool()

    @property
    def ahead(self) -> int:
        """Return 0: no later step is sampled."""
        return 0

    def load_weights(self, weights: Callable[[], Weights], *, version: int) -> None:
        """Send `weights()` to the engine."""
        sent = weights()
        self._engine.load_weights(sent, version=version)
        self._policy = sent.digest

    def generate(self, step: int) -> Drawn:
        """Return the answers of `step`, from the log if it has them."""
        kept = self._log.read(step, policy=self._policy)
        if kept is not None:
            self._pool = kept.pool
            generations = [Generation(one.prompt, one.prompt_ids, one.completion) for one in kept.rollouts]
        else:
            generations, self._pool = self._draw(step, self._pool)
        return Drawn(self._policy, generations, self._pool)

    def borrow(self, weights: Callable[[], Weights], *, version: int, job: Callable[[], T]) -> T:
        """Send `weights()` to the engine and return what `job` returns."""
        self._engine.load_weights(weights(), version=version)
        return job()

    def save(self, folder: Path) -> None:
        """Write the pool of unfinished answers."""
        write_pool(folder / POOL, self._pool)

    def load(self, folder: Path, step: int) -> None:
        """Read what `save` wrote."""
        self._pool = read_pool(folder / POOL)


class WholeAnswers:
    """Draws the prompts of a step and samples their answers whole: a `DrawAnswers` without a pool."""

    def __init__(
        self,
        engine: Sampler,
        chat: ChatTemplate,
        prompts: Sequence[Prompt],
        config: PPOConfig,
        *,
        seed: int,
        environments: Environments | None,
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._prompts = prompts
        self._config = config
        self._seed = seed
        self._environments = environments

    def __call__(self, step: int, pool: Pool) -> tuple[list[Generation], Pool]:
        """Return the answers of `step`, and the pool as it is."""
        return self.sample_round(step, 0), pool

    def sample_round(self, step: int, number: int) -> list[Generation]:
        """Return the answers of round `number` of `step`; each round has other prompts and seeds."""
        seed = derive_seed(self._seed, "round", number) if number else self._seed
        batch = rows_at(step, self._prompts, count=self._config.prompts_per_step, seed=seed)
        return sample(
            self._engine, self._chat, batch, self._config, step=step, seed=seed, environments=self._environments
        )


def open_environments(
    agent: AgentConfig | None, policy: Path, leases: ExitStack, context: StageContext
) -> Environments | None:
    """Start the agent's processes, which end with `leases`; None without an agent. `policy` is the policy's folder."""
    if agent is None:
        return None
    opened = Environments(
        agent, tokenizer=str(policy), functions=context.functions, files=context.files, notes=context.notes
    )
    return leases.enter_context(opened)


def sample(
    sampler: Sampler,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    step: int,
    seed: int,
    environments: Environments | None = None,
) -> list[Generation]:
    """Return `samples_per_prompt` completions per prompt, those of a prompt together, each from its own seed.

    A prompt that occurs twice in `prompts` continues to number its samples, so that they get other seeds.
    """
    chat = chat if environments is None else chat.with_tools(environments.tools)
    work: list[Episode] = []
    drawn: Counter[str] = Counter()
    for prompt in prompts:
        ids = chat.prompt_ids(prompt.messages)
        numbers = range(drawn[prompt.id], drawn[prompt.id] + config.samples_per_prompt)
        work += [Episode(prompt, ids, derive_seed(seed, "ppo", step, prompt.id, i)) for i in numbers]
        drawn[prompt.id] += config.samples_per_prompt
    drawn_answers = answers(sampler, chat, work, config.sampling, environments)
    return [Generation(one.prompt, ids, completion) for one, (ids, completion) in zip(work, drawn_answers, strict=True)]


def answers(
    sampler: Sampler,
    chat: ChatTemplate,
    work: Sequence[Episode],
    sampling: SamplingConfig,
    environments: Environments | None,
) -> list[tuple[tuple[int, ...], Completion]]:
    """Return one completion per prompt of `work`, played with `environments` if there are any, with the prompt's tokens."""
    if environments is None:
        requests = [SamplingRequest(one.prompt_ids, one.seed) for one in work]
        completions = sampler.generate(requests, sampling)
        return [(one.prompt_ids, completion) for one, completion in zip(work, completions, strict=True)]
    played = play(sampler, chat, work, environments, environments.config, sampling)
    return [(one.prompt_ids, one.completion) for one in played]


def episode_metrics(completions: Sequence[Completion]) -> Metrics:
    """Return turns, failures and the means of what the environments report; nothing for answers that are no episodes."""
    episodes = [completion for completion in completions if completion.spans or completion.failure]
    if not episodes:
        return {}
    extras: defaultdict[str, list[float]] = defaultdict(list)
    for completion in episodes:
        for name, value in completion.extras.items():
            extras[name].append(value)
    return {
        "rollout/turns": fmean(len(completion.spans) for completion in episodes),
        "rollout/failed_episodes": fmean(bool(completion.failure) for completion in episodes),
        **{f"episode/{name}": fmean(values) for name, values in sorted(extras.items())},
    }
