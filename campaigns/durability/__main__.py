"""Kill a small but complete pipeline at random instants, run it again, and compare it with an undisturbed twin.

    python -m campaigns.durability --kills 200 --seed 0 --markdown durability.md

One warm process imports everything once and forks a child for every attempt. Exit status 0: all pipelines ended with
the same digests, metrics and files as their twins, and no process, lease or temporary file was left.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from campaigns.durability.pipeline import set_one_thread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at least so many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="pipelines at a time (default 2)")
    parser.add_argument(
        "--mlflow-every", type=int, default=4, help="every so many record in MLflow (default 4; 0: none)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=2,
        help="pairs of runs of the same profile at once, and as many of which one is killed (default 2)",
    )
    parser.add_argument(
        "--others",
        type=float,
        default=0.3,
        help="share of the pipelines that are stopped and taken over, have wrong clocks, or whose reward file is edited "
        "(default 0.3)",
    )
    parser.add_argument(
        "--takeovers-in-mlflow",
        action="store_true",
        help="those that are taken over may record in MLflow, which does not pass yet (see docs/keys.md)",
    )
    parser.add_argument(
        "--real", type=int, default=0, help="kills and stops of runs with Ray, vLLM and DeepSpeed (default 0)"
    )
    parser.add_argument("--markdown", type=Path, help="write the figures there")
    parser.add_argument("--keep", type=Path, help="folder for the state of the runs; kept (default: a temporary one)")
    options = parser.parse_args()
    set_one_thread()
    with tempfile.TemporaryDirectory(prefix="durability-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return _campaign(options, folder.resolve())


def _campaign(options: argparse.Namespace, folder: Path) -> int:
    from campaigns.durability import campaign, processes, real, report

    began = time.monotonic()
    processes.adopt_orphans()
    peace = campaign.run_in_peace(folder, mlflow=options.mlflow_every > 0)
    print(f"in peace: {peace.memory.seconds:.1f} s ({peace.mlflow.seconds:.1f} s with MLflow)", flush=True)
    other = [f"in peace: {problem}" for problem in peace.problems]
    plan = campaign.Plan(
        options.kills,
        options.seed,
        options.workers,
        options.mlflow_every,
        options.pairs,
        options.others,
        options.takeovers_in_mlflow,
    )
    lives = campaign.run_workers(folder, peace, plan)
    real_lives = []
    if options.real:
        real_lives = real.campaign(
            folder / "real",
            kills=options.real,
            seed=options.seed,
            others=options.others,
            takeovers_in_mlflow=options.takeovers_in_mlflow,
        )
    result = report.Campaign(
        command=f"python -m campaigns.durability {shlex.join(sys.argv[1:])}",
        lives=lives,
        real_lives=real_lives,
        other=other,
        stages=len(peace.results),
        peace_s=peace.memory.seconds,
        seconds=time.monotonic() - began,
    )
    text = report.markdown(result)
    print(f"\n{text}")
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
