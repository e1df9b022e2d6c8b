"""Measure a training step where threads that wait for each other sleep at once, soon (as in our workers) or late.

    python -m benchmarks.threads --threads 2

A Llama as that of `tiny/full`, 16 rows of 64 tokens, in a process of its own for each choice, in turns. With one thread
nobody waits, so all three must be equal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from rlhf_core.processes.child import idle_threads
from rlhf_core.runtime.cluster import available_cores

ROUNDS = 6
STEPS = 20
CHOICES = {
    "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE"},
    "ours": idle_threads({}),
    "libgomp's default": {},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--child", action="store_true", help="print the seconds of a step in this process")
    options = parser.parse_args()
    if options.child:
        print(seconds_a_step())
        return 0
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    inherited |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    seen: dict[str, list[float]] = {name: [] for name in CHOICES}
    for _ in range(ROUNDS):
        for name, variables in CHOICES.items():
            command = [sys.executable, "-m", "benchmarks.threads", "--child"]
            done = subprocess.run(command, env=inherited | variables, check=True, text=True, stdout=subprocess.PIPE)
            seen[name].append(float(done.stdout.split()[-1]))
    print(f"{options.threads} threads; seconds a step, the median of {ROUNDS} turns (least to most)")
    for name, seconds in seen.items():
        print(f"{name}: {median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})")
    return 0


def seconds_a_step() -> float:
    """Return the mean seconds of a step, after five that warm up."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 512, (16, 64))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begun) / STEPS


if __name__ == "__main__":
    sys.exit(main())
