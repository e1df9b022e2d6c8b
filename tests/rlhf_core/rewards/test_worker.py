"""The child process on its own: its protocol over the pipes."""

from __future__ import annotations

import io
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.isolation import WorkerSettings
from rlhf_core.types import Completion, Generation, Message, Prompt


def answers(function: str, *requests: list[Generation]) -> list[tuple[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_core.rewards.isolation", function],
        input=b"".join(pickle.dumps([request]) for request in requests),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    stream, found = io.BytesIO(done.stdout), []
    while stream.tell() < len(done.stdout):
        found.append(pickle.load(stream))
    return found


def test_it_answers_each_request_and_ends_with_the_input() -> None:
    prompt = Prompt("p", (Message("user", "1+1?"),), "2", "test")
    right = Generation(prompt, (1,), Completion((2,), (-1.0,), "2", "stop", 0, 0))
    found = answers("rlhf_core.rewards.verifiable:exact_match", [right], [])
    assert found == [("ready", False), ("outcomes", [RewardOutcome((1.0,))]), ("outcomes", [RewardOutcome(())])]


def test_infinite_arguments_reach_it() -> None:
    sent = WorkerSettings(arguments={"most": math.inf})
    assert WorkerSettings.model_validate_json(sent.model_dump_json()) == sent


HANGING = """
import re, subprocess, sys

def for_ever(generations):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open("{started}", "w").close()
    re.match(r"(a+)+$", "a" * 40 + "b")   # holds the interpreter lock for hours
"""

PARENT = """
import sys
from rlhf_core.rewards.isolation import IsolatedReward
from rlhf_core.types import Completion, Generation, Message, Prompt
answer = Generation(Prompt("p", (Message("user", "hi"),), "", "test"), (1,), Completion((2,), (-1.0,), "", "stop", 0, 0))
with IsolatedReward("slow", sys.argv[1], timeout_s=600) as reward:
    print(reward._host.process.pid, flush=True)
    reward([answer])
"""


def test_a_function_that_hangs_dies_with_the_run_that_was_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    file = tmp_path / "slow.py"
    file.write_text(HANGING.format(started=started))
    run = subprocess.Popen([sys.executable, "-c", PARENT, f"{file}:for_ever"], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = psutil.Process(int(run.stdout.readline()))
    deadline = time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < deadline and child.is_running()
        time.sleep(0.05)
    family = [child, *child.children(recursive=True)]
    assert len(family) == 3  # with its guard, and what the function started
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    run.stdout.close()


def test_it_refuses_a_function_that_is_not_there() -> None:
    ((kind, message),) = answers("rlhf_core.rewards.verifiable:nothing")
    assert kind == "refused"
    assert message.startswith("function = 'rlhf_core.rewards.verifiable:nothing'")
