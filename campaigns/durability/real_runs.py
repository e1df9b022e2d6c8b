"""Run the `rlhf` command once with the real engines, and the twin with which all such runs are compared."""

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
"""Two of Ray's agents ask its dead head for 60 s before they end themselves, and for longer on a busy machine."""
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
    """So many seconds after the stage `label` has begun; if there is none, after the run was started."""

    label: str
    after_s: float

    def __str__(self) -> str:
        return f"{self.after_s:.1f} s after {self.label or 'the start'}"


@dataclass(frozen=True)
class RealPeace:
    """What the run in peace gave, in which folder all lives are, and the seed of what is done to them.

    `stages` are the seconds that each stage took.
    """

    folder: Path
    seed: int
    seconds: float
    stages: Mapping[str, float]
    results: Mapping[str, StageResult]

    @cached_property
    def edited(self) -> Mapping[str, StageResult]:
        """The results with the edited reward file, of a run in peace when they are first asked for.

        It has a state folder of its own: where a policy was published before, the next one is version 2.
        """
        twin = new_home(self.folder / "edited")
        edits.edit(twin / REWARD.name, "result")
        in_peace(twin)
        return checks.results(twin)

    def draws(self, kind: str, number: int) -> random.Random:
        """Return the source of all that is drawn for one life."""
        return random.Random(f"{self.seed}/real/{kind}/{number}")

    def moment(self, source: random.Random, *, reach: float) -> Moment:
        """Return a moment in the first `reach` of a run; half of them in a drawn stage, however short it is."""
        if source.random() < 0.5:
            return Moment("", source.uniform(0.0, reach) * self.seconds)
        labels = list(self.stages)
        return self.moment_in(labels[int(source.uniform(0.0, reach) * len(labels))], source)

    def moment_in(self, label: str, source: random.Random) -> Moment:
        """Return a moment while a stage runs."""
        return Moment(label, source.random() * self.stages[label])


@dataclass(frozen=True)
class Run:
    """A run of the command that was started, and the file of what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def words(self) -> str:
        """Return the error that it ended with, `Class: message` as in process; "" if it completed."""
        if self.process.returncode == 0:
            return ""
        last = next(reversed([line for line in self.log.read_text(encoding="utf-8").splitlines() if line.strip()]), "")
        return f"{_raised(self.log) if self.process.returncode == EXIT_REFUSED else 'Error'}: {last}"

    def works(self) -> bool:
        """Say whether it computes a stage: what it does is its own work then, and not another's that it waits for."""
        return any(event["event"] == "started" and event["action"] in ("RUN", "RESUME") for event in events(self.log))


def new_home(home: Path) -> Path:
    """Return a new state folder with the user's reward file and a profile that names it."""
    home.mkdir(parents=True)
    shutil.copy(REWARD, home)
    profile = SHRUNKEN.format(full=find_profile("tiny/full").resolve(), reward=home / REWARD.name)
    (home / PROFILE).write_text(profile, encoding="utf-8")
    return home


def start(
    home: Path, believed: Skew | None = None, *, verb: str = "run", variables: Mapping[str, str] | None = None
) -> Run:
    """Start `rlhf run` on the profile of `home`, or another verb; `believed` says what it takes for its machine and time.

    `variables` of the environment are those of this process, and these.
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
    """Wait for a run; return how it ended. One that hangs is killed with its family."""
    try:
        status = run.process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_family(run.process.pid)
        run.process.wait()
        return "hung"
    return "completed" if status == 0 else "failed"


def in_peace(home: Path) -> float:
    """Run the profile of `home` to its end; return the seconds. SystemExit if it does not complete."""
    began, run = time.monotonic(), start(home)
    if finish(run) != "completed":
        raise SystemExit(f"a run in peace failed; read {run.log}")
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool], run: Run, seconds: float) -> None:
    """Wait until the condition holds, the run has ended, or the seconds are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition() and run.process.poll() is None:
        time.sleep(0.1)


def reach(run: Run, moment: Moment) -> bool:
    """Wait for a moment of a run; return whether it lives then."""
    if moment.label:
        wait_until(lambda: moment.label in (event["label"] for event in events(run.log)), run, LIMIT_S)
    wait_until(lambda: False, run, moment.after_s)
    return run.process.poll() is None


def killed(life: Life, run: Run, moment: Moment, *, alone: bool, kind: str = "") -> processes.End:
    """Kill a run at a moment, its family or its own process alone; note it in `life`, and what lingers."""
    lives = reach(run, moment)
    if lives:
        _kill(run, alone=alone)
    how: processes.End = "killed" if lives else finish(run)
    lingered = note_survivors(life)
    if lives:
        kind = kind or ("the process of the command alone" if alone else "the whole family at once")
        life.kills.append(Kill(kind, stage(run.log), str(moment), lingered))
        print(f"{life.name}: killed {kind}, {moment}, all gone {lingered:.1f} s later", flush=True)
    return how


def _kill(run: Run, *, alone: bool) -> None:
    if alone:
        run.process.kill()
    else:
        kill_family(run.process.pid)  # which may take the status that tells of the kill
    run.process.wait()


def note_survivors(life: Life) -> float:
    """Wait for all processes of a life to be gone; note those that stay, and return the seconds."""
    lingered, survivors = processes.wait_for_family(within_s=GONE_WITHIN_S)
    life.leftovers += [f"process {name}" for name in survivors]
    return lingered


# ---------------------------------------------------------------- what the runs said


def logs(home: Path) -> list[Path]:
    """Return what the runs on a state folder said, and where it was edited, in their order."""
    return sorted(home.glob("output-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))


def events(*files: Path) -> list[dict[str, Any]]:
    """Return what the runs say of their stages, in the form of the small pipeline's events."""
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
    """Write between what the runs said that the reward file was edited now."""
    (home / f"output-{len(logs(home))}.log").write_text(f"{EDITED}\n", encoding="utf-8")


def seconds(log: Path) -> dict[str, float]:
    """Return how long each stage took that the run computed, by its own account."""
    done = (_TOOK.match(line) for line in log.read_text(encoding="utf-8").splitlines())
    return {found[1]: float(found[2]) for found in done if found}


def stage(log: Path) -> str:
    """Return what a run was doing when it said its last word."""
    at = "starting"
    for event in events(log):
        at = event["label"] if event["event"] == "started" else "between stages"
    return at


_STARTED = re.compile(r"(\S+): (HIT|RUN|RESUME|ATTACH): ")
_TOOK = re.compile(r"(\S+): done in ([0-9.]+) s")
_DONE = re.compile(r"(\S+): (?:done in |HIT: )")
_FAILED = re.compile(r"\S+: FAILED: (\w+)$")


def _raised(log: Path) -> str:
    """Return the class of the error that a stage failed with."""
    return next(
        (failed[1] for line in log.read_text(encoding="utf-8").splitlines() if (failed := _FAILED.match(line))),
        "RlhfError",
    )
