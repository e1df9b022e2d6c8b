"""Measure the seconds of an AdamW step in host memory, as under `offload_optimizer`: torch's, plain and fused, and DeepSpeed's.

    python -m benchmarks.cpu_adam --parameters 50000000

DeepSpeed compiles its own at the first run, for minutes. OMP_NUM_THREADS holds for all.
"""

import argparse
import statistics
import sys
import time
from typing import Any

REPEATS = 5


def main() -> int:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    count = parser.parse_args().parameters
    torch.manual_seed(17)
    weights, gradient = torch.randn(count), torch.randn(count) / 1000
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    kinds: dict[str, Any] = {
        "torch, plain": lambda own: torch.optim.AdamW(own, fused=False, **settings),
        "torch, fused": lambda own: torch.optim.AdamW(own, fused=True, **settings),
        "DeepSpeedCPUAdam": lambda own: DeepSpeedCPUAdam(own, adamw_mode=True, **settings),
    }
    made, seconds = {}, {name: [] for name in kinds}  # type: ignore[var-annotated]  # lists of seconds
    for name, kind in kinds.items():
        own = torch.nn.Parameter(weights.clone())
        own.grad = gradient.clone()
        made[name] = own, kind([own])
        made[name][1].step()  # makes its states
    for _ in range(REPEATS):
        for name, (_, optimizer) in made.items():
            clock = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - clock)
    print("| AdamW | seconds | largest difference from plain |\n|---|--:|--:|")
    for name, (own, _) in made.items():
        apart = float((own - made["torch, plain"][0]).detach().abs().max())
        print(f"| {name} | {statistics.median(seconds[name]):.3f} | {apart:.1e} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
