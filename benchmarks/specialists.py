"""Compare a student of two specialists with them, with mixed PPO of as many steps, and with merges, by domain.

    python -m benchmarks.specialists --seeds 3
    python -m benchmarks.specialists --print

Runs `benchmarks/specialists.toml` (`tiny/recipe` with more arms), once a seed. Gold reward, which no training of the support
desk sees, is measured on held-out prompts of each domain; in arithmetic it is the share of right answers. Every seed is
appended to `<state>/specialists.jsonl`, and `--print` prints the table from that file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.seeds import add_first, keep, latest, read, seeds_parser
from pipelines import run

PROFILE = Path(__file__).with_suffix(".toml")
DOMAINS = ("support", "arithmetic")


@dataclass(frozen=True)
class Result:
    """The held-out gold reward of every policy of one seed: policy -> domain -> mean, low and high of the 95 % interval."""

    seed: int
    gold: dict[str, dict[str, list[float]]]
    report: str


def measure(seed: int, state: Path, overrides: Sequence[str]) -> Result:
    given = dict(one.split("=", 1) for one in overrides)
    results = run(PROFILE, overrides={**given, "seed": seed}, home=state)
    report = json.loads((Path(results["evaluate"].path) / "report.json").read_text(encoding="utf-8"))
    gold = {
        policy: {
            domain: [row["sources"][domain]["gold"][part] for part in ("mean", "low", "high")] for domain in DOMAINS
        }
        for policy, row in report["policies"].items()
    }
    return Result(seed, gold, results["evaluate"].digest)


def table(results: Sequence[Result]) -> str:
    """Return a row for each policy and seed."""
    lines = [f"| policy | seed | {' | '.join(DOMAINS)} |", "|---|--:|--:|--:|"]
    for policy in results[0].gold:
        for one in results:
            cells = [
                f"{mean:.2f} [{low:.2f}, {high:.2f}]"
                for mean, low, high in (one.gold[policy][domain] for domain in DOMAINS)
            ]
            lines.append(f"| {policy} | {one.seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = seeds_parser(__doc__)
    add_first(parser)
    options = parser.parse_args()
    file = options.state / "specialists.jsonl"
    for seed in [] if options.print_only else range(options.first, options.first + options.seeds):
        print(keep(measure(seed, options.state, options.overrides), file), flush=True)
    found = latest(read(file, Result), of=lambda one: one.seed)
    print(table(found) if found else f"{file}: has no results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
