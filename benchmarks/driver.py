"""CPU time and memory of a PPO step in the driver, per sampled token, part by part.

The step follows `stages/ppo/run.py`, with workers of a real Ray whose models return noise: answers of unequal
lengths, the log of rollouts, the sequences to measure and their log-probs and values, advantages (gae, KL in the reward),
and one update of policy and value model.

    python -m benchmarks.driver --answers 1024 --tokens 4096
    python -m benchmarks.driver --before HEAD~1     # also an earlier revision with flat arrays, in the same run
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

PROMPT = 256
RANKS = 2
VOCABULARY = 150_000
KL = 0.05
IDLE, IDLE_S = "an idle driver, in the same time", 5.0
WORKERS, WALL = "the workers' CPU, with the making of noise", "seconds on the clock"
Figures = dict[str, tuple[float, float]]  # microseconds and bytes a token of each part


def anonymous() -> int:
    """Bytes of this process's anonymous memory, without files and shared memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # release free memory
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Clock:
    """CPU seconds of this process since the last part, or the bytes that it holds, without shared memory."""

    def __init__(self, tokens: int, measured: str) -> None:
        self.tokens = tokens
        self._read = {"seconds": time.process_time, "bytes": anonymous}[measured]
        self.parts: dict[str, float] = {}
        self.began = time.monotonic()
        self._first = self._last = self._read()

    def skip(self) -> None:
        """Exclude the work since the last part."""
        self._last = self._read()

    def ended(self, part: str) -> None:
        """Record the end of a part: its seconds per token, or the bytes per token held after it."""
        now = self._read()
        seconds = self._read is time.process_time
        self.parts[part] = (now - (self._last if seconds else self._first)) / self.tokens
        self._last = now


def count_numbers(samples: Any) -> float:
    """Read every array, and count the numbers per token."""
    return float(sum(map(len, (samples.token_ids, samples.loss_mask, *samples.fields.values()))))


