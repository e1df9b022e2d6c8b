"""Draw the curve of over-optimization: proxy and gold reward against sqrt(KL), for best-of-n and policy optimization.

    python -m benchmarks.over_optimization --pairs 40 160 1200
    python -m benchmarks.over_optimization --seeds 5 --hidden 16 64 192 --members 3
    python -m benchmarks.over_optimization --print --plot over_optimization.png

As in Gao, Schulman, Hilton (arXiv 2210.10760), the policy is optimized against weaker and weaker reward models -
trained on fewer pairs, or smaller - and judged by a gold reward that is never trained on. `--members 3` adds ensembles
of three reward models (arXiv 2310.02743): their mean, and their mean minus their standard deviation. A seed applies to
reward models, sampling and policy optimization; data and SFT policy are the same for all. The KL of best-of-n is the
bound log n - (n - 1) / n; for policy optimization it is measured on the answers that the next step trains on. Rewards
are relative to the SFT policy's, the proxy in units of its standard deviation over SFT's answers. The last table shows
the step at which the monitor `over_optimization` would have stopped, and the gold reward of that run at this step, at
its best and at its end.

Every curve is appended to `<state>/over_optimization.jsonl`, and `--print` prints the tables from that file.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks.seeds import add_first, keep, latest, read, seeds_parser
from benchmarks.small_world import GOLD, SmallWorld, ppo
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import EnsembleReward, RewardModelReward, RewardsConfig
from rlhf_core.evaluation.metrics import best_of_n_kl
from rlhf_core.types import ArtifactRef
from stages.generate import GenerateConfig
from stages.score import ScoreConfig

BEST_OF, POLICY = "best of n", "policy optimization"


@dataclass(frozen=True)
class Judge:
    """The reward to optimize against: a reward model of `hidden` units trained on `pairs`, or an ensemble."""

    pairs: int
    hidden: int = 64
    members: int = 1
    reduce: str = "mean"

    @property
    def label(self) -> str:
        """The name in tables.

        >>> Judge(160).label, Judge(160, members=3, reduce="mean_minus_std").label
        ('160 pairs, hidden 64', '160 pairs, hidden 64, mean_minus_std of 3')
        """
        of = f", {self.reduce} of {self.members}" if self.members > 1 else ""
        return f"{self.pairs} pairs, hidden {self.hidden}{of}"

    def made(self, world: SmallWorld, seed: int) -> tuple[RewardsConfig, dict[str, ArtifactRef]]:
        """Train the reward and its models; members differ in their seeds, and the first has the single model's seed."""
        models = {
            f"reward_model_{member}" if member else "reward_model": world.reward_model(
                self.pairs, hidden=self.hidden, seed=seed + 1000 * member
            )
            for member in range(self.members)
        }
        if self.members == 1:
            return RewardsConfig(terms={"reward_model": RewardModelReward()}), models
        term = EnsembleReward.model_validate({"models": tuple(models), "reduce": self.reduce})
        return RewardsConfig(terms={"ensemble": term}), models


@dataclass(frozen=True)
class Point:
    """A policy on the curve: KL to the SFT policy, and both rewards."""

    label: str
    kl: float
    proxy: float
    gold: float


@dataclass(frozen=True)
class Curve:
    """The points of one judge by one method, and the step at which the monitor fired, -1 if it never did."""

    method: str
    judge: str
    seed: int
    points: Sequence[Point]
    stopped_at: int = -1


