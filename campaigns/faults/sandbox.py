"""Cause faults of programs in the sandbox, and of the sandbox itself, through the reward that runs programs of answers.

A program that hits a limit has failed its tests: 0 is its correct reward. A program that the sandbox could not run gets
no reward.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.leftovers import end_with_the_run, watched
from campaigns.faults.scored import groups, left_out, opened
from rlhf_contrib.sandbox.code import read_tests
from rlhf_contrib.sandbox.local import GRACE_S, LAUNCHER, Limits, find_isolation, run_tests
from rlhf_core.config.rewards import FunctionReward

TIMEOUT_S = 3.0
MEMORY_MB = 256
START_S = 20.0
DEADLINE_S = TIMEOUT_S + GRACE_S + START_S
"""Seconds for a program, for starting and ending its sandbox, and for starting its function on a busy machine."""

LABEL = '{"inputs": [""], "outputs": ["good"]}'
GOOD = 'print("good")'

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
EATS_MEMORY = """
kept = []
while True:
    kept.append(bytearray(10**7))
"""
FORKS_EATERS = """
import os, time
for _ in range(3):
    os.fork()
kept = bytearray(b"x" * 10**8)
time.sleep(600)
"""
CLOSES_ITS_PIPES = """
import os, time
os.close(1)
os.close(2)
if os.fork() == 0:
    os.setsid()
time.sleep(600)
"""
LEAVES_A_CHILD = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("good")
"""
KILLS_ALL = """
import os, signal
for kill in (lambda: os.killpg(0, signal.SIGKILL), lambda: os.kill(-1, signal.SIGKILL), lambda: os.kill(os.getppid(), 9)):
    try:
        kill()
    except OSError:
        pass
print("good")
"""
OUTSIDE = ("/usr/rlhf-fault", "/etc/rlhf-fault", "/dev/shm/rlhf-fault", "/var/tmp/rlhf-fault")
WRITES_OUTSIDE = """
for path in {paths}:
    try:
        open(path, "w").write("x")
    except OSError:
        pass
print("good")
"""
TRIES_THE_NETWORK = """
import socket
reached = []
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        reached.append(socket.create_connection(address, 1))
    except OSError:
        pass
print(reached or "good")
"""
WAITS_WITH_THREADS = """
import threading, time
for _ in range(2):
    threading.Thread(target=time.sleep, args=(4,)).start()
time.sleep(2)
print("good")
"""
SLEEPS = "import time\ntime.sleep(600)"

RUN = """
import sys
from pathlib import Path
from campaigns.faults.sandbox import GOOD, LABEL, SLEEPS, function
from campaigns.faults.scored import groups, opened
with opened(function(program_s=600), Path(sys.argv[1])) as scorer:
    scorer(groups(GOOD, label=LABEL))
    print("up", flush=True)
    scorer(groups(SLEEPS, label=LABEL))
"""


@dataclass(frozen=True)
class Program:
    """A program that misbehaves, the outcomes that the sandbox may report for it, and its expected reward."""

    text: str
    outcomes: tuple[str, ...]
    reward: float = 0.0


PROGRAMS = {
    "loops for ever": Program("while True: pass", ("timeout",)),
    "is a fork bomb": Program(FORK_BOMB, ("timeout", "memory")),
    "eats memory": Program(EATS_MEMORY, ("memory",)),
    "eats memory in 8 processes": Program(FORKS_EATERS, ("memory",)),
    "prints 100 MB": Program('print("x" * 10**8)', ("output",)),
    "prints without end": Program('while True: print("x" * 1000)', ("output",)),
    "sleeps after closing its pipes": Program(CLOSES_ITS_PIPES, ("timeout",)),
    "kills its process group and all that it can": Program(KILLS_ALL, ("passed",), reward=1.0),
    "leaves a child in a session of its own": Program(LEAVES_A_CHILD, ("passed",), reward=1.0),
}


