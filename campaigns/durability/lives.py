"""Run a pipeline from its first start to its completion, in a separate folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from campaigns.durability import checks, instants, processes
from campaigns.durability.checks import Repeat, StageResult
from campaigns.durability.instants import AtTime, Census, Instant
from campaigns.durability.pipeline import LOG, REWARD, EventLog, Setup, copy_database, read_events, run_pipeline

NAMES = {
    "AtTime": "at a random time",
    "AtOperation": "before a change of a file",
    "InCall": "inside a call",
    "InStage": "before a change of a file, by stage",
}


@dataclass(frozen=True)
class Kill:
    """A kill that hit: its kind, the stage that was running, and the interrupted operation if known."""

    kind: str
    stage: str
    during: str
    lingered_s: float


@dataclass
class Life:
    """One pipeline from its first start to its completion."""

    name: str
    mlflow: bool
    kills: list[Kill] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    others: list[Kill] = field(default_factory=list)
    """Disturbances other than kills: stops and edits."""
    ends: list[str] = field(default_factory=list)
    """How the runs ended that were not killed."""
    problems: list[str] = field(default_factory=list)
    """Differences from the twin's result."""
    leftovers: list[str] = field(default_factory=list)
    """Files of the store and processes that should be gone."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Peace:
    """The outcome of undisturbed runs: the results to compare with, and a census for each kind of tracker.

    `edited` are the results with the edited reward file. `database` is an empty MLflow database to copy.
    """

    results: Mapping[str, StageResult]
    edited: Mapping[str, StageResult]
    memory: Census
    mlflow: Census
    problems: tuple[str, ...]
    database: Path


def new_home(home: Path, mlflow: bool, template: Path) -> Setup:
    """Create a state folder with the user's reward file and, if requested, an empty MLflow database."""
    home.mkdir(parents=True)
    shutil.copy(REWARD, home)
    if mlflow:
        copy_database(template, home)
    return Setup(home, mlflow)


def logged(setup: Setup, instant: Instant | None, *, act: Callable[[], None] = instants.die) -> None:
    """Run the pipeline in this process, which dies or calls `act` at `instant`; record how it ends."""
    log = EventLog(setup.events)
    log.note("begin")
    instants.obey(instant, setup.home, log.stage, lambda what: log.note("dying", during=what), act)
    try:
        run_pipeline(setup, log)
    except BaseException as error:
        log.note("ended", error=type(error).__name__, message=str(error))
        raise
    log.note("ended", error="", message="")


def attempt(setup: Setup, instant: Instant | None) -> processes.Ended:
    """Run the pipeline in a child that dies at `instant`; wait until its descendants are gone."""
    after = instant.seconds if isinstance(instant, AtTime) else None
    return processes.run(partial(logged, setup, instant), setup.home / LOG, kill_after_s=after)


def examine(
    life: Life,
    setup: Setup,
    twin: Mapping[str, StageResult],
    began: float,
    *,
    unfinished: Collection[str] = (),
    tracked: bool = True,
) -> None:
    """Record the problems of a completed pipeline, and its duration, in `life`. The folder is removed if it is sound.

    `unfinished` are keys whose attempts may remain; without `tracked`, MLflow is not checked.
    """
    life.problems += checks.problems(setup.home, twin, tracked=tracked)
    life.leftovers += checks.leftovers(setup.home, unfinished=unfinished)
    life.seconds = time.monotonic() - began
    if not (life.problems or life.leftovers):
        shutil.rmtree(setup.home)


def last_words(setup: Setup, pid: int) -> str:
    """The error that a run ended with, `Class: message`; "" if it completed or left no message."""
    for event in reversed(read_events(setup.events)):
        if event["event"] == "ended" and event["pid"] == pid:
            return f"{event['error']}: {event['message']}" if event["error"] else ""
    return ""


def describe(instant: Instant | None, path: Path, lingered_s: float = 0.0, *, pid: int = 0, kind: str = "") -> Kill:
    """Describe the kill of the last run, or of process `pid`, from its final event and its stage."""
    stage, during = "starting", ""
    for event in read_events(path):
        if pid and event["pid"] != pid:
            continue
        match event["event"]:
            case "begin":
                stage, during = "starting", ""
            case "started":
                stage = event["label"]
            case "finished":
                stage = "between stages"
            case "dying":
                during = event["during"]
    return Kill(kind or NAMES[type(instant).__name__], stage, during, lingered_s)
