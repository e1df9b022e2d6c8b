"""Draw the curve of over-optimization: proxy and gold reward against sqrt(KL), for best-of-n and policy optimization.

    python -m benchmarks.over_optimization
    python -m benchmarks.over_optimization --pairs 100 --steps 20 --prompts 16 --best-of 1 4

As in Gao, Schulman, Hilton (arXiv 2210.10760) the policy is optimized against reward models that know less and less -
here they are trained on fewer pairs - and judged by a gold reward that nothing trains on. The KL of best-of-n is the
bound log n - (n - 1) / n; that of policy optimization is measured on the answers that the next step trains on. Rewards are relative
to those of the SFT policy, the proxy in its own standard deviations over SFT's answers. The last table says at which
step the monitor `over_optimization` would have stopped, and how much gold that run had then, at its best and at its end.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks.small_world import GOLD, SmallWorld, ppo
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.evaluation.metrics import best_of_n_kl
from rlhf_core.types import ArtifactRef
from stages.config.generate import GenerateConfig
from stages.config.score import ScoreConfig


@dataclass(frozen=True)
class Point:
    """A policy on the curve: KL to the SFT policy, and both rewards."""

    label: str
    kl: float
    proxy: float
    gold: float


@dataclass(frozen=True)
class Curve:
    """The points of one reward model by one method, and the step at which the monitor fired, -1 if it did not."""

    method: str
    pairs: int
    points: Sequence[Point]
    stopped_at: int = -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=[40, 160, 1200], help="sizes of the reward models' data"
    )
    parser.add_argument("--steps", type=int, default=120, help="of policy optimization")
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts")
    parser.add_argument("--best-of", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--state", type=Path, default=Path(".rlhf/monitors"), help="folder whose store is used")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    world = SmallWorld.at(options.state)
    curves: list[Curve] = []
    for pairs in options.pairs:
        judge = world.reward_model(pairs)
        curves.append(Curve("best of n", pairs, best_of_n(world, judge, options.best_of, options.prompts)))
        curves.append(optimized(world, judge, pairs, options))
        print(table(curves[-2]), table(curves[-1]), sep="\n\n", flush=True)
    print(stops(curves))
    (options.state / "over_optimization.json").write_text(
        json.dumps([plain(curve) for curve in curves], indent=1), encoding="utf-8"
    )
    return 0


def best_of_n(world: SmallWorld, judge: ArtifactRef, sizes: Sequence[int], prompts: int) -> list[Point]:
    """Return the points of best-of-n by the reward model, by the unbiased estimate from max(n) answers to each prompt."""
    most = max(sizes)
    config = GenerateConfig(samples_per_prompt=most, max_prompts=prompts, sampling=SamplingConfig(max_tokens=48))
    answers = world.run("generate", config, {"policy": world.inputs["policy"], "prompts": world.inputs["prompts"]})
    scored = {
        name: _rewards(world, answers, rewards, {"reward_model": judge})
        for name, rewards in (("proxy", ppo(steps=1).rewards), ("gold", GOLD))
    }
    groups = [slice(start, start + most) for start in range(0, len(scored["proxy"]), most)]
    spread, center = pstdev(scored["proxy"]), fmean(scored["proxy"])
    points = []
    for n in sizes:
        means = [expected_best(scored["proxy"][group], scored["gold"][group], n) for group in groups]
        proxy, gold = (fmean(values) for values in zip(*means, strict=True))
        points.append(Point(f"n = {n}", best_of_n_kl(n), (proxy - center) / spread, gold - fmean(scored["gold"])))
    return points


def expected_best(proxy: Sequence[float], gold: Sequence[float], n: int) -> tuple[float, float]:
    """Return the expected proxy and gold of the best of n by the proxy, over all subsets of n of these answers.

    The answer of rank i (from 1, by the proxy) is the best of C(i - 1, n - 1) of the C(N, n) subsets.

    >>> expected_best([0.0, 1.0, 2.0], [5.0, 1.0, 0.0], 2)
    (1.6666666666666665, 0.3333333333333333)
    """
    order = sorted(range(len(proxy)), key=lambda index: proxy[index])
    total = math.comb(len(proxy), n)
    weights = [math.comb(rank, n - 1) / total for rank in range(len(proxy))]
    return (
        sum(weight * proxy[index] for weight, index in zip(weights, order, strict=True)),
        sum(weight * gold[index] for weight, index in zip(weights, order, strict=True)),
    )


def optimized(world: SmallWorld, judge: ArtifactRef, pairs: int, options: argparse.Namespace) -> Curve:
    """Return the points of policy optimization without a KL penalty, which would hide the fall, and the monitor's step.

    The reference is measured all the same: the coefficient is 1e-6.
    """
    config = ppo(
        steps=options.steps,
        kl={"coef": 1e-6},
        optimizer=OptimizerConfig(learning_rate=options.learning_rate, schedule="constant"),
        evaluate=HeldOutConfig(every=options.every, prompts=options.prompts, independent=GOLD, export="last"),
        monitors=[{"type": "over_optimization"}],
    )
    inputs = world.inputs | {"reward_models": {"reward_model": judge}}
    ref = world.run("ppo", config, inputs)
    curves = world.curves(ref)
    proxy, gold, kl = (curves[name] for name in ("eval/reward/mean", "eval/independent/mean", "kl/per_sequence"))
    spread = curves["eval/reward/stderr"][0] * math.sqrt(options.prompts)
    points = [
        Point(
            f"step {step}",
            max(0.0, kl[step + 1] if step + 1 in kl else kl[step]),  # a step measures the policy that it begins with
            (value - proxy[0]) / spread,
            gold[step] - gold[0],
        )
        for step, value in sorted(proxy.items())
    ]
    alarms = world.report(ref)["events"]
    return Curve("policy optimization", pairs, points, int(alarms[0]["step"]) if alarms else -1)


def _rewards(world: SmallWorld, answers: ArtifactRef, rewards: Any, models: dict[str, ArtifactRef]) -> list[float]:
    from rlhf_core.data.shards import read_rollouts

    ref = world.run("score", ScoreConfig(rewards=rewards), {"generations": answers, "reward_models": models})
    return [row.reward for row in read_rollouts(world.store.path(ref))]


# ---------------------------------------------------------------- tables


def table(curve: Curve) -> str:
    """Return the table of one curve.

    >>> print(table(Curve("best of n", 60, [Point("n = 4", 0.64, 1.0, 0.5)])))
    best of n, reward model of 60 pairs
    <BLANKLINE>
    | policy | sqrt(KL) | proxy | gold |
    |---|--:|--:|--:|
    | n = 4 | 0.80 | +1.00 | +0.50 |
    """
    head = f"{curve.method}, reward model of {curve.pairs} pairs\n\n| policy | sqrt(KL) | proxy | gold |\n|---|--:|--:|--:|"
    rows = [f"| {one.label} | {math.sqrt(one.kl):.2f} | {one.proxy:+.2f} | {one.gold:+.2f} |" for one in curve.points]
    return "\n".join([head, *rows])


def stops(curves: Sequence[Curve]) -> str:
    """Return the table of where the monitor would have stopped.

    >>> points = [Point("step 0", 0, 0, 0), Point("step 5", 1, 1, 2), Point("step 10", 2, 2, 1.5), Point("step 15", 3, 3, -1)]
    >>> print(stops([Curve("policy optimization", 60, points, 10)]).splitlines()[-1])
    | 60 | step 5 | +2.00 | step 10 | +1.50 | +2.00 | -1.00 |
    """
    lines = [
        "\n| pairs | best gold at | gold | monitor at | gold there | gold of the best checkpoint before | gold at the end |",
        "|--:|---|--:|---|--:|--:|--:|",
    ]
    for curve in (one for one in curves if one.stopped_at != -1 or one.method != "best of n"):
        best = max(curve.points, key=lambda point: point.gold)
        at = next((one for one in curve.points if one.label == f"step {curve.stopped_at}"), None)
        there = f"{at.label} | {at.gold:+.2f}" if at else "never | "
        before = curve.points[: curve.points.index(at)] if at else curve.points
        kept = max(before, key=lambda point: point.gold, default=best)
        lines.append(
            f"| {curve.pairs} | {best.label} | {best.gold:+.2f} | {there} | {kept.gold:+.2f} | {curve.points[-1].gold:+.2f} |"
        )
    return "\n".join(lines)


def plain(curve: Curve) -> dict[str, Any]:
    """Return a curve for JSON."""
    points = [vars(point) for point in curve.points]
    return {"method": curve.method, "pairs": curve.pairs, "stopped_at": curve.stopped_at, "points": points}


if __name__ == "__main__":
    sys.exit(main())
