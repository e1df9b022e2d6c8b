"""Measure the cost of a reward function's own process, per 1,000 rewards: in this process, isolated, and cached.

    python -m benchmarks.reward_isolation            # --count 1000 --tokens 200

The function is cheap (`exact_match`), so that the overhead is measured: pickling, pipes and, for the cache, the digest
of each answer. The variants take turns, three times; the figures are wall seconds, since two processes share the work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from rlhf_core.config.rewards import FunctionReward
from rlhf_core.rewards.batches import BatchedReward, RewardOutcome
from rlhf_core.rewards.protocols import adapt
from rlhf_core.rewards.terms import open_elsewhere
from rlhf_core.types import Completion, Generation, Message, Prompt, floats, ids
from rlhf_core.user_code.modules import load_callable

FUNCTION = "rlhf_core.rewards.verifiable:exact_match"
REPEATS = 3

Ask = Callable[[Sequence[Generation]], RewardOutcome]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    generations = made_up(options.count, tokens=options.tokens)
    print(f"{os.cpu_count()} cores; {options.count} answers of {options.tokens} tokens; seconds per 1,000 rewards")
    with ExitStack() as leases:
        folder = Path(leases.enter_context(tempfile.TemporaryDirectory()))
        started = time.perf_counter()
        kinds = open_kinds(folder, leases)
        print(f"start of 5 processes {time.perf_counter() - started:.2f} s")
        for ask in kinds.values():  # what is loaded once, and what the cache is to know
            ask(generations)
        expected = kinds["in this process"](generations).values
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(REPEATS):
            for kind, ask in kinds.items():
                began = time.perf_counter()
                outcome = ask(generations)
                seconds[kind].append((time.perf_counter() - began) * 1000 / options.count)
                if outcome.values != expected:
                    raise SystemExit(f"{kind}: scored differently")
    for kind, took in seconds.items():
        each = "  ".join(f"{one:.4f}" for one in took)
        print(f"| {kind} | {median(took):.4f} | {each} |")


def open_kinds(folder: Path, leases: ExitStack) -> dict[str, Ask]:
    """Return kind -> the same reward."""
    here = adapt(load_callable("function", FUNCTION), protocol="auto", arguments={})
    runner = leases.enter_context(asyncio.Runner())

    def isolated(**settings: object) -> BatchedReward:
        spec = FunctionReward.model_validate({"function": FUNCTION} | settings)
        return open_elsewhere("exact", spec, folder, leases)

    return {
        "in this process": lambda generations: here.outcomes([generations], runner)[0],
        "isolated": isolated(),
        "isolated, batches of 64": isolated(batch_size=64),
        "isolated, batches of 64, 2 workers": isolated(batch_size=64, workers=2),
        "from the cache": isolated(cache=True),
    }


def made_up(count: int, *, tokens: int) -> list[Generation]:
    """Return answers of so many tokens, about four letters each, half of them right."""
    dice = random.Random(17)
    rows = []
    for number in range(count):
        text = " ".join(f"{dice.randrange(999):03d}" for _ in range(tokens))
        prompt = Prompt(f"p{number}", (Message("user", f"question {number}"),), text if number % 2 else "no", "made up")
        said = ids([dice.randrange(50_000) for _ in range(tokens)])
        logprobs = floats([-dice.random() for _ in range(tokens)])
        rows.append(Generation(prompt, said[:50], Completion(said, logprobs, text, "stop", 0, number)))
    return rows


if __name__ == "__main__":
    main()
