"""Faults of reward functions, each in its own process as in a run; a sample that could not be scored is never scored 0."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks.faults.fault import Fault, Outcome
from rlhf_core.errors import RewardError
from rlhf_core.rewards.isolation import IsolatedReward
from rlhf_core.rewards.outcomes import checked
from rlhf_core.types import Completion, Generation, Message, Prompt

TIMEOUT_S = 5.0
START_S = 20.0
"""For a process that starts on a busy machine; what a fault costs comes on top."""

REWARD = """
import os, re, sys, time

def by_mood(generations):
    mood = generations[0].completion.text
    scores = [float(len(g.completion.text)) for g in generations]
    if mood == "raises":
        raise KeyError("no such thing")
    if mood == "hangs":
        re.match(r"(a+)+$", "a" * 40 + "b")   # for hours, and holds the interpreter lock
    if mood == "dies":
        os._exit(3)
    if mood == "kills itself with its children":
        os.fork()
        os.kill(os.getpid(), 9)
    if mood == "prints garbage":
        os.write(1, b"\\x80\\x04garbage" * 10_000)
        print("x" * 100_000)
    wrong = {"returns NaN": [float("nan")], "returns infinity": [float("-inf")], "returns 1e38": [1e38],
             "returns text": ["good"], "returns None": [None], "returns too few": [], "returns too many": [0.0, 0.0]}
    return wrong[mood] + scores[1:] if mood in wrong else scores
"""

PARENT = """
import sys
from benchmarks.faults.rewards import generation
from rlhf_core.rewards.isolation import IsolatedReward
with IsolatedReward("mood", sys.argv[1], timeout_s=600) as reward:
    print(reward._process.pid, flush=True)
    reward([generation("p0", "hangs")])
"""

ERRORS = (
    *("raises", "hangs", "dies", "kills itself with its children", "returns NaN", "returns infinity", "returns 1e38"),
    *("returns text", "returns None", "returns too few", "returns too many"),
)


def generation(prompt_id: str, text: str) -> Generation:
    """Return an answer `text` to a prompt."""
    prompt = Prompt(prompt_id, (Message("user", "hi"),), "", "faults")
    return Generation(prompt, (1,), Completion((2,), (-1.0,), text, "stop", 0, 0))


def _function(folder: Path) -> str:
    file = folder / "by_mood.py"
    file.write_text(REWARD)
    return f"{file}:by_mood"


def _one_error(mood: str, folder: Path) -> Outcome:
    """Score a batch that makes the function misbehave, and then a good one."""
    with IsolatedReward("mood", _function(folder), timeout_s=TIMEOUT_S) as reward:
        began = time.monotonic()
        said = ""
        try:
            batch = [generation("p0", mood), generation("p1", "x")]
            checked("mood", reward(batch), batch)
        except RewardError as error:
            said = str(error)
        noticed = time.monotonic()
        names = "rewards.mood" in said and ("p0" in said or "generations" in said)
        good = reward([generation("p2", "four")]) == [4.0]
        recovered = time.monotonic()
        family = _family(reward)
    if not (names and good) or _alive(family):
        return Outcome("not handled", noticed - began, None, said or "it was scored")
    return Outcome("one error", noticed - began, recovered - noticed, said)


def _garbage(folder: Path) -> Outcome:
    with IsolatedReward("mood", _function(folder), timeout_s=TIMEOUT_S) as reward:
        mood = "prints garbage"
        began = time.monotonic()
        right = reward([generation("p0", mood)]) == [float(len(mood))]
        took = time.monotonic() - began
    said = "scored right; what it printed went to standard error"
    return Outcome("recovered", None, took, said) if right else Outcome("not handled", None, took, "scored wrong")


def _run_is_killed(folder: Path) -> Outcome:
    """Kill the run while its reward function hangs: its process must go too."""
    command = [sys.executable, "-c", PARENT, _function(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
        while child.cpu_times().user + child.cpu_times().system < 0.5 or child.num_threads() == 0:
            time.sleep(0.1)
        time.sleep(1)  # into the expression
        family = [child, *child.children(recursive=True)]
        run.kill()
        began = time.monotonic()
        run.wait()
        alive = _alive(family)
        took = time.monotonic() - began
        for process in alive:
            process.kill()
    if alive:
        return Outcome("not handled", None, None, f"{len(alive)} processes of the reward are left over")
    return Outcome("recovered", took, 0.0, "the process of the reward ended with the run")


def _family(reward: IsolatedReward) -> list[psutil.Process]:
    process = psutil.Process(reward._process.pid)
    return [process, *process.children(recursive=True)]


def _alive(family: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(family, timeout=10)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


FAULTS: list[Fault] = [
    *(Fault(f"reward function {mood}", TIMEOUT_S + START_S, partial(_one_error, mood)) for mood in ERRORS),
    Fault("reward function prints garbage", TIMEOUT_S + START_S, _garbage),
    Fault("run killed while a reward function hangs", START_S, _run_is_killed),
]
