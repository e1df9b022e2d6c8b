"""Feed damaged inputs of four kinds: each must give a clear error or a correct result, never a traceback or a hang.

    python -m campaigns.fuzz                                   # 10,000 of each
    python -m campaigns.fuzz --count 300 --only rows --seed 1
    python -m campaigns.fuzz --only rows --seed 0 --first 4711 --count 1    # one input again, with its whole traceback

| target | damaged input | use |
|---|---|---|
| `profiles` | TOML files, profiles they extend, `--set` | loaded, some planned |
| `rows` | JSONL, JSON, CSV, Parquet, Arrow, gz of those, in every format | made into tables; every row must be accounted for |
| `scripts` | OpenRLHF command lines | translated, and the profile loaded |
| `store` | records, leases, manifests, checkpoints, attempts, pins, notes, objects | plan, explain, runs, ls, verify, gc, reconcile |

Each target runs in a separate process. If an input kills or hangs it, the input is a finding, and the next process
continues with the input after it. The exit status is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import IO

from campaigns.fuzz.campaign import FATES, Result, run

TARGETS = ("profiles", "rows", "scripts", "store")
LIMIT_S = 10.0
MEMORY_BYTES = 4 * 2**30
"""A damaged table may request any amount of memory; allocations beyond this limit fail."""
SILENCE_S = 900.0
"""Seconds for imports and the target's setup, and for an input that blocks the interpreter in native code."""


@dataclass
class Tally:
    """The results of one target: the count of each fate, and the first input of each finding."""

    fates: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[Result]] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Count a result."""
        self.fates[result.fate] += 1
        if result.where:
            self.found.setdefault(result.where, []).append(result)


def main() -> int:
    """Run the targets and print the table; 1 if there are findings."""
    options = _parser().parse_args()
    if options.worker:
        return work(options.only[0], options.seed, options.first, options.count)
    tallies = {}
    for name in options.only or TARGETS:
        tallies[name] = Tally()
        for result in results(name, options.seed, options.first, options.count):
            tallies[name].add(result)
        print(f"{name}: {dict(tallies[name].fates)}", file=sys.stderr)  # the others may take an hour
    show(tallies, seed=options.seed, first=options.first)
    return int(any(tally.found for tally in tallies.values()))


def results(name: str, seed: int, first: int, count: int) -> Iterator[Result]:
    """Yield the results of a target from separate processes, one at a time."""
    end = first + count
    while first < end:
        arguments = [
            "--worker",
            "--only",
            name,
            "--seed",
            str(seed),
            "--first",
            str(first),
            "--count",
            str(end - first),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "campaigns.fuzz", *arguments], stdout=subprocess.PIPE, text=True
        )
        for result in _lines(process):
            yield result
            first = result.number + 1
        if process.returncode > 0:
            sys.exit(f"the target {name} ended with exit status {process.returncode}")
        if first < end:
            yield _death(process, first)
            first += 1


def work(name: str, seed: int, first: int, count: int) -> int:
    """Print one line of JSON per input. This runs in the processes that `results` starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answers = sys.stdout
    sys.stdout = sys.stderr
    target = import_module(f"campaigns.fuzz.{name}").Target
    for result in run(name, target, seed=seed, first=first, count=count, limit_s=LIMIT_S):
        answers.write(json.dumps(asdict(result)) + "\n")
        answers.flush()
    return 0


def show(tallies: dict[str, Tally], *, seed: int, first: int) -> None:
    """Print the table, and each finding once with the command that reproduces it."""
    print(f"\n| target (seed {seed}, from {first}) | inputs | " + " | ".join(f"{fate}s" for fate in FATES) + " |")
    print("|---|---|" + "---|" * len(FATES))
    for name, tally in tallies.items():
        print(f"| {name} | {tally.fates.total()} | " + " | ".join(str(tally.fates[fate]) for fate in FATES) + " |")
    for name, tally in tallies.items():
        for where, found in sorted(tally.found.items(), key=lambda item: -len(item[1])):
            again = f"python -m campaigns.fuzz --only {name} --seed {seed} --first {found[0].number} --count 1"
            print(f"\n{name}: {len(found)} x {where}\n  {again}\n{found[0].detail}")


def _lines(process: subprocess.Popen[str]) -> Iterator[Result]:
    """Yield the results that the process prints, and kill it if it is silent for too long."""
    assert process.stdout is not None
    stream = process.stdout
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_pass_on, args=(stream, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_S)
        except queue.Empty:
            process.kill()
            break
        if not line:
            break
        yield Result(**json.loads(line))
    process.wait()


def _pass_on(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _death(process: subprocess.Popen[str], number: int) -> Result:
    if process.returncode == -signal.SIGKILL:
        return Result(number, "hang", f"no answer within {SILENCE_S:g} s, in foreign code")
    return Result(number, "traceback", f"the process died: {signal.Signals(-process.returncode).name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.fuzz", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--count", type=int, default=10_000, help="inputs of each target")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TARGETS, help="these targets; default: all")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
