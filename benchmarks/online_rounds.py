"""Compare the online loop with the same loop whose reward model stays fixed, round by round.

    python -m benchmarks.online_rounds --seeds 3
    python -m benchmarks.online_rounds --seeds 1 --state /tmp/rounds --set online.rounds=2
    python -m benchmarks.online_rounds --print

Each seed is that of the whole profile `tiny/online`: data, SFT, reward model, people and policy optimization. Both loops
start from the same SFT policy and reward model and make the same steps of policy optimization; `refreshed` trains the
reward model of each round on all pairs so far, `fixed` keeps the first one. Gold reward, which no training sees, is
measured on held-out prompts. `before` and `after` are the accuracies of the round's old and new reward model on held-out
pairs of the moved policy.

Every seed is appended to `<state>/online_rounds.jsonl`, and `--print` prints the table from that file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import seeds
from benchmarks.method_rows import Bench, Start, make_start
from benchmarks.seeds import add_first, keep, latest, seeds_parser
from pipelines.flows.evaluation import Compared, evaluation_nodes
from pipelines.flows.full import Made, artifact, run_nodes
from pipelines.flows.graph import Stages
from pipelines.flows.nodes import Node, expand
from pipelines.flows.profile import load_profile
from pipelines.flows.sections import EvaluationConfig, OnlineConfig
from rlhf_core.types import PolicyRef

ARMS = {"refreshed": True, "fixed": False}
"""Loop -> `online.refresh`."""
HEADING = (
    "| seed | round | gold, refreshed | gold, fixed | difference (95 %) | KL, refreshed | KL, fixed "
    "| accuracy before | accuracy after |\n|--:|--:|--:|--:|---|--:|--:|---|---|"
)


@dataclass(frozen=True)
class Result:
    """Figures of one seed: the report's row of every policy, and those of each round's `compare_reward_models`."""

    seed: int
    overrides: Sequence[str]
    policies: Mapping[str, Mapping[str, Any]]
    reward_models: Sequence[Mapping[str, float]]


def main() -> int:
    parser = seeds_parser(__doc__)
    add_first(parser)
    options = parser.parse_args()
    file = options.state / "online_rounds.jsonl"
    if not options.print_only:
        for seed in range(options.first, options.first + options.seeds):
            result = measure(seed, options.overrides, options.state)
            keep(result, file)
    print(table(read(file, options.overrides)))
    return 0


def measure(seed: int, overrides: Sequence[str], state: Path) -> Result:
    """Run both loops with one seed, and evaluate the policies of all rounds in one report."""
    config = load_profile("tiny/online", [*overrides, f"seed={seed}"])
    assert config.online is not None
    assert config.evaluate is not None
    with Bench.opened(config, state) as bench:
        start = make_start(bench)
        policies = {"sft": start.policy}
        for arm, refresh in ARMS.items():
            section = config.online.model_copy(update={"refresh": refresh})
            policies |= loop(section, bench.stages(arm), start, arm)
        rounds = range(1, config.online.rounds + 1)
        opponents = {f"refreshed_{number}": f"fixed_{number}" for number in rounds}
        plain = config.evaluate.evaluate.model_copy(update={"best_of": {}, "parents": opponents})
        compared = Compared({name: name for name in policies}, judge="reward_model")
        nodes = evaluation_nodes(EvaluationConfig(generate=config.evaluate.generate, evaluate=plain), compared)
        given: Made = {**policies, **start.reward_models, "eval_prompts": start.eval_prompts}
        report = run_nodes(nodes, bench.stages("online"), given)["evaluate"]
        rows = json.loads((bench.store.path(report) / "report.json").read_text(encoding="utf-8"))["policies"]
        models = [compared_models(bench, number) for number in rounds]
    return Result(seed, list(overrides), rows, models)


def loop(section: OnlineConfig, stages: Stages, start: Start, arm: str) -> dict[str, PolicyRef]:
    """Run one of the loops; return the policies of its rounds as `<arm>_1`, ..."""
    given: Made = {
        "policy": start.policy,
        "first": start.reward_models["reward_model"],
        "preferences": start.preferences,
        "prompts": start.prompts,
        "demonstrations": start.demonstrations,
    }
    inputs = {name: name for name in given} | {"reward_start": "policy", "first_reward_model": "first"}
    del inputs["first"]
    made = run_nodes(expand(Node("online", "online", section, inputs)), stages, given)
    rounds = range(1, section.rounds + 1)
    return {f"{arm}_{number}": artifact(f"online_{number}", PolicyRef, made) for number in rounds}


def compared_models(bench: Bench, number: int) -> dict[str, float]:
    """Return the figures of the reward models before and after the refresh of this round."""
    report = bench.run.results[f"methods/refreshed/0/online/round_{number}/compare"]
    content = json.loads((bench.store.path(report) / "report.json").read_text(encoding="utf-8"))
    return {
        f"{name}/{figure}": float(content[name][figure])
        for name in ("before", "after")
        for figure in ("accuracy", "accuracy_low", "accuracy_high", "pairs")
    }


# ---------------------------------------------------------------- the table


def read(file: Path, overrides: Sequence[str]) -> list[Result]:
    """Return the latest result of every seed under these overrides."""
    results = [one for one in seeds.read(file, Result) if list(one.overrides) == list(overrides)]
    return latest(results, lambda one: one.seed)


def table(results: Sequence[Result]) -> str:
    """Return the table in Markdown, a row for every seed and round."""
    return "\n".join([HEADING, *(row for one in results for row in rows_of(one))])


def rows_of(result: Result) -> list[str]:
    """Return the rows of one seed; its first row is SFT, round 0."""
    sft = result.policies["sft"]["gold"]
    rows = [f"| {result.seed} | 0 | {sft['mean']:.2f} | {sft['mean']:.2f} | | 0.0 | 0.0 | | |"]
    for number, models in enumerate(result.reward_models, start=1):
        ours, theirs = result.policies[f"refreshed_{number}"], result.policies[f"fixed_{number}"]
        cells = (
            str(result.seed),
            str(number),
            f"{ours['gold']['mean']:.2f}",
            f"{theirs['gold']['mean']:.2f}",
            with_interval(ours["improvement"], "mean", "low", "high", signed=True),
            f"{ours['kl']['mean']:.1f}",
            f"{theirs['kl']['mean']:.1f}",
            with_interval(models, "before/accuracy", "before/accuracy_low", "before/accuracy_high"),
            with_interval(models, "after/accuracy", "after/accuracy_low", "after/accuracy_high"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def with_interval(figures: Mapping[str, float], *names: str, signed: bool = False) -> str:
    """Return a figure with its interval.

    >>> with_interval({"mean": 0.5, "low": -0.25, "high": 1.25}, "mean", "low", "high", signed=True)
    '+0.50 [-0.25, +1.25]'
    """
    value, low, high = (f"{figures[name]:{'+' if signed else ''}.2f}" for name in names)
    return f"{value} [{low}, {high}]"


if __name__ == "__main__":
    sys.exit(main())
