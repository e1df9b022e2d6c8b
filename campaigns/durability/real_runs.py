"""Run the `rlhf` command once with the real engines, and the twin that all such runs are compared with."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.processes import kill_family
from campaigns.durability import checks, command, edits, processes
from campaigns.durability.checks import StageResult
from campaigns.durability.clocks import Skew
from campaigns.durability.lives import Kill, Life
from campaigns.durability.pipeline import REWARD
from pipelines.cli.main import EXIT_REFUSED
from pipelines.flows.profile import find_profile

LIMIT_S = 1800.0
GONE_WITHIN_S = 240.0
"""Seconds. Two of Ray's agents retry a dead head for 60 s before they end, and longer on a busy machine."""
PROFILE = "real.toml"
EDITED = "edited"
"""A line in the log of a life, between its runs."""

SHRUNKEN = """
extends = "{full}"
name = "durability-real"
[prepare_data.data]
demonstrations = 192
preferences = 96
prompts = 24
eval_demonstrations = 16
eval_preferences = 16
eval_prompts = 8
[prepare_data.model]
hidden_size = 128
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 256
[sft.loop]
checkpoint_every = 4
[reward_model.loop]
checkpoint_every = 3
[rejection_sampling.generate]
shard_size = 8
samples_per_prompt = 4
sampling = {{max_tokens = 16}}
[rejection_sampling.select]
drop_truncated = false
[iterative_dpo]
rounds = 1
[iterative_dpo.generate]
shard_size = 8
samples_per_prompt = 4
sampling = {{max_tokens = 16}}
[iterative_dpo.select]
drop_truncated = false
[ppo]
steps = 8
prompts_per_step = 12
sampling = {{max_tokens = 16}}
checkpoint_every = 2
kl = {{target = 4.0}}
[ppo.rewards]
normalize = "running"
clip = 3.0
overlong = "none"
[ppo.rewards.terms]
brief = {{type = "function", function = "{reward}:brief"}}
[evaluate.generate]
sampling = {{max_tokens = 16}}
"""


@dataclass(frozen=True)
class Moment:
    """This many seconds after the stage `label` has begun; if the label is empty, after the run was started."""

    label: str
    after_s: float

    def __str__(self) -> str:
        return f"{self.after_s:.1f} s after {self.label or 'the start'}"


@dataclass(frozen=True)
class RealPeace:
    """The outcome of an undisturbed run, the folder of all lives, and the seed of the disturbances.

    `stages` has the duration of each stage in seconds.
    """

    folder: Path
    seed: int
    seconds: float
    stages: Mapping[str, float]
    results: Mapping[str, StageResult]

    @cached_property
    def edited(self) -> Mapping[str, StageResult]:
        """The results with the edited reward file, from an undisturbed run on first access.

        It has a separate state folder: if a policy was published before, the next one would be version 2.
        """
        twin = new_home(self.folder / "edited")
        edits.edit(twin / REWARD.name, "result")
        in_peace(twin)
        return checks.results(twin)

    def draws(self, kind: str, number: int) -> random.Random:
        """The random generator of one life."""
        return random.Random(f"{self.seed}/real/{kind}/{number}")

    def moment(self, source: random.Random, *, reach: float) -> Moment:
        """Draw a moment in the first `reach` of a run; half of them in a random stage, regardless of its duration."""
        if source.random() < 0.5:
            return Moment("", source.uniform(0.0, reach) * self.seconds)
        labels = list(self.stages)
        return self.moment_in(labels[int(source.uniform(0.0, reach) * len(labels))], source)

    def moment_in(self, label: str, source: random.Random) -> Moment:
        """Draw a moment while a stage runs."""
        return Moment(label, source.random() * self.stages[label])


@dataclass(frozen=True)
class Run:
    """A started run of the command, and the file with its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def words(self) -> str:
        """The error that it ended with, `Class: message` as in process; "" if it completed."""
        if self.process.returncode == 0:
            return ""
        last = next(reversed([line for line in self.log.read_text(encoding="utf-8").splitlines() if line.strip()]), "")
        return f"{_raised(self.log) if self.process.returncode == EXIT_REFUSED else 'Error'}: {last}"

    def works(self) -> bool:
        """Whether it computes a stage; then it does its own work and does not wait for another run."""
        return any(event["event"] == "started" and event["action"] in ("RUN", "RESUME") for event in events(self.log))


def new_home(home: Path) -> Path:
    """Create a state folder with the user's reward file and a profile that refers to it."""
    home.mkdir(parents=True)
    shutil.copy(REWARD, home)
    profile = SHRUNKEN.format(full=find_profile("tiny/full").resolve(), reward=home / REWARD.name)
    (home / PROFILE).write_text(profile, encoding="utf-8")
    return home


