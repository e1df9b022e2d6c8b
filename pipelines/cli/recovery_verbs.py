"""Correct the state of killed runs and resume unfinished ones (`rlhf reconcile`, `rlhf resume`)."""

import argparse

from pipelines.cli.common import console, print_line, print_wrapped, store_folder
from pipelines.services.home import Home
from pipelines.services.reconcile import reconcile_all, some_prefect, was_used
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore


def reconcile(options: argparse.Namespace) -> None:
    """Mark runs whose process was killed as interrupted; print each change with its reason."""
    home, count = Home.here(), 0
    for line in reconcile_all(home, [ArtifactStore(store_folder(options))]):
        count += 1
        print_line(line)
    console.print("nothing to reconcile: every run shown as running is running" if not count else f"{count} corrected")


def resume(options: argparse.Namespace) -> None:
    """Run an unfinished run again."""
    home = Home.here()
    if not was_used(home):
        if options.run:
            raise ConfigError(
                "resume", options.run, f"no run was started yet in {home.root}", "list runs with `rlhf runs`"
            )
        print_wrapped(f"nothing was run yet in {home.root}: `rlhf run tiny/full` is a start")
        return
    with some_prefect(home) as served:
        # Prefect reads its settings when it is imported, and `some_prefect` has just made them.
        from pipelines.execution.resume import resume_flow_run

        found = resume_flow_run(options.run, served=served)
    print_line(found.message)
    if found.request is not None:
        from pipelines.cli.run_command import run_request  # 0.6 s, for a run that is to be run here

        run_request(found.request)
