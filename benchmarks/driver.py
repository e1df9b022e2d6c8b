"""CPU time and memory of a PPO step in the driver, per sampled token, part by part.

The step is walked as `stages/ppo.py` walks it, with made-up answers: completions as they come out of a Ray worker,
the log of rollouts, the rows to measure and the measured ones, advantages (gae, KL in the reward), the rows of policy
and value model, and their pickles for the ranks.

    python -m benchmarks.driver --answers 1024 --tokens 4096
    python -m benchmarks.driver --before v0.1.0     # the same on a revision, in the same run
"""

import argparse
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = 256
RANKS = 4
VOCABULARY = 150_000


class Clock:
    """CPU seconds of this process and bytes that it holds, since the last part."""

    def __init__(self, tokens: int) -> None:
        import psutil

        self._tokens = tokens
        self._process = psutil.Process()
        self.parts: dict[str, tuple[float, float]] = {}
        gc.collect()
        self._first = self._process.memory_info().rss
        self._last = time.process_time()

    def start(self) -> None:
        """Leave out what was done since the last part."""
        gc.collect()
        self._last = time.process_time()

    def ended(self, part: str) -> None:
        """Note a part: microseconds a token for it, and bytes a token held after it."""
        spent = time.process_time() - self._last
        held = self._process.memory_info().rss - self._first
        self.parts[part] = (spent / self._tokens * 1e6, held / self._tokens)
        self._last = time.process_time()


def walk(answers: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Return microseconds and bytes a token of each part of a step with `answers` answers of `tokens` tokens."""
    import numpy as np
    import torch

    from rlhf_core.algorithms.advantage.token import GAEAdvantage
    from rlhf_core.data.shards import RolloutLog
    from rlhf_core.models.micro_batches import row_length
    from rlhf_core.training.batching import shares, step_counts
    from rlhf_core.training.experience import (
        Experience,
        estimate_advantages,
        policy_samples,
        token_sample,
        value_samples,
    )
    from rlhf_core.training.objectives.base import ValueObjective
    from rlhf_core.types import Completion, Message, Prompt, Rollout

    torch.set_num_threads(1)
    dice = np.random.default_rng(0)

    def numbers(length: int) -> Any:
        return tuple((-dice.random(length, dtype=np.float32)).tolist())

    def made(seed: int) -> Completion:
        token_ids = tuple(dice.integers(0, VOCABULARY, tokens).tolist())
        return Completion(token_ids, numbers(tokens), "x" * (4 * tokens), "stop", 0, seed)  # type: ignore[arg-type]

    # Pickled by the workers, so that this costs the driver nothing.
    sent = [pickle.dumps([made(at) for at in range(start, start + 64)], protocol=5) for start in range(0, answers, 64)]
    asked = [tuple(dice.integers(0, VOCABULARY, PROMPT).tolist()) for _ in range(answers)]
    clock = Clock(answers * tokens)
    clock.start()
    completions = [one for batch in sent for one in pickle.loads(batch)]
    sent.clear()
    rollouts = [
        Rollout(Prompt(str(at // 8), (Message("user", "q"),), "", ""), asked[at], one, float(at % 3), {"r": 1.0})  # type: ignore[arg-type]
        for at, one in enumerate(completions)
    ]
    clock.ended("receive the answers")
    with tempfile.TemporaryDirectory() as folder:
        RolloutLog(Path(folder)).write(0, rollouts, {}, policy="p")
    clock.ended("write the log of rollouts")
    samples = tuple(token_sample(rollout) for rollout in rollouts)
    clock.ended("rows to measure")
    for _ in range(3):
        pickle.dumps(samples, protocol=5)
    clock.ended("send them to policy, reference and value model")
    held: Any = type(samples[0].token_ids)  # tuple in revisions before columns
    row = numbers if held is tuple else lambda length: held("f", -dice.random(length, dtype=np.float32))
    measured = pickle.dumps([[row(PROMPT + tokens) for _ in range(answers)] for _ in range(3)], protocol=5)
    clock.start()
    old, ref, values = pickle.loads(measured)
    del measured
    clock.ended("receive what they measured")
    experience = Experience(tuple(rollouts), samples, tuple(old), tuple(ref), tuple(values))
    estimator = GAEAdvantage(type="gae")
    advantages = estimate_advantages(experience, estimator=estimator, group_size=1, kl_coef=0.05)
    clock.ended("advantages")
    rows = policy_samples(experience, advantages), value_samples(experience, advantages)
    clock.ended("rows of policy and value model")
    for trained in rows:
        dealt = shares([row_length(one) for one in trained], RANKS)
        step_counts(ValueObjective(clip=None), trained)
        for share in dealt:
            pickle.dumps([trained[at] for at in share], protocol=5)
    clock.ended("count, deal and send them, each once")
    return clock.parts


def walked(root: Path, answers: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Return the figures of the packages in `root`, by a process of their own."""
    command = [sys.executable, "-P", __file__, "--json", "--answers", str(answers), "--tokens", str(tokens)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    parts: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return parts


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of each answer")
    parser.add_argument("--before", metavar="REVISION", default="", help="a git revision to compare with")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.json:
        walk(64, 8)  # imports
        print(json.dumps(walk(given.answers, given.tokens)))
        return 0
    root = Path(__file__).resolve().parents[1]
    sides = {"now": walked(root, given.answers, given.tokens)}
    if given.before:
        from benchmarks.measure import (
            tree_at,
        )  # not above: an older revision, which `--json` runs in, has no such function

        with tree_at(given.before) as tree:
            sides = {given.before: walked(tree, given.answers, given.tokens)} | sides
    print(f"{given.answers} answers of {given.tokens} tokens, prompts of {PROMPT}, {RANKS} ranks; per sampled token")
    print("| part |" + "".join(f" us, {name} | bytes held, {name} |" for name in sides))
    print("|---|" + "--:|--:|" * len(sides))
    for part in sides["now"]:
        print(f"| {part} |" + "".join(f" {side[part][0]:.3f} | {side[part][1]:.0f} |" for side in sides.values()))
    whole = [(sum(us for us, _ in side.values()), max(held for _, held in side.values())) for side in sides.values()]
    print("| in all (most held) |" + "".join(f" {us:.3f} | {held:.0f} |" for us, held in whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