def main() -> int:
    options = parser().parse_args()
    logging.disable(logging.WARNING)
    options.state.mkdir(parents=True, exist_ok=True)
    file = options.state / "over_optimization.jsonl"
    for seed in [] if options.print_only else range(options.first, options.first + options.seeds):
        for judge in judges(options):
            for curve in measured(judge, seed, options):
                keep(curve, file)
                print(curve.seed, table(curve), sep=": ", end="\n\n", flush=True)
    curves = latest(map(parsed, read(file, Curve)), of=by_size)
    print(summary(curves), stops(curves), sep="\n")
    if options.plot:
        plot(curves, options.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    made = seeds_parser(__doc__)
    add_first(made)
    made.set_defaults(seeds=1, state=Path(".rlhf/monitors"))
    made.add_argument("--pairs", type=int, nargs="+", default=[160], help="sizes of the reward models' data")
    made.add_argument("--hidden", type=int, nargs="+", default=[64], help="hidden sizes of the reward models")
    made.add_argument("--members", type=int, default=1, help="reward models of an ensemble of the first size")
    made.add_argument("--steps", type=int, default=120, help="of policy optimization")
    made.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    made.add_argument("--prompts", type=int, default=64, help="held-out prompts")
    made.add_argument("--best-of", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    made.add_argument("--learning-rate", type=float, default=3e-4)
    made.add_argument("--plot", type=Path, help="a PNG file of gold reward against sqrt(KL)")
    return made


def judges(options: argparse.Namespace) -> list[Judge]:
    """The judges selected by the options."""
    found = [Judge(pairs, hidden) for pairs in options.pairs for hidden in options.hidden]
    if options.members > 1:
        middle = 64 if 64 in options.hidden else options.hidden[0]
        found += [Judge(options.pairs[0], middle, options.members, how) for how in ("mean", "mean_minus_std")]
    return found


def measured(judge: Judge, seed: int, options: argparse.Namespace) -> list[Curve]:
    """Measure the curves of both methods."""
    world = SmallWorld.at(options.state)
    rewards, models = judge.made(world, seed)
    points = best_of_n(world, rewards, models, options, seed)
    return [Curve(BEST_OF, judge.label, seed, points), optimized(world, judge, rewards, models, options, seed)]


def best_of_n(
    world: SmallWorld, rewards: RewardsConfig, models: dict[str, ArtifactRef], options: argparse.Namespace, seed: int
) -> list[Point]:
    """Points of best-of-n by the rewards, with the unbiased estimate from max(n) answers to each prompt."""
    most = max(options.best_of)
    config = GenerateConfig(
        samples_per_prompt=most, max_prompts=options.prompts, sampling=SamplingConfig(max_tokens=48)
    )
    given = {"policy": world.inputs["policy"], "prompts": world.inputs["prompts"]}
    answers = world.run("generate", config, given, seed=seed)
    proxy, gold = (_scores(world, answers, judged, models) for judged in (rewards, GOLD))
    groups = [slice(start, start + most) for start in range(0, len(proxy), most)]
    spread, center = pstdev(proxy), fmean(proxy)
    points = []
    for n in options.best_of:
        means = [expected_best(proxy[group], gold[group], n) for group in groups]
        best, true = (fmean(values) for values in zip(*means, strict=True))
        points.append(Point(f"n = {n}", best_of_n_kl(n), (best - center) / spread, true - fmean(gold)))
    return points


def expected_best(proxy: Sequence[float], gold: Sequence[float], n: int) -> tuple[float, float]:
    """Expected proxy and gold reward of the best of n by the proxy, over all subsets of n of these answers.

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


def optimized(
    world: SmallWorld,
    judge: Judge,
    rewards: RewardsConfig,
    models: dict[str, ArtifactRef],
    options: argparse.Namespace,
    seed: int,
) -> Curve:
    """Optimize without a KL penalty, which would hide the fall; returns the points and the monitor's step.

    The reference is measured anyway: the coefficient is 1e-6.
    """
    config = ppo(
        steps=options.steps,
        kl={"coef": 1e-6},
        rewards=rewards,
        optimizer=OptimizerConfig(learning_rate=options.learning_rate, schedule="constant"),
        evaluate=HeldOutConfig(every=options.every, prompts=options.prompts, independent=GOLD, export="last"),
        monitors=[{"type": "over_optimization"}],
    )
    ref = world.run("ppo", config, world.inputs | {"reward_models": models}, seed=seed)
    curves = world.curves(ref)
    proxy, gold, kl = (curves[name] for name in ("eval/reward/mean", "eval/independent/mean", "kl/per_sequence"))
    spread = curves["eval/reward/stderr"][0] * math.sqrt(options.prompts)
    points = [
        Point(
            f"step {step}",
            max(0.0, kl[step + 1] if step + 1 in kl else kl[step]),  # a step measures its initial policy
            (value - proxy[0]) / spread,
            gold[step] - gold[0],
        )
        for step, value in sorted(proxy.items())
    ]
    alarms = world.report(ref)["events"]
    return Curve(POLICY, judge.label, seed, points, int(alarms[0]["step"]) if alarms else -1)


def _scores(
    world: SmallWorld, answers: ArtifactRef, rewards: RewardsConfig, models: Mapping[str, ArtifactRef]
) -> list[float]:
    from rlhf_core.data.shards import read_rollouts

    ref = world.run("score", ScoreConfig(rewards=rewards), {"generations": answers, "reward_models": dict(models)})
    return [row.reward for row in read_rollouts(world.store.path(ref))]


# ---------------------------------------------------------------- tables and the plot


def parsed(curve: Curve) -> Curve:
    """A curve from the file, with its points converted from tables."""
    points: Sequence[Any] = curve.points
    return Curve(curve.method, curve.judge, curve.seed, [Point(**point) for point in points], curve.stopped_at)


def by_size(curve: Curve) -> tuple[tuple[int, ...], str, str, int]:
    """Sort key of curves: the numbers in the name of their judge, such as pairs and units, then method and seed."""
    numbers = tuple(map(int, re.findall(r"\d+", curve.judge)))
    return numbers, curve.judge, curve.method, curve.seed


def table(curve: Curve) -> str:
    """The table of one curve.

    >>> print(table(Curve("best of n", "60 pairs, hidden 64", 17, [Point("n = 4", 0.64, 1.0, 0.5)])))
    best of n, 60 pairs, hidden 64
    <BLANKLINE>
    | policy | sqrt(KL) | proxy | gold |
    |---|--:|--:|--:|
    | n = 4 | 0.80 | +1.00 | +0.50 |
    """
    head = f"{curve.method}, {curve.judge}\n\n| policy | sqrt(KL) | proxy | gold |\n|---|--:|--:|--:|"
    rows = [f"| {one.label} | {math.sqrt(one.kl):.2f} | {one.proxy:+.2f} | {one.gold:+.2f} |" for one in curve.points]
    return "\n".join([head, *rows])


def summary(curves: Sequence[Curve]) -> str:
    """A row for each judge and method: gold at its best and at its end, the mean over the seeds and each seed.

    >>> points = [Point("n = 1", 0, 0, 0), Point("n = 4", 0.64, 1, 0.5), Point("n = 8", 1.21, 2, 0.25)]
    >>> print(summary([Curve("best of n", "60 pairs", seed, points) for seed in (1, 2)]).splitlines()[-1])
    | 60 pairs | best of n | +0.50 (+0.50/+0.50) | +0.25 (+0.25/+0.25) | +0.25 | +2.00 | 1.10 |
    """
    lines = [
        "| judge | method | gold at its best | gold at the end | gold at KL 1.2 | proxy at the end | sqrt(KL) at the end |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for judge, method in dict.fromkeys((one.judge, one.method) for one in curves):
        seeds = [one.points for one in curves if (one.judge, one.method) == (judge, method)]
        best = [max(point.gold for point in points) for points in seeds]
        end = [points[-1].gold for points in seeds]
        gold = " | ".join(f"{fmean(of):+.2f} ({'/'.join(f'{value:+.2f}' for value in of)})" for of in (best, end))
        proxy, kl = fmean(points[-1].proxy for points in seeds), fmean(math.sqrt(points[-1].kl) for points in seeds)
        near = fmean(gold_at(points, best_of_n_kl(8)) for points in seeds)
        lines.append(f"| {judge} | {method} | {gold} | {near:+.2f} | {proxy:+.2f} | {kl:.2f} |")
    return "\n".join(lines)


def gold_at(points: Sequence[Point], kl: float) -> float:
    """The gold reward where a curve first reaches this KL divergence, linearly interpolated; nan if it never does.

    >>> gold_at([Point("a", 0.0, 0, 0.0), Point("b", 2.0, 0, 1.0), Point("c", 1.0, 0, 5.0)], 1.0)
    0.5
    """
    for before, after in pairwise(points):
        if after.kl >= kl > before.kl:
            return before.gold + (kl - before.kl) / (after.kl - before.kl) * (after.gold - before.gold)
    return math.nan


def stops(curves: Sequence[Curve]) -> str:
    """The table of the steps at which the monitor would have stopped.

    >>> points = [Point("step 0", 0, 0, 0), Point("step 5", 1, 1, 2), Point("step 10", 2, 2, 1.5), Point("step 15", 3, 3, -1)]
    >>> print(stops([Curve("policy optimization", "60 pairs", 17, points, 10)]).splitlines()[-1])
    | 60 pairs | 17 | step 5 | +2.00 | step 10 | +1.50 | +2.00 | -1.00 |
    """
    lines = [
        "\n| judge | seed | best gold at | gold | monitor at | gold there | gold of the best checkpoint before | gold at the end |",
        "|---|--:|---|--:|---|--:|--:|--:|",
    ]
    for curve in (one for one in curves if one.method == POLICY):
        best = max(curve.points, key=lambda point: point.gold)
        at = next((one for one in curve.points if one.label == f"step {curve.stopped_at}"), None)
        there = f"{at.label} | {at.gold:+.2f}" if at else "never | "
        before = curve.points[: curve.points.index(at)] if at else curve.points
        kept = max(before, key=lambda point: point.gold, default=best)
        figures = f"{best.label} | {best.gold:+.2f} | {there} | {kept.gold:+.2f} | {curve.points[-1].gold:+.2f}"
        lines.append(f"| {curve.judge} | {curve.seed} | {figures} |")
    return "\n".join(lines)


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Draw gold reward against sqrt(KL), a panel for each judge: thin lines are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one.judge for one in curves))
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(2.6 * len(names), 2.8), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, judge in zip(axes[0], names, strict=True):
        for method, color in ((BEST_OF, "#0072B2"), (POLICY, "#D55E00")):
            for index, one in enumerate(curve for curve in curves if (curve.judge, curve.method) == (judge, method)):
                xs, ys = zip(*((math.sqrt(point.kl), point.gold) for point in one.points), strict=True)
                panel.plot(xs, ys, color=color, linewidth=1, alpha=0.8, label=method if index == 0 else None)
        panel.axhline(0, color="#999999", linewidth=0.6)
        panel.set_title(judge.replace(", ", "\n", 1), fontsize=8)
        panel.set_xlabel("sqrt(KL to SFT)", fontsize=8)
    axes[0][0].set_ylabel("gold reward over SFT's", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
