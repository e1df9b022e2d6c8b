"""Reward functions behave alike whether their process is a fork of the warm parent or a fresh one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
from rlhf_core.processes import warm
from rlhf_core.rewards.batches import BatchFailed
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from tests.rlhf_core.agents.scripted import WORLDS
from tests.rlhf_core.rewards.answers import answers
from tests.support.process_state import assert_gone

FUNCTIONS = """
import builtins, ctypes, json, multiprocessing, os, random, re, resource, signal, subprocess, sys, time
import helper

COUNT = 0

def look(generations, out):
    "Write what other functions may have changed."
    global COUNT
    COUNT += 1
    with open("/proc/self/status") as status:
        umask = [line for line in status if line.startswith("Umask")]
    seen = {
        "count": COUNT, "builtin": abs(-1), "left": os.environ.get("LEFT"), "folder": os.getcwd(), "umask": umask,
        "helper": helper.VALUE, "module": hasattr(json, "left"), "modules": str(sys.modules["pickle"]), "path": sys.path,
        "signal": str(signal.getsignal(signal.SIGUSR1)), "limit": resource.getrlimit(resource.RLIMIT_DATA),
        "hash": hash("the order of sets"), "threads": len(os.listdir("/proc/self/task")),
    }
    text = json.dumps(seen)
    with open(out, "w") as stream:
        stream.write(text)
    return [random.random() for _ in generations]

def meddle(generations):
    global COUNT
    COUNT += 10
    builtins.abs = lambda number: 7
    os.environ["LEFT"] = "1"
    os.chdir("/")
    os.umask(0)
    helper.VALUE = json.left = 2
    sys.modules["pickle"] = None
    sys.path[:] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    random.seed(1)
    return [1.0 for _ in generations]

def leak(generations):
    held = [bytearray(2**24) for _ in range(64)]  # 1 GiB
    return [1.0 for _ in generations]

def pool(generations, method):
    with multiprocessing.get_context(method).Pool(2) as workers:
        return [float(sum(workers.map(abs, [-1, -2, -3]))) for _ in generations]

def hang(generations, how, out):
    if how == "in C with the interpreter lock":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if how == "in C with signals blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        ctypes.CDLL(None).pause()
    if how == "with signals ignored":
        for number in set(range(1, 65)) - {9, 19, 32, 33}:
            signal.signal(number, signal.SIG_IGN)
    if how == "with descriptors closed":
        os.closerange(0, 4096)
    if how == "detached" and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(out, "w") as stream:
                stream.write(str(os.getpid()))
        else:
            os._exit(0)
    time.sleep(600)

def strike(generations, target, number, out=""):
    "Send a signal to the guard, leaving a child in its group, or to the warm parent."
    if target == "guard":
        child = subprocess.Popen(["sleep", "600"])
        with open(out, "w") as stream:
            stream.write(str(child.pid))
    with open(f"/proc/{os.getppid()}/stat") as stat:
        parent = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(os.getppid() if target == "guard" else parent, number)
    if target == "guard":
        time.sleep(600)
    return [1.0 for _ in generations]
