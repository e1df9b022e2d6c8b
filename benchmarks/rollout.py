"""Compare rollout samples per second with `vllm.LLM.generate` on the same requests, and measure the cost of a sync.

    python -m benchmarks.rollout
    python -m benchmarks.rollout --hidden 2048 --layers 16 --gpus 1 --samples 512 --prompt 256 --answer 512

Single turns use an in-process sampler and one on Ray. Episodes of several turns are played in lockstep and
continuously, with environments that take `--delay` seconds per turn on average. *plain* is `LLM.generate` on the engine
of the in-process sampler: for single turns, all requests at once; for episodes, turn by turn as requested in lockstep,
without environments. `--clock cpu` counts the CPU seconds of this process and its descendants, which hardly depend on
other load of the machine; waiting does not count. The model is a Llama with random weights, so nothing is downloaded
and nearly every answer has its maximum length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_core.agents.environment import Environment, StepResult

REPEATS = 3
PLAIN_SINGLE, PLAIN_TURNS = "single turn, plain", "episodes, plain, turn by turn"


class Patient(Environment):
    """An environment that waits for a while and replies briefly; an episode takes `turns` turns."""

    def __init__(self, turns: int, delay_s: float) -> None:
        self._turns = turns
        self._delay_s = delay_s
        self._draw = random.Random()

    def reset(self, prompt: Any, seed: int) -> None:
        """Begin an episode; the seed determines the duration of each turn."""
        self._draw.seed(seed)

    async def step(self, action: str, **info: Any) -> StepResult:  # type: ignore[override]
        """Reply after `delay_s` on average, exponentially distributed."""
        if self._delay_s:
            await asyncio.sleep(self._draw.expovariate(1 / self._delay_s))
        done = info["turn"] + 1 >= self._turns
        return StepResult("" if done else f"{info['turn']} and {info['turn'] + 1}?", reward=1.0, done=done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 192, "layers": 4, "samples": 48, "prompt": 32, "answer": 64, "turns": 3, "gpus": 0, "threads": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--delay", type=float, default=0.1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        compare(Path(folder), options, stack)


def compare(policy: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """Build all sides, then measure them in turn, three times after a warm-up."""
    from benchmarks.random_policy import make_policy
    from rlhf_core.config.engines import TrainerConfig
    from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig
    from rlhf_core.runtime.local_runtime import LocalRuntime
    from rlhf_core.runtime.ray_runtime import RayRuntime

    longest = options.prompt + options.turns * (options.answer + 32)
    make_policy(policy, options.hidden, options.layers, positions=longest)
    config = RuntimeConfig(
        cpu_threads=options.threads,
        gpus_per_train_worker=options.gpus / 2,
        gpus_per_engine=options.gpus / 2,
        trainer=TrainerConfig(engine="torch"),
        sampler=VllmSamplerConfig(max_model_len=longest, kv_cache_gib=0.5, gpu_memory_fraction=0.25),
    )
    local = stack.enter_context(contextlib.closing(LocalRuntime(config.model_copy(update={"type": "local"}))))
    ray = stack.enter_context(contextlib.closing(RayRuntime(config)))
    here = stack.enter_context(local.sampler(policy))
    there = stack.enter_context(ray.sampler(policy))
    now = time.perf_counter if options.clock == "wall" else computed_s
    seconds = timed_sides(sides(policy, here, there, options, stack), now)
    report(seconds, options.samples)
    sync_share(ray, there, policy, options, now)
    print(f"engines: {ray.engines()}")


def sides(
    policy: Path, here: Any, there: Any, options: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Callable[[], object]]:
    """The calls to measure, by name."""
    from rlhf_core.config.engines import SamplingConfig

    sampling = SamplingConfig(max_tokens=options.answer)
    single = requests_of(options.samples, options.prompt)
    play = episodes_of(policy, options, stack)
    seen = Recording(here)
    play(seen, "lockstep")
    return {
        PLAIN_SINGLE: plain(here, [single], sampling),
        "single turn, in process": lambda: here.generate(single, sampling),
        "single turn, on Ray": lambda: there.generate(single, sampling),
        PLAIN_TURNS: plain(here, seen.batches, sampling),
        "episodes, lockstep": lambda: play(here, "lockstep"),
        "episodes, continuous": lambda: play(here, "continuous"),
        "episodes, lockstep, on Ray": lambda: play(there, "lockstep"),
        "episodes, continuous, on Ray": lambda: play(there, "continuous"),
    }


class Recording:
    """A sampler that records the requests of each batch."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.batches: list[list[Any]] = []

    def generate(self, requests: Sequence[Any], sampling: Any) -> Any:
        """Forward the requests."""
        self.batches.append(list(requests))
        return self._sampler.generate(requests, sampling)


