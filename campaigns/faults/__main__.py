"""Cause every known fault with the real engines, and print the outcome.

    python -m campaigns.faults
    python -m campaigns.faults --only hangs --markdown table.md

Exit status 1 if a fault was not handled, or was detected after its stated deadline.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from campaigns.faults.fault import Fault, Outcome

MODULES = ("rewards", "remote", "sandbox", "environments", "numbers", "disk", "services", "engines", "clusters")
"""Each of these modules has a list FAULTS."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    faults = [fault for module in MODULES for fault in _faults(module) if options.only in fault.name]
    if not faults:
        parser.error(f"--only {options.only!r}: no fault has that in its name")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        results = [(fault, _cause(fault, Path(folder))) for fault in faults]
    print(f"\n{table(results)}\n{len(results)} faults in {time.monotonic() - began:.0f} s")
    if options.markdown:
        options.markdown.write_text(table(results), encoding="utf-8")
    return 1 if any(bad(fault, outcome) for fault, outcome in results) else 0


def bad(fault: Fault, outcome: Outcome) -> bool:
    """Whether a fault was not handled, or was detected too late."""
    return outcome.result == "not handled" or (outcome.detect_s is not None and outcome.detect_s > fault.deadline_s)


def table(results: Sequence[tuple[Fault, Outcome]]) -> str:
    """The results as a Markdown table."""
    lines = ["| fault | outcome | deadline s | noticed after s | then s | what was said |", "|---|---|--:|--:|--:|---|"]
    for fault, outcome in results:
        late = " (late)" if outcome.result != "not handled" and bad(fault, outcome) else ""
        said = _short(outcome.said).replace("|", "\\|")
        cells = [
            fault.name,
            outcome.result + late,
            f"{fault.deadline_s:g}",
            _s(outcome.detect_s),
            _s(outcome.recover_s),
        ]
        lines.append(f"| {' | '.join([*cells, said])} |")
    return "\n".join(lines) + "\n"


def _cause(fault: Fault, folder: Path) -> Outcome:
    print(f"{fault.name} ...", end=" ", flush=True)
    try:
        outcome = fault.inject(folder)
    except Exception as error:
        # A fault that breaks its own experiment was not handled; the other rows are still needed.
        outcome = Outcome("not handled", None, None, f"{type(error).__name__}: {error}")
    print(f"{outcome.result}: {' '.join(outcome.said.split())[:300]}", flush=True)
    return outcome


def _faults(module: str) -> list[Fault]:
    found: list[Fault] = import_module(f"campaigns.faults.{module}").FAULTS
    return found


def _short(text: str) -> str:
    """Format the text on one line, without its middle if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 240 else f"{line[:140]} ... {line[-95:]}"


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main())