"""

Opened: TypeAlias = Callable[..., IsolatedReward]


@pytest.fixture
def functions(tmp_path) -> Path:
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path / "functions.py"


@pytest.fixture(params=["fork", "fresh"])
def opened(request, functions, monkeypatch) -> Iterator[Opened]:
    """Open a function of the file in a fork, and in a fresh process as on other systems; nothing is left of it."""
    if request.param == "fresh":
        monkeypatch.setattr(sys, "platform", "darwin")
    kind = {"fork": warm.WarmFork, "fresh": subprocess.Popen}[request.param]
    started: list[psutil.Process] = []

    def reward(function: str, *, timeout_s: float = 60.0, memory_bytes: int = 0, **arguments: Any) -> IsolatedReward:
        settings = WorkerSettings(arguments=arguments, memory_bytes=memory_bytes)
        found = IsolatedReward("mine", f"{functions}:{function}", timeout_s=timeout_s, settings=settings)
        assert isinstance(found._host.process, kind)
        guard = psutil.Process(found._host.process.pid)
        started.extend([guard, *guard.children()])
        assert len(started) % 2 == 0
        return found

    yield reward
    assert_gone([process.pid for process in started])


def outcome(reward: IsolatedReward) -> Any:
    """The value for one answer, or the reason of the failure; then the process is closed."""
    with reward:
        try:
            (value,) = reward(answers("a"))
        except BatchFailed as failed:
            return failed.reason
        return value


def test_nothing_that_a_function_changes_is_seen_by_the_next(opened, functions, tmp_path, monkeypatch):
    def look() -> tuple[float | None, dict[str, Any]]:
        value = outcome(opened("look", out=str(tmp_path / "seen")))
        return value, json.loads((tmp_path / "seen").read_text())

    drawn, before = look()
    assert outcome(opened("meddle", memory_bytes=2**29)) == 1.0
    redrawn, after = look()
    assert before.items() >= {"count": 1, "builtin": 1, "helper": 1, "left": None, "threads": 1}.items()
    assert after == before and drawn != redrawn
    monkeypatch.setattr(sys, "platform", "darwin")
    settings = WorkerSettings(arguments={"out": str(tmp_path / "fresh")})
    outcome(IsolatedReward("mine", f"{functions}:look", timeout_s=60.0, settings=settings))
    assert json.loads((tmp_path / "fresh").read_text()) == before


def test_a_function_that_leaks_reaches_its_own_limit_alone(opened, tmp_path):
    assert outcome(opened("leak", memory_bytes=2**28)) == "raised MemoryError"
    with opened("look", out=str(tmp_path / "seen")) as reward:
        guard = psutil.Process(reward._host.process.pid)
        assert sum(one.memory_info().rss for one in [guard, *guard.children()]) < 2**28


@pytest.mark.parametrize(
    "how",
    [
        "in C with the interpreter lock",
        "in C with signals blocked",
        "with signals ignored",
        "with descriptors closed",
        "detached",
    ],
)
def test_a_function_that_hangs_ends_at_its_deadline_with_all_that_it_started(opened, how, tmp_path):
    reason = outcome(opened("hang", timeout_s=1.0, how=how, out=str(tmp_path / "pid")))
    assert reason == "took longer than 1 s"
    if how == "detached":
        assert_gone([int((tmp_path / "pid").read_text())])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_function_may_start_a_pool(opened, method):
    assert outcome(opened("pool", method=method)) == 6.0


def test_an_edit_counts_from_the_next_start(opened, functions):
    reward = opened("meddle")
    for value in (2, 3):  # the same size, and the same time
        functions.write_text(
            f"import helper\ndef meddle(generations):\n    return [helper.VALUE + {value}.0] * len(generations)\n"
        )
        (functions.parent / "helper.py").write_text(f"VALUE = {value}\n")
        for file in functions.parent.glob("*.py"):
            os.utime(file, (1.0, 1.0))
        assert outcome(opened("meddle")) == 2.0 * value
    assert outcome(reward) == 1.0


def test_a_module_and_a_variable_that_come_later_are_found(opened, functions, monkeypatch):
    outcome(opened("meddle"))
    monkeypatch.setenv("LATER", "5")
    (functions.parent / "later.py").write_text("import os\nVALUE = float(os.environ['LATER'])\n")
    functions.write_text("import later\ndef get(generations):\n    return [later.VALUE for _ in generations]\n")
    assert outcome(opened("get")) == 5.0


def test_a_function_that_kills_its_guard_fails_alone_and_its_group_ends(opened, tmp_path):
    striking = opened("strike", target="guard", number=9, out=str(tmp_path / "pid"))
    assert outcome(striking) == "ended with status -9"
    assert_gone([int((tmp_path / "pid").read_text())])
    assert outcome(opened("meddle")) == 1.0


# ---------------------------------------------------------------- the warm parent


def warm_parent() -> warm._Parent:
    return warm._current[0][1]


@pytest.mark.parametrize("number", [9, 19])
def test_a_function_that_kills_or_stops_the_warm_parent_harms_no_other(functions, number):
    settings = WorkerSettings(arguments={"target": "parent", "number": number})
    with IsolatedReward("other", f"{functions}:meddle", timeout_s=60.0) as other:
        struck = warm_parent()
        struck._connection.settimeout(0.5)
        with IsolatedReward("mine", f"{functions}:strike", timeout_s=60.0, settings=settings) as reward:
            assert reward(answers("a")) == [1.0]
        assert outcome(IsolatedReward("next", f"{functions}:meddle", timeout_s=60.0)) == 1.0
        assert warm_parent() is not struck and other(answers("a")) == [1.0]
        pid = other._host.process.pid
    assert_gone([pid, struck._process.pid])


def test_environments_and_reward_functions_are_forks_of_one_parent_without_large_libraries(functions):
    with (
        IsolatedReward("mine", f"{functions}:meddle", timeout_s=60.0) as reward,
        Environments(EnvironmentAgent(environment=f"{WORLDS}:Echo"), tokenizer="") as environments,
    ):
        found = [reward._host.process, environments._children[0]._host.process]
        assert [type(process) for process in found] == [warm.WarmFork, warm.WarmFork]
        assert {psutil.Process(process.pid).ppid() for process in found} == {warm_parent()._process.pid}
        maps = Path(f"/proc/{warm_parent()._process.pid}/maps").read_text()
        assert "pydantic_core" in maps and not [name for name in ("numpy", "torch", "cuda") if name in maps]