def requests_of(count: int, prompt: int) -> list[Any]:
    """Requests with random prompts that have no common prefix."""
    from benchmarks.random_policy import VOCABULARY
    from rlhf_core.types import SamplingRequest, ids

    draw = random.Random(17)
    return [
        SamplingRequest(ids([draw.randrange(10, VOCABULARY // 2) for _ in range(prompt)]), seed=index)
        for index in range(count)
    ]


def plain(sampler: Any, batches: Sequence[Sequence[Any]], sampling: Any) -> Callable[[], object]:
    """A function that calls `LLM.generate` for each batch, with all preparation done beforehand."""
    llm = sampler._llm
    prepared = [
        (
            [{"prompt_token_ids": list(one.prompt_ids)} for one in batch],
            [sampler._sampling_params(one, sampling) for one in batch],
        )
        for batch in batches
    ]
    return lambda: [llm.generate(prompts, params, use_tqdm=False) for prompts, params in prepared]


def episodes_of(policy: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> Callable[[Any, str], object]:
    """A function that plays the same episodes with a sampler and a kind of scheduling."""
    from rlhf_core.agents.episodes import Episode, play_episodes
    from rlhf_core.agents.process import Environments
    from rlhf_core.config.agents import EnvironmentAgent
    from rlhf_core.config.engines import SamplingConfig
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.types import Message, Prompt

    chat = ChatTemplate.load(policy)
    sampling = SamplingConfig(max_tokens=options.answer)
    agent = EnvironmentAgent(
        environment="benchmarks.rollout:Patient",
        arguments={"turns": options.turns, "delay_s": options.delay},
        max_turns=options.turns,
        max_episode_tokens=options.prompt + options.turns * (options.answer + 32),
    )
    environments = stack.enter_context(Environments(agent, tokenizer=str(policy)))
    episodes = []
    for index in range(options.samples):
        prompt = Prompt(str(index), (Message("user", f"{index} and {index + 1}"),), "", "random")
        episodes.append(Episode(prompt, chat.prompt_ids(prompt.messages), seed=index))

    def played(sampler: Any, scheduling: Literal["lockstep", "continuous"]) -> None:
        limits = agent.model_copy(update={"scheduling": scheduling})
        for one in play_episodes(sampler, chat, episodes, environments, limits, sampling):
            if one.completion.failure:
                raise RuntimeError(one.completion.failure)

    return played  # type: ignore[return-value]  # the names are the two kinds of scheduling


def computed_s() -> float:
    """CPU seconds used so far by this process and its descendants."""
    import psutil

    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def timed_sides(work: dict[str, Callable[[], object]], now: Callable[[], float]) -> dict[str, list[float]]:
    """Measure the seconds of each side in each repeat; within a repeat, the sides take turns."""
    for call in work.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(REPEATS):
        for name, call in work.items():
            clock = now()
            call()
            seconds[name].append(now() - clock)
    return seconds


def report(seconds: dict[str, list[float]], samples: int) -> None:
    """Print samples per second and the fraction of plain's speed, for each repeat."""
    for name, each in seconds.items():
        base = seconds[PLAIN_SINGLE if name.startswith("single") else PLAIN_TURNS]
        shares = [other / own for other, own in zip(base, each, strict=True)]
        told = ", ".join(f"{share:.0%}" for share in shares)
        rate = samples / statistics.median(each)
        print(f"{name:30s} {rate:8.1f} samples/s   {statistics.median(shares):5.0%} of plain ({told})", flush=True)


def sync_share(runtime: Any, sampler: Any, policy: Path, options: argparse.Namespace, now: Callable[[], float]) -> None:
    """Print the seconds of a weight update, and its fraction of a step: sample, measure, train, send."""
    from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.sequences import Sequences
    from rlhf_core.training.objectives.base import SftObjective
    from rlhf_core.types import TokenSample

    requests = requests_of(options.samples, options.prompt)
    sampling = SamplingConfig(max_tokens=options.answer)
    steps, syncs = [], []
    with runtime.trainer("policy", ModelSpec(str(policy), "lm", None, 0), OptimizerConfig()) as trainer:
        for number in range(REPEATS + 1):
            clock = now()
            completions = sampler.generate(requests, sampling)
            rows = [
                TokenSample(one.prompt_ids + answer.token_ids, (0,) * options.prompt + (1,) * len(answer.token_ids))
                for one, answer in zip(requests, completions, strict=True)
            ]
            trainer.logprobs(Sequences.of(rows), temperature=1.0)
            trainer.forward_backward(rows, SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=1e-5)
            trained = now()
            sampler.load_weights(trainer.weights(), version=number + 1)
            steps.append(now() - clock)
            syncs.append(now() - trained)
    shares = ", ".join(f"{sync / step:.1%}" for sync, step in zip(syncs[1:], steps[1:], strict=True))
    print(
        f"weights sent in {statistics.median(syncs[1:]):.3f} s, of a step of {statistics.median(steps[1:]):.3f} s: {shares}"
    )


if __name__ == "__main__":
    main()
