"""Compare the policies of a recipe over seeds: held-out gold reward by prompt source, suites, groups without gradient.

    python -m benchmarks.arms specialists --seeds 3
    python -m benchmarks.arms difficulty --seeds 3
    python -m benchmarks.arms specialists --print

The first word names a profile in this folder: `specialists.toml` has a student of two specialists, mixed PPO of as many
steps, and merges; `difficulty.toml` has GRPO on all prompts, and on prompts of medium difficulty only. Gold reward,
which no training of the support desk uses, is measured on held-out prompts; in arithmetic it is the fraction of correct
answers. A group has no gradient if all of its answers have the same reward; the fraction is over all steps. Each seed
is appended to `<state>/<profile>.jsonl`, and `--print` prints the table from that file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.seeds import add_first, keep, latest, read, seeds_parser
from pipelines import StageResult, run
from rlhf_core.evaluation.plots import read_curves
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore

FOLDER = Path(__file__).parent
PROFILES = ("specialists", "difficulty")
NO_GRADIENT = "/rollout/zero_variance"


@dataclass(frozen=True)
class Result:
    """Measurements of one seed, for each policy."""

    seed: int
    overrides: Sequence[str]
    gold: Mapping[str, Mapping[str, Sequence[float]]]
    """policy -> source -> mean, low and high of the 95 % interval."""
    others: Mapping[str, Mapping[str, float]]
    """policy -> metric of a suite, or the fraction of groups without gradient in its training -> value."""


def measure(profile: Path, seed: int, state: Path, overrides: Sequence[str]) -> Result:
    given = dict(one.split("=", 1) for one in overrides)
    results = run(profile, overrides={**given, "seed": seed}, home=state)
    rows = json.loads((results["evaluate"].path / "report.json").read_text(encoding="utf-8"))["policies"]
    gold = {
        policy: {
            source: [of["gold"][part] for part in ("mean", "low", "high")]
            for source, of in (row.get("sources") or {"all": row}).items()
        }
        for policy, row in rows.items()
    }
    others: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in results["evaluate/suites"].metrics.items() if "evaluate/suites" in results else ():
        _, policy, measured = name.split("/")
        if not measured.endswith(("_low", "_high", "_prompts", "_difference")):
            others[policy][measured] = value
    for label, result in results.items():
        steps = logged(result, NO_GRADIENT)
        if steps:
            others[label]["groups without gradient"] = fmean(steps)
    return Result(seed, list(overrides), gold, dict(others))


def logged(result: StageResult, metric: str) -> list[float]:
    """The logged values of a stage's metric, step by step; the metric's name begins with the stage's."""
    store = ArtifactStore(next(folder for folder in result.path.parents if (folder / "objects").is_dir()))
    keys = [record.key for record in store.records() if record.handle and record.handle.digest == result.digest]
    file = attempts.metrics(store.attempts(keys[-1]))  # any of them: the values are the same
    curves = read_curves(file) if file.is_file() else {}
    return [value for name, points in curves.items() if name.endswith(metric) for _, value in points]


def table(results: Sequence[Result]) -> str:
    """A table with a row for each policy and seed.

    >>> print(table([Result(17, [], {"sft": {"all": [0.2, 0.1, 0.3]}}, {"sft": {"solved": 0.5}})]))
    | policy | seed | all | solved |
    |---|--:|---|--:|
    | sft | 17 | 0.20 [0.10, 0.30] | 0.50 |
    """
    sources = list(dict.fromkeys(source for one in results for row in one.gold.values() for source in row))
    names = dict.fromkeys(name for one in results for row in one.others.values() for name in row)
    others = sorted(names, key=lambda name: int("".join(filter(str.isdigit, name)) or 10**9))  # pass_at_4, pass_at_16
    lines = [
        f"| {' | '.join(['policy', 'seed', *sources, *others])} |",
        f"|---|--:|{'---|' * len(sources)}{'--:|' * len(others)}",
    ]
    for policy in dict.fromkeys(policy for one in results for policy in one.gold):
        for one in results:
            gold, rest = one.gold.get(policy, {}), one.others.get(policy, {})
            cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*gold[source]) if source in gold else "" for source in sources]
            cells += [f"{rest[name]:.2f}" if name in rest else "" for name in others]
            lines.append(f"| {' | '.join([policy, str(one.seed), *cells])} |")
    return "\n".join(lines)


def main() -> int:
    parser = seeds_parser(__doc__)
    add_first(parser)
    parser.add_argument("profile", choices=PROFILES)
    options = parser.parse_args()
    file = options.state / f"{options.profile}.jsonl"
    for seed in [] if options.print_only else range(options.first, options.first + options.seeds):
        result = measure(FOLDER / f"{options.profile}.toml", seed, options.state, options.overrides)
        print(keep(result, file), flush=True)
    found = [one for one in read(file, Result) if list(one.overrides) == options.overrides]
    print(table(latest(found, of=lambda one: one.seed)) if found else f"{file}: has no results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
