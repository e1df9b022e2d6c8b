"""Run the small pipeline of the kill campaign with in-process engines, and read its results."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.execution.executor import RunOptions, Silent, Tracker
from pipelines.execution.opening import open_run, open_tracker
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home, quiet_environment
from rlhf_core.stage.decision import Decision
from rlhf_core.tracking.memory import MemoryTracker

PROFILE = Path(__file__).with_name("small.toml")
REWARD = Path(__file__).with_name("reward.py")
AHEAD = (
    "rlhf_core.training.trainer",
    "rlhf_core.sampling.hf_sampler",
    "rlhf_core.rewards.scoring",
    "rlhf_core.data.sources",
    "rlhf_core.evaluation.plots",
    "rlhf_core.evaluation.report",
)
EVENTS = "events.jsonl"
LOG = "output.log"


@dataclass(frozen=True)
class Setup:
    """The state folder of a run, and whether MLflow's database in it is the tracker."""

    home: Path
    mlflow: bool

    @property
    def events(self) -> Path:
        return self.home / EVENTS

    @property
    def reward(self) -> Path:
        """The user's file with a reward function."""
        return self.home / REWARD.name


class EventLog(Silent):
    """Appends events to a file, one line at a time, so that a kill loses at most the line being written."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stage = ""

    def stage(self) -> str:
        """The label of the running stage, "" between stages."""
        return self._stage

    def note(self, event: str, **fields: Any) -> None:
        """Append one event of this process."""
        line = json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n"
        os.write(self._descriptor, line.encode())

    def started(self, label: str, decision: Decision) -> None:
        self._stage = label
        self.note("started", label=label, action=decision.action)

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        self.note("progress", label=label, done=done)

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        self._stage = ""
        self.note("finished", label=label, action=decision.action, seconds=round(seconds, 3))


def run_pipeline(setup: Setup, log: EventLog) -> None:
    """Run the whole small pipeline in this process; a finished stage is a cache hit."""
    home = Home(setup.home).make()
    os.environ.update(quiet_environment(home))
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    config = load_profile(PROFILE, [f"ppo.rewards.terms.brief.function={setup.reward}:brief"])
    tracker: Tracker = open_tracker(config, home) if setup.mlflow else MemoryTracker()
    with open_run(config, lifecycle, RunOptions(), home=home, tracker=tracker, listener=log) as run:
        run_stages(run, lifecycle, run.directly, tags={"from": "campaigns.durability"})


def checkpoint_intervals(config: PipelineConfig) -> dict[str, int]:
    """Label -> steps (or shards) between checkpoints, the most that a resumed stage repeats."""
    assert config.sft and config.reward_model and config.rejection_sampling and config.iterative_dpo and config.ppo
    trained = {
        "sft": config.sft.loop.checkpoint_every,
        "reward_model": config.reward_model.loop.checkpoint_every,
        "rejection_sampling/sft": config.rejection_sampling.sft.loop.checkpoint_every,
        "ppo": config.ppo.checkpoint_every,
    }
    rounds = range(1, config.iterative_dpo.rounds + 1)
    trained |= {f"iterative_dpo/round_{n}/dpo": config.iterative_dpo.dpo.loop.checkpoint_every for n in rounds}
    sampled = [
        "rejection_sampling/generate",
        *(f"iterative_dpo/round_{n}/generate" for n in rounds),
        *(f"evaluate/{name}/generate" for name in config.policies()),
    ]
    return trained | dict.fromkeys(sampled, 1)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of all processes that ran in a state folder, in order; truncated lines are skipped."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


# ---------------------------------------------------------------- fast forks


def set_one_thread() -> None:
    """Limit numeric libraries to one thread; call it before the first of them is imported.

    A fork copies only the forking thread, so a library with a thread pool would wait forever in the child.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def write_imports(path: Path) -> None:
    """Write the names of the modules that this process has imported."""
    path.write_text("\n".join(sys.modules), encoding="utf-8")


def import_ahead() -> None:
    """Import the engines and the stages, which import most of the rest."""
    for name in AHEAD:
        importlib.import_module(name)


def import_all(path: Path) -> None:
    """Import the modules that another process has imported, so that children of this one start with them loaded."""
    for name in path.read_text(encoding="utf-8").splitlines():
        try:
            importlib.import_module(name)
        except ImportError:  # created at run time by a library, under a name that cannot be imported
            continue


def make_mlflow_database(template: Path) -> None:
    """Create an empty MLflow database to copy, because its migrations take seconds."""
    from rlhf_core.tracking.mlflow_client import create_database

    create_database(template)


def copy_database(template: Path, home: Path) -> None:
    """Copy the MLflow database into a state folder."""
    source, target = sqlite3.connect(template), sqlite3.connect(home / "mlflow.db")
    source.backup(target)
    source.close()
    target.close()
