"""Measure tokens per second of a profile's sampler and trainer, and seconds of a weight sync, in one run, three times.

    python -m benchmarks.throughput tiny/full
    python -m benchmarks.throughput one_gpu/full --hidden 2048 --layers 16 --samples 64 --prompt 256 --answer 512

The model is a Llama with random weights, so nothing is downloaded and every answer has its full length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pipelines.flows.profile import load_profile
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.models import InitModel
from rlhf_core.interfaces import ModelSpec, Runtime
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.runtime.local_runtime import open_runtime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import SamplingRequest, TokenSample, ids, mask

REPEATS = 3
VOCABULARY = 512
HEAD_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="tiny/full")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="key=value")
    for name, value in (("hidden", 192), ("layers", 4), ("samples", 64), ("prompt", 32), ("answer", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    config = load_profile(options.profile, options.overrides)
    with tempfile.TemporaryDirectory() as folder:
        make_policy(Path(folder), options.hidden, options.layers, positions=options.prompt + options.answer)
        runtime = open_runtime(config.runtime)
        try:
            measure(runtime, Path(folder), options.samples, options.prompt, options.answer)
            print(f"engines: {runtime.engines()}")
        finally:
            runtime.close()


def make_policy(folder: Path, hidden: int, layers: int, *, positions: int, vocabulary: int = VOCABULARY) -> None:
    """Write a Llama whose answers do not end by themselves but by their limit; its tokenizer has `VOCABULARY` tokens."""
    heads = hidden // HEAD_SIZE
    shape = InitModel(
        vocab_size=vocabulary, hidden_size=hidden, layers=layers, heads=heads, kv_heads=heads,
        intermediate_size=hidden * 8 // 3, max_positions=positions,
    )  # fmt: skip
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=VOCABULARY, folder=folder)
    initialize_llama(shape, folder, seed=17)


def measure(runtime: Runtime, policy: Path, samples: int, prompt: int, answer: int) -> None:
    """Print one line per repeat, after one that warms up, and their medians."""
    draw = random.Random(17)
    requests = [
        SamplingRequest(ids([draw.randrange(10, VOCABULARY // 2) for _ in range(prompt)]), seed=index)
        for index in range(samples)
    ]
    rows = [
        TokenSample(request.prompt_ids + (request.prompt_ids[0],) * answer, mask([0] * prompt + [1] * answer))
        for request in requests
    ]
    sampling = SamplingConfig(temperature=1.0, max_tokens=answer)
    spec = ModelSpec(str(policy), "lm", None, 0)
    measured: list[tuple[float, float, float]] = []
    with runtime.trainer("policy", spec, OptimizerConfig()) as trainer, runtime.sampler(policy) as sampler:

        def train() -> None:
            trainer.forward_backward(rows, SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=1e-5)

        for repeat in range(REPEATS + 1):
            sampled, completions = timed(lambda: sampler.generate(requests, sampling))
            trained, _ = timed(train)
            synced, _ = timed(lambda version=repeat: sampler.load_weights(trainer.weights(), version=version + 1))  # type: ignore[misc]
            if repeat:
                tokens = sum(len(completion.token_ids) for completion in completions)
                measured.append((tokens / sampled, samples * (prompt + answer) / trained, synced))
                print(show(f"repeat {repeat}", measured[-1]), flush=True)
    print(show("median", tuple(statistics.median(column) for column in zip(*measured, strict=True))))


def timed(work: Callable[[], object]) -> tuple[float, list]:  # type: ignore[type-arg]  # whatever `work` returns
    """Return the seconds that `work` took, and its result."""
    clock = time.perf_counter()
    result = work()
    return time.perf_counter() - clock, result if isinstance(result, list) else []


def show(name: str, figures: tuple[float, ...]) -> str:
    """Return one line of the output."""
    sampled, trained, synced = figures
    return f"{name:9s} sampler {sampled:10.0f} tokens/s   trainer {trained:10.0f} tokens/s   sync {synced:7.3f} s"


if __name__ == "__main__":
    main()