class Noise:
    """A worker whose models return noise, because only the driver is measured."""

    def generate(self, requests: Any, sampling: Any) -> Any:
        import numpy as np

        from rlhf_core.runtime.packed_completions import pack_completions
        from rlhf_core.types import Column, Completion, SamplingRequest

        made = []
        for one in (SamplingRequest(*each) if isinstance(each, tuple) else each for each in requests):
            dice, tokens = np.random.default_rng(one.seed), sampling.max_tokens
            length = int(dice.integers(tokens // 2, tokens + 1))
            ids = Column("i", dice.integers(0, VOCABULARY, length, dtype=np.int32))
            logprobs: Column[float] = Column("f", -dice.random(length, dtype=np.float32))
            made.append(Completion(ids, logprobs, "x", "stop", 0, one.seed))
        return pack_completions(made)

    def logprobs(self, lease: str, samples: Any, **keywords: Any) -> Any:
        import numpy as np

        from rlhf_core.runtime.train_worker import open_here

        dice = np.random.default_rng(len(samples))
        return -dice.random(len(open_here(samples).copy().token_ids), dtype=np.float32)

    def values(self, lease: str, samples: Any) -> Any:
        return self.logprobs(lease, samples)

    def compute(self, lease: str, function: Any, *arguments: Any) -> Any:
        from rlhf_core.runtime.train_worker import open_here

        return function(*map(open_here, arguments))

    def forward_backward(self, lease: str, samples: Any, objective: Any, denominators: Any) -> dict[str, float]:
        from rlhf_core.runtime.train_worker import open_here

        return {"read": count_numbers(open_here(samples).copy())}

    def cpu(self) -> float:
        return time.process_time()

    def pid(self) -> int:
        """Import the modules that the other methods need."""
        import torch

        import rlhf_core.training.experience  # noqa: F401

        torch.set_num_threads(1)
        return os.getpid()


def walk(answers: int, tokens: int) -> Figures:
    """Measure microseconds and bytes per token of each part of a step with `answers` answers of at most `tokens`."""
    import ray
    import torch

    from rlhf_core.errors import SamplingError, TrainingError
    from rlhf_core.runtime.connection import connect
    from rlhf_core.runtime.handles import RaySampler, RayTrainer
    from rlhf_core.runtime.worker_group import WorkerGroup

    torch.set_num_threads(1)
    connect(RANKS)
    groups: list[WorkerGroup] = []
    for kind, error in (("sampler", SamplingError), ("trainer", TrainingError)):
        actors = [ray.remote(Noise).options(num_cpus=0).remote() for _ in range(RANKS)]
        groups.append(WorkerGroup(kind, actors, error, timeout_s=600.0, log_folder="", ray_lost=str))
        groups[-1].call("any", "pid")
    sampler = RaySampler(groups[0], transfer="", tensor_parallel=1)
    trainer = RayTrainer(groups[1], "policy", "lease", transfer="")

    def walked(*size: Any) -> Clock:
        with tempfile.TemporaryDirectory() as folder:  # removing it takes 2 ns a token
            return step(Path(folder), sampler, trainer, *size)

    for size in ((16, 64), (64, 8192)):  # the first step of a kind includes imports
        walked(*size, "seconds")
    held = walked(answers, tokens, "bytes").parts

    def workers() -> float:
        return float(sum(seconds for group in groups for seconds in group.call("any", "cpu")))

    before = workers()
    clock = walked(answers, tokens, "seconds")  # a separate step, since reading the memory slows down the next part
    took = time.monotonic() - clock.began
    clock.parts[WORKERS] = (workers() - before) / clock.tokens
    clock.parts[WALL] = took / clock.tokens
    clock.skip()
    time.sleep(IDLE_S)
    clock.ended(IDLE)
    ray.shutdown()
    clock.parts[IDLE] *= took / IDLE_S
    return {part: (1e6 * seconds, held.get(part, 0.0)) for part, seconds in clock.parts.items()}


def step(folder: Path, sampler: Any, trainer: Any, answers: int, tokens: int, measured: str) -> Clock:
    """Run a step like `stages/ppo/run.py`, with its log in `folder`; returns the clock with the figures."""
    import numpy as np

    from rlhf_core.config.engines import SamplingConfig
    from rlhf_core.data.shards import RolloutLog
    from rlhf_core.types import Column, Message, Prompt, Rollout, SamplingRequest

    dice = np.random.default_rng(0)
    asked = [Column("i", dice.integers(0, VOCABULARY, PROMPT, dtype=np.int32)) for _ in range(answers // 8)]
    prompts = [Prompt(str(at), (Message("user", "q"),), "", "") for at in range(len(asked))]  # of all its answers
    requests: Any = [SamplingRequest(asked[at // 8], at) for at in range(answers)]
    lengths = sum(int(np.random.default_rng(at).integers(tokens // 2, tokens + 1)) for at in range(answers))
    clock = Clock(lengths, measured)
    completions = sampler.generate(requests, SamplingConfig(max_tokens=tokens))
    rollouts: Any = [
        Rollout(prompts[at // 8], requests[at].prompt_ids, one, float(at % 3), {}) for at, one in enumerate(completions)
    ]
    del completions
    clock.ended("receive the answers")
    log = RolloutLog(folder)
    log.write(0, rollouts, {}, policy="p")
    log.wait()  # it is written in a thread of the driver while models measure
    clock.ended("write the log of rollouts")
    read = update(rollouts, trainer, clock)
    whole = sum(len(one.prompt_ids) + len(one.completion.token_ids) for one in rollouts)
    assert read == [6.0 * whole, 4.0 * whole]
    return clock


MEASURE = "measure them with policy, reference and value model"
ESTIMATE = "advantages, and the rows of policy and value model"
SEND = "count, deal and send them, each once"


def ppo_config() -> Any:
    from rlhf_core.config.policy import PPOConfig

    return PPOConfig(samples_per_prompt=1, advantage={"type": "gae"}, kl={"in": "reward", "coef": KL})


def update(rollouts: Any, trainer: Any, clock: Clock) -> list[float]:
    """Measure and train on a step of flat arrays; returns how many numbers per token each worker has read."""
    from dataclasses import replace

    import numpy as np

    from rlhf_core.sequences import Subset
    from rlhf_core.training.experience import Experience, estimate_step

    sampled = Experience.of(rollouts)
    sampled = replace(sampled, sequences=trainer.keep(sampled.sequences))
    clock.ended("rows to measure")
    rows = np.arange(len(rollouts))
    tokens = Subset(sampled.sequences.select_fields(), rows)
    old, ref = (trainer.logprobs(tokens, temperature=1.0) for _ in range(2))
    outputs = {"old_logprobs": old, "ref_logprobs": ref, "old_values": trainer.values(tokens)}
    sequences = sampled.sequences.with_fields(**outputs)
    clock.ended(MEASURE)
    settings: Any = {"answers": sampled.answers, "teachers": (), "config": ppo_config(), "function": None}
    settings |= {"turn_weights": [0.0] * len(rows), "greedy": (), "kl_coef": KL, "seed": 0}
    estimate = trainer.compute(partial(estimate_step, **settings), sequences)
    batch = sequences.with_fields(advantages=estimate.advantages, returns=estimate.returns)
    clock.ended(ESTIMATE)
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"), ("old_values", "returns")
    parts = [Subset(batch.select_fields(*each), estimate.rows) for each in names]
    read = [trainer.forward_backward(part, one)["read"] for part, one in zip(parts, objectives(), strict=True)]
    clock.ended(SEND)
    return read


def objectives() -> Any:
    """The objectives of policy and value model."""
    from rlhf_core.training.objectives.base import PolicyObjective, ValueObjective

    return policy_objective(PolicyObjective), ValueObjective(clip=None)


def policy_objective(kind: Any) -> Any:
    """The objective of PPO."""
    from rlhf_core.algorithms.policy.clip import ClipLoss
    from rlhf_core.algorithms.token_math import CorrectionConfig

    return kind(
        loss=ClipLoss(),
        max_length=2**20,
        temperature=1.0,
        kl_coef=0.0,
        entropy_coef=0.0,
        correction=CorrectionConfig(),
        kl_estimator="k2",
        function=None,
    )


def walked(root: Path, answers: int, tokens: int) -> Figures:
    """Measure the packages in `root` in a separate process."""
    command = [sys.executable, "-P", __file__, "--json", "--answers", str(answers), "--tokens", str(tokens)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True, text=True)
    parts: Figures = json.loads(done.stdout.splitlines()[-1])
    return parts


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of each answer")
    parser.add_argument("--before", metavar="REVISION", nargs="*", default=(), help="git revisions to compare with")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.json:
        print(json.dumps(walk(given.answers, given.tokens)))
        return 0
    root = Path(__file__).resolve().parents[1]
    sides = {}
    for revision in given.before:
        from benchmarks.sides import (
            tree_at,  # imported here since older revisions, which run with `--json`, lack this function
        )

        with tree_at(revision) as tree:
            sides[revision] = walked(tree, given.answers, given.tokens)
    sides["now"] = walked(root, given.answers, given.tokens)
    print(
        f"{given.answers} answers of {given.tokens // 2} to {given.tokens} tokens, prompts of {PROMPT}, {RANKS} engines and ranks; per sampled token"
    )
    print("| part |" + "".join(f" us, {name} | bytes held, {name} |" for name in sides))
    print("|---|" + "--:|--:|" * len(sides))
    others = {part: {name: side.pop(part) for name, side in sides.items()} for part in (IDLE, WORKERS, WALL)}
    for part in sides["now"]:
        print(f"| {part} |" + "".join(f" {side[part][0]:.4f} | {side[part][1]:.0f} |" for side in sides.values()))
    whole = [(sum(us for us, _ in side.values()), max(held for _, held in side.values())) for side in sides.values()]
    print("| in all (most held) |" + "".join(f" {us:.4f} | {held:.0f} |" for us, held in whole))
    for part, each in others.items():
        print(f"| {part} |" + "".join(f" {us:.4f} | |" for us, _ in each.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