def function(*, program_s: float = TIMEOUT_S, function_s: float = 120.0) -> FunctionReward:
    """The reward term that runs programs, each in a separate batch."""
    return FunctionReward(
        function="rlhf_contrib.sandbox.code:code_reward",
        arguments={"timeout_s": program_s, "memory_mb": MEMORY_MB},
        timeout_s=function_s,
        batch_size=1,
        on_failure="invalid",
    )


def _contained(program: Program, folder: Path) -> Outcome:
    """Score the program together with good ones: it must get its expected reward, and the good ones 1."""
    find_isolation(False)
    with watched() as watch:
        began = time.monotonic()
        limits = Limits(timeout_s=TIMEOUT_S, memory_mb=MEMORY_MB)
        verdict = run_tests(program.text, read_tests(LABEL), limits=limits)
        noticed = time.monotonic() - began
        with opened(function(), folder) as scorer:
            began = time.monotonic()
            rollouts = scorer(groups(program.text, GOOD, GOOD, GOOD, label=LABEL))
            took = time.monotonic() - began
        left = watch.left()
    rewards = [one.reward for one in rollouts]
    if verdict.outcome in program.outcomes and rewards == [program.reward, 1.0, 1.0, 1.0] and not left:
        said = f"{verdict.outcome}; it earns {program.reward:g}, the programs beside it 1; no process is left"
        return Outcome("recovered", noticed, took, said)
    return Outcome("not handled", noticed, None, f"{verdict}, {rewards}, {len(left)} processes are left")


def _writes_outside(folder: Path) -> Outcome:
    folder.chmod(0o777)
    paths = [str(folder / "rlhf-fault"), *OUTSIDE]
    outcome = _contained(Program(WRITES_OUTSIDE.format(paths=paths), ("passed",), reward=1.0), folder)
    found = [path for path in paths if Path(path).exists()]
    return Outcome("not handled", None, None, f"it wrote {found}") if found else outcome


def _tries_the_network(folder: Path) -> Outcome:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = Program(TRIES_THE_NETWORK.format(port=server.getsockname()[1]), ("passed",), reward=1.0)
        return _contained(program, folder)


def _launcher_is_killed(folder: Path) -> Outcome:
    """Kill the sandbox of one answer on every start: it must have no reward, although its program would pass."""
    answers = groups(WAITS_WITH_THREADS, GOOD, GOOD, GOOD, label=LABEL)
    with _killing_launchers():
        return left_out(function(program_s=20.0), folder, answers, _one, named="its launcher ended without an answer")


def _deadline_of_the_function(folder: Path) -> Outcome:
    """Kill the function while a program runs: the program must end, too, and its answer has no reward."""
    answers = groups(SLEEPS, GOOD, GOOD, GOOD, label=LABEL)
    return left_out(function(program_s=600.0, function_s=10.0), folder, answers, _one, named="took longer than 10 s")


def _run_is_killed(folder: Path) -> Outcome:
    return end_with_the_run(RUN, str(folder))


def _one(_: str) -> float:
    return 1.0


@contextmanager
def _killing_launchers() -> Iterator[None]:
    """Kill the launcher of every program that has threads."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[-1:] == ["main.py"] and process.num_threads() > 1:
                        launcher = process.parent()
                        if launcher is not None and str(LAUNCHER) in launcher.cmdline():
                            launcher.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


FAULTS: list[Fault] = [
    *(Fault(f"sandbox: a program {name}", DEADLINE_S, partial(_contained, one)) for name, one in PROGRAMS.items()),
    Fault("sandbox: a program writes outside", DEADLINE_S, _writes_outside),
    Fault("sandbox: a program tries the network", DEADLINE_S, _tries_the_network),
    Fault("sandbox: its launcher is killed", DEADLINE_S, _launcher_is_killed),
    Fault("sandbox: the deadline of the function passes meanwhile", DEADLINE_S, _deadline_of_the_function),
    Fault("run killed while a program is in the sandbox", START_S, _run_is_killed),
]
