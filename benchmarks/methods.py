"""Train a policy with every available method, from one SFT policy in the tiny world, and measure its improvement."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

from benchmarks.method_rows import Bench, first_pairs, learn, make_start, methods
from benchmarks.method_steps import STEPPED, judge_of_steps
from benchmarks.seeds import add_first, keep, latest, read, seeds_parser
from pipelines.flows.profile import PipelineConfig, load_profile
from rlhf_core.schema.base import keyed
from rlhf_core.store.fingerprint import canonical_json, sha256_text

HEADS = ("gold - sft, mean over seeds", "each seed", "KL to sft", "seconds")
OF_STEPS = {
    "accuracy": "steps judged right",
    "first_error_accuracy": "first error found",
    "f1": "F1 of it",
    "sft": "sft",
    "best": "favorite of 8",
    "any": "any of 8",
    "imitator": "imitator of favorites",
}
"""Figure of the judge of steps -> its column; the last four are fractions of exact matches."""


@dataclass(frozen=True)
class Result:
    """Held-out figures of one method and seed, and the conditions of the measurement."""

    method: str
    seed: int
    conditions: str
    figures: Mapping[str, float]


def main() -> int:
    parser = seeds_parser(__doc__)
    add_first(parser, default=0)
    parser.add_argument("--steps", type=int, default=12, help="of policy optimization")
    parser.add_argument("--pairs", type=int, default=0, help="of preference losses; 0 takes all")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="methods, as dpo/ipo or 'ppo/*'")
    options = parser.parse_args()
    config = load_profile("tiny/full", options.overrides)
    profile = sha256_text(canonical_json(keyed(config)))[:8]
    conditions = f"pairs={options.pairs} steps={options.steps} profile={profile}"
    file = options.state / "methods.jsonl"
    names = [*methods(config, options.steps), "prm"]
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in options.only)]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: no such method; there are {', '.join(names)}")
    if not options.print_only:
        train(config, chosen, conditions, options, file)
    print_tables(read(file, Result), chosen, conditions)
    return 0


def train(
    config: PipelineConfig, chosen: Sequence[str], conditions: str, options: argparse.Namespace, file: Path
) -> None:
    """Train the chosen methods, seed after seed, and append every result to `file`."""
    for seed in range(options.first, options.first + options.seeds):
        with Bench.opened(config, options.state) as bench:
            start = make_start(bench)
            if options.pairs:
                pairs = first_pairs(start.preferences, options.pairs, bench.store, options.state)
                start = replace(start, preferences=pairs)
            for name, method in methods(config, options.steps).items():
                if name in chosen:
                    print(
                        keep(Result(name, seed, conditions, learn(name, method, bench, start, seed)), file), flush=True
                    )
        if "prm" in chosen:
            with Bench.opened(load_profile("tiny/prm", [*STEPPED, *options.overrides]), options.state) as bench:
                print(keep(Result("prm", seed, conditions, judge_of_steps(bench, seed)), file), flush=True)


# ---------------------------------------------------------------- tables


def print_tables(results: Sequence[Result], chosen: Sequence[str], conditions: str) -> None:
    """Print the tables of the chosen methods under these conditions, and list the missing results."""
    newest = latest([one for one in results if one.conditions == conditions], lambda one: (one.method, one.seed))
    by_method = {name: [one for one in newest if one.method == name] for name in chosen}
    rows = [row(name, found) for name, found in by_method.items() if found and name != "prm"]
    if rows:
        print(f"\n| method | {' | '.join(HEADS)} |\n|---|--:|---|--:|--:|", *rows, sep="\n")
    if by_method.get("prm"):
        print(f"\n| seed | {' | '.join(OF_STEPS.values())} | seconds |\n|--:|{'--:|' * (len(OF_STEPS) + 1)}")
        print(*(row_of_steps(one) for one in by_method["prm"]), sep="\n")
    others = {one.conditions for one in results} - {conditions}
    if others:
        print(f"\nnot shown, for they are of other conditions than {conditions}: {'; '.join(sorted(others))}")
    missing = [name for name, found in by_method.items() if not found]
    if missing:
        print(f"\nnot run: {'; '.join(missing)}")


def row(name: str, results: Sequence[Result]) -> str:
    """A line of the table of methods.

    >>> row("dpo/dpo", [Result("dpo/dpo", 0, "", {"gold": 1.5, "before": 0.25, "kl": 1.0, "seconds": 9.6})])
    '| dpo/dpo | +1.25 | +1.25 | 1.00 | 10 |'
    """
    gains = [one.figures["gold"] - one.figures["before"] for one in results]
    each = ", ".join(f"{gain:+.2f}" for gain in gains)
    kl, seconds = fmean(one.figures["kl"] for one in results), fmean(one.figures["seconds"] for one in results)
    return f"| {name} | {fmean(gains):+.2f} | {each} | {kl:.2f} | {seconds:.0f} |"


def row_of_steps(result: Result) -> str:
    """A line of the table of the judge of steps."""
    shares = " | ".join(f"{result.figures[figure]:.2f}" for figure in OF_STEPS)
    return f"| {result.seed} | {shares} | {result.figures['seconds']:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
