"""A flow as a program, to be killed: one toy stage as a Ray job, tracked by MLflow. `job_flow PROFILE FILE`: it waits for FILE."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from pipelines.execution.executor import RunOptions, Silent
from pipelines.execution.opening import open_run, open_tracker
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision
from rlhf_core.types import PolicyRef
from tests.support.toy_stage import ToyConfig, toy_spec


class Said(Silent):
    """Says what it hears, for the test that reads it."""

    def started(self, label: str, decision: Decision) -> None:
        say("started", decision.action, decision.reason)

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        say("progress", str(done))

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        say("finished", decision.action, f"{seconds:.2f} s")


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main(profile: str, file: str) -> None:
    def pipeline(config: PipelineConfig, stages: Stages) -> None:
        stages.run_stage(toy_spec(ToyConfig(trouble=f"wait:{file}"), label="toy"), PolicyRef)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    home, config = Home.here().make(), load_profile(Path(profile))
    tracker = open_tracker(config, home)
    with (
        open_run(config, pipeline, RunOptions(), home=home, tracker=tracker, listener=Said()) as run,
        stopping.on_signals(),
    ):
        run_stages(run, pipeline, run.directly, tags={})


if __name__ == "__main__":
    main(*sys.argv[1:])
