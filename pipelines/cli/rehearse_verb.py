"""Print the cuts, the executed stages and the problems of a rehearsal (`rlhf rehearse`)."""

import argparse
import logging
import os
import time
from collections import Counter
from dataclasses import asdict

from pipelines.cli.common import print_json, print_line
from pipelines.flows.profile import load_profile
from pipelines.rehearse.problems import Rehearsal
from pipelines.services.home import Home

EXIT_PROBLEMS = 1
CLUSTER = "RAY_ADDRESS"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Settings that silence libraries, whose reports on random weights are meaningless."""


def rehearse_profile(options: argparse.Namespace) -> int:
    """Rehearse a profile on this machine, and return 1 if there are problems."""
    began = time.monotonic()
    config = load_profile(options.profile, options.overrides)
    os.environ.pop(CLUSTER, None)  # a rehearsal starts its engines here, and takes no part of a cluster
    os.environ.update(QUIET)
    log = Home.here().make().logs / "rehearse.log"
    logging.basicConfig(filename=log, filemode="w", force=True)
    from pipelines.rehearse.runner import rehearse  # transformers, which reads these settings when it is imported

    quiet = options.json
    found = rehearse(config, show=lambda line: None if quiet else print_line(line))
    seconds = time.monotonic() - began
    if quiet:
        cuts = [str(cut) for cut in found.cuts]
        values = {
            "nodes": [asdict(one) for one in found.nodes],
            "cuts": cuts,
            "facts": found.facts,
        }
        print_json(values | {"problems": [asdict(one) for one in found.problems], "seconds": round(seconds, 1)})
    else:
        print_report(found, options.profile, seconds)
        print_line(f"warnings and tracebacks: {log}")
    return EXIT_PROBLEMS if found.problems else 0


def print_report(
    found: Rehearsal,
    profile: str,
    seconds: float,
) -> None:
    """Print the cuts, the facts, the problems by class, and a summary."""
    print_line("\ncut for the rehearsal:")
    for cut in found.cuts:
        print_line(f"  {cut}")
    for fact in found.facts:
        print_line(fact)
    for kind in dict.fromkeys(problem.kind for problem in found.problems):
        print_line(f"\n{kind}:")
        for problem in found.problems:
            if problem.kind == kind:
                print_line(f"  {problem.text}")
    states = Counter("waited" if one.state.startswith("after") else one.state for one in found.nodes)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    print_line(f"\n{profile}: {counts or 'no stage ran'}; {len(found.problems)} problems; {seconds:.0f} s")
    print_line(f"memory and time at the real size: rlhf plan {profile} --estimate")