def start(
    home: Path, believed: Skew | None = None, *, verb: str = "run", variables: Mapping[str, str] | None = None
) -> Run:
    """Start `rlhf run` on the profile of `home`, or another verb; `believed` overrides its machine and clock.

    `variables` are added to this process's environment variables.
    """
    module = ["pipelines.cli.main"] if believed is None else command.command(believed)
    arguments = ["run", str(home / PROFILE)] if verb == "run" else [verb]
    log = home / f"output-{len(logs(home))}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            env=os.environ | {"RLHF_HOME": str(home), "PYTHONUNBUFFERED": "1"} | dict(variables or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(process, log)


def finish(run: Run) -> processes.End:
    """Wait for a run; returns how it ended. A run that hangs is killed with its descendants."""
    try:
        status = run.process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_family(run.process.pid)
        run.process.wait()
        return "hung"
    return "completed" if status == 0 else "failed"


def in_peace(home: Path) -> float:
    """Run the profile of `home` undisturbed; returns the seconds. SystemExit if it does not complete."""
    began, run = time.monotonic(), start(home)
    if finish(run) != "completed":
        raise SystemExit(f"a run in peace failed; read {run.log}")
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool], run: Run, seconds: float) -> None:
    """Wait until the condition holds, the run has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition() and run.process.poll() is None:
        time.sleep(0.1)


def reach(run: Run, moment: Moment) -> bool:
    """Wait for a moment of a run; returns whether the run is alive then."""
    if moment.label:
        wait_until(lambda: moment.label in (event["label"] for event in events(run.log)), run, LIMIT_S)
    wait_until(lambda: False, run, moment.after_s)
    return run.process.poll() is None


def killed(life: Life, run: Run, moment: Moment, *, alone: bool, kind: str = "") -> processes.End:
    """Kill a run at a moment, with or without its descendants; records the kill and any survivors in `life`."""
    lives = reach(run, moment)
    if lives:
        kill(run, alone=alone)
    how: processes.End = "killed" if lives else finish(run)
    lingered = note_survivors(life)
    if lives:
        kind = kind or ("the process of the command alone" if alone else "the whole family at once")
        life.kills.append(Kill(kind, stage(run.log), str(moment), lingered))
        print(f"{life.name}: killed {kind}, {moment}, all gone {lingered:.1f} s later", flush=True)
    return how


def kill(run: Run, *, alone: bool) -> None:
    """Kill the process of a run alone, or its whole family, and wait for the process to end."""
    if alone:
        run.process.kill()
    else:
        kill_family(run.process.pid)  # which may reap the exit status that shows the kill
    run.process.wait()


def note_survivors(life: Life) -> float:
    """Wait until all processes of a life are gone; record survivors, and return the seconds."""
    lingered, survivors = processes.wait_for_family(within_s=GONE_WITHIN_S)
    life.leftovers += [f"process {name}" for name in survivors]
    return lingered


# ---------------------------------------------------------------- output of the runs


def logs(home: Path) -> list[Path]:
    """The output files of the runs on a state folder, and the markers of edits, in order."""
    return sorted(home.glob("output-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))


def events(*files: Path) -> list[dict[str, Any]]:
    """Parse the stage events in the output of runs, in the form of the small pipeline's events."""
    found: list[dict[str, Any]] = []
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        if started := _STARTED.match(line):
            label, action = started.groups()
            found.append({"event": "started", "label": label, "action": action})
        if done := _DONE.match(line):
            found.append({"event": "finished", "label": done[1]})
        if line == EDITED:
            found.append({"event": "edited", "label": ""})
    return found


def note_edit(home: Path) -> None:
    """Write a marker between the output files: the reward file was edited at this point."""
    (home / f"output-{len(logs(home))}.log").write_text(f"{EDITED}\n", encoding="utf-8")


def seconds(log: Path) -> dict[str, float]:
    """Label -> reported seconds of each stage that the run computed."""
    done = (_TOOK.match(line) for line in log.read_text(encoding="utf-8").splitlines())
    return {found[1]: float(found[2]) for found in done if found}


def stage(log: Path) -> str:
    """The activity of a run at the end of its output."""
    at = "starting"
    for event in events(log):
        at = event["label"] if event["event"] == "started" else "between stages"
    return at


_STARTED = re.compile(r"(\S+): (HIT|RUN|RESUME|ATTACH): ")
_TOOK = re.compile(r"(\S+): done in ([0-9.]+) s")
_DONE = re.compile(r"(\S+): (?:done in |HIT: )")
_FAILED = re.compile(r"\S+: FAILED: (\w+)$")


def _raised(log: Path) -> str:
    """The class of the error that a stage failed with."""
    return next(
        (failed[1] for line in log.read_text(encoding="utf-8").splitlines() if (failed := _FAILED.match(line))),
        "RlhfError",
    )
