"""Reward functions in a process of their own: whatever they do must be named, and harm neither the run nor other answers."""

import io
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from rlhf_contrib.sandbox.local import find_isolation
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.batches import BatchedReward, BatchFailed, RewardOutcome
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.rewards.terms import open_elsewhere
from rlhf_core.types import Generation
from tests.rlhf_core.rewards.answers import answer, answers

MOODS = """
import asyncio, ctypes, os, re, subprocess, sys, time

CHILDREN = []
arrived = asyncio.Barrier(3)

class Strange:
    def __reduce__(self):
        return int, ("no number",)

def by_mood(prompts, completions, labels, **columns):
    for text in completions:
        if text == "hang":
            re.match(r"(a+)+$", "a" * 40 + "b")   # for hours, and holds the interpreter lock
        if text == "slow":
            time.sleep(60)
        if text == "fork":
            os.fork()                             # the child keeps the pipe of the answers open
            time.sleep(60)
        if text == "exit":
            os._exit(3)
        if text == "segfault":
            ctypes.string_at(0)
        if text == "leave":
            sys.exit(0)
        if text == "raise":
            raise KeyError("no such thing")
        if text == "hog":
            held = bytearray(4 * 2**30)
        if text == "strange":                     # the next answer cannot be made again by whoever reads it
            sys.modules["__main__"]._answer = lambda *_: ("outcomes", Strange())
        if text == "child":
            CHILDREN.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
            time.sleep(60)
        if text == "print":
            os.write(1, b"\\x80\\x04garbage" * 10_000)
            print("x" * 100_000)
            sys.stdin.read()
    wrong = {"nan": float("nan"), "inf": float("-inf"), "huge": 1e38, "none": None}
    scores = [wrong[text] if text in wrong else float(len(text)) for text in completions]
    return scores[:-1] if "short" in completions else scores

async def meeting(completions, labels):
    await arrived.wait()
    return [float(len(text)) for text in completions]

def by_unit(completions, unit, **kwargs):
    return [len(text) * unit for text in completions]

def secretive(completions, key, **kwargs):
    from rlhf_contrib.sandbox.local import Limits, run_program
    if "raise" in str(completions[0]):
        raise RuntimeError(f"refused: {key}")
    seen = run_program("import os; print(dict(os.environ))", limits=Limits())
    assert seen.outcome == "finished", seen
    return [float(len(key)), float(key in seen.stdout or "FAR_KEY" in seen.stdout)]

def for_ever(generations):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(__file__ + ".started", "w").close()
    re.match(r"(a+)+$", "a" * 40 + "b")
"""

Opened: TypeAlias = Callable[..., BatchedReward]


@pytest.fixture(scope="module")
def moods(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("moods") / "moods.py"
    file.write_text(MOODS)
    return str(file)


@pytest.fixture(scope="module")
def opened(moods: str) -> Iterator[Opened]:
    """Open `by_mood` with some settings, once for all tests with these."""
    found: dict[str, BatchedReward] = {}
    with ExitStack() as leases:

        def reward(**settings: Any) -> BatchedReward:
            given = {"function": f"{moods}:by_mood", "timeout_s": 60.0, "memory_mb": 512} | settings
            if str(settings) not in found:
                spec = FunctionReward.model_validate(given)
                found[str(settings)] = open_elsewhere("mood", spec, Path(moods).parent / "work", leases)
            return found[str(settings)]

        yield reward


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("exit", "ended with status 3"),
        ("segfault", "ended with status -11"),
        ("leave", "ended with status 0"),
        ("raise", "raised KeyError: 'no such thing'"),
        ("hog", "raised MemoryError"),
        ("nan", "returned nan: must be finite and within +-1e+06"),
        ("inf", "returned -inf: must be finite and within +-1e+06"),
        ("huge", "returned 1e+38: must be finite and within +-1e+06"),
    ],
)
def test_a_fault_is_found_and_named_and_costs_no_other_answer(opened, mood, reason):
    outcome = opened(on_failure="invalid")(answers("good", mood))
    assert (outcome.values, outcome.failures) == ((4.0, None), {1: reason})


@pytest.mark.parametrize("mood", ["hang", "slow", "child", "fork"])
def test_what_does_not_end_is_found_in_time_and_costs_no_other_answer(opened, mood):
    began = time.monotonic()
    outcome = opened(on_failure="invalid", timeout_s=2.0)(answers("good", mood))
    assert (outcome.values, outcome.failures) == ((4.0, None), {1: "took longer than 2 s"})
    assert time.monotonic() - began < 30  # two deadlines of 2 s, and starts on a busy machine


def test_what_it_prints_or_reads_and_what_does_not_apply_are_no_faults(opened):
    assert opened(on_failure="invalid")(answers("print", "none")) == RewardOutcome((5.0, None))
    large = answers(*["y" * 500] * 2000)  # more than a pipe holds
    assert opened(on_failure="invalid")(large).values == (500.0,) * 2000


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("exit", r"rewards\.mood = 'prompts p0 to p1'.*ended with status 3"),
        ("raise", r"(?s)rewards\.mood = 'prompts p0 to p1'.*Traceback.*KeyError: 'no such thing'"),
        ("nan", r"rewards\.mood\[prompt p1\] = nan"),
        ("short", r"rewards\.mood = 1: values for 2 generations"),
    ],
)
def test_where_a_failure_ends_the_stage_the_error_names_the_reward_and_the_prompts(opened, mood, message):
    with pytest.raises(RewardError, match=message):
        opened(on_failure="fail")(answers("good", mood))


def test_an_answer_that_cannot_be_read_is_reported_and_survived(moods):
    with IsolatedReward("mood", f"{moods}:by_mood", timeout_s=60.0) as reward:
        reward(answers("strange"))
        with pytest.raises(BatchFailed, match="returned a value that cannot be read") as failed:
            reward(answers("next"))
        assert failed.value.reason.startswith("answer cannot be read: ValueError")
        assert reward(answers("next")) == [4.0]  # a fresh process
        with pytest.raises(BatchFailed) as short:
            reward(answers("a", "short"))
        assert not short.value.divisible  # it is unknown which value is missing
        assert reward([]) == []


def test_arguments_and_protocol_reach_the_process(moods):
    settings = WorkerSettings(arguments={"unit": 2.5}, protocol="trl_text")
    with IsolatedReward("unit", f"{moods}:by_unit", timeout_s=60.0, settings=settings) as limited:
        assert limited(answers("aa")) == [5.0]
    sent = WorkerSettings(arguments={"most": math.inf})
    assert WorkerSettings.model_validate_json(sent.model_dump_json()) == sent


def test_the_batches_of_an_async_function_are_under_way_together(moods):
    with IsolatedReward("meeting", f"{moods}:meeting", timeout_s=60.0, batch_size=1) as meeting:
        assert meeting.is_async
        for _ in range(2):  # on the same loop
            assert meeting(answers("a", "bb", "ccc")) == [1.0, 2.0, 3.0]  # each waits until all three have come


def test_the_function_alone_has_the_secret_not_its_command_line_its_errors_or_the_sandbox(moods, monkeypatch):
    try:
        find_isolation(False)
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FAR_KEY", "a-secret-of-14")
    settings = WorkerSettings(arguments={"key": "env:FAR_KEY"})
    with IsolatedReward("mine", f"{moods}:secretive", timeout_s=60.0, settings=settings) as reward:
        command = Path(f"/proc/{reward._host.process.pid}/cmdline").read_bytes()
        assert b"env:FAR_KEY" in command and b"a-secret" not in command
        assert reward(answers("a", "b")) == [14.0, 0.0]
        with pytest.raises(BatchFailed, match=r"refused: \*\*\*") as caught:
            reward(answers("raise"))
        assert "a-secret" not in caught.value.reason and caught.value.reason.endswith("refused: ***")
    monkeypatch.delenv("FAR_KEY")
    with pytest.raises(ConfigError, match=r"^rewards\.mine\.arguments\.key = 'env:FAR_KEY': FAR_KEY is not set"):
        IsolatedReward("mine", f"{moods}:secretive", timeout_s=60.0, settings=settings)


# ---------------------------------------------------------------- the process


def replies(function: str, *requests: list[Generation]) -> list[tuple[str, Any]]:
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


def test_it_answers_each_request_and_ends_with_the_input():
    found = replies("rlhf_core.rewards.verifiable:exact_match", [answer("2", label="2")], [])
    assert found == [("ready", False), ("outcomes", [RewardOutcome((1.0,))]), ("outcomes", [RewardOutcome(())])]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("rlhf_core.rewards.verifiable:exact_mtch", {}, r"rewards\.mood\.function = .*did you mean exact_match"),
        ("{moods}:for_ever", {"x": 1}, r"rewards\.mood\.arguments\.x = 1: is not a parameter"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_answer(moods, function, arguments, message):
    settings = WorkerSettings(arguments=arguments)
    with pytest.raises(ConfigError, match=message):
        IsolatedReward("mood", function.format(moods=moods), timeout_s=60.0, settings=settings)


def test_no_process_is_left_over(moods, tmp_path):
    with IsolatedReward("mood", f"{moods}:by_mood", timeout_s=60.0):
        pass  # the warm parent stays
    before = set(psutil.Process().children(recursive=True))
    given = {"function": f"{moods}:by_mood", "on_failure": "invalid", "workers": 2, "timeout_s": 4.0, "batch_size": 1}
    with ExitStack() as leases:
        reward = open_elsewhere("mood", FunctionReward.model_validate(given), tmp_path, leases)
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 4  # two workers, each with its guard
        assert reward(answers("good", "child", "x")).failures.keys() == {1}
        started |= set(psutil.Process().children(recursive=True)) - before
    assert_gone(list(started))


PARENT = """
import sys
from rlhf_core.rewards.isolation import IsolatedReward
from tests.rlhf_core.rewards.answers import answers
with IsolatedReward("slow", sys.argv[1], timeout_s=600) as reward:
    print(reward._host.process.pid, flush=True)
    reward(answers(""))
"""


def test_a_function_that_hangs_dies_with_the_run_that_was_killed(moods):
    run = subprocess.Popen([sys.executable, "-c", PARENT, f"{moods}:for_ever"], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(run.stdout.readline()))
    deadline = time.monotonic() + 30
    while not Path(f"{moods}.started").exists():
        assert time.monotonic() < deadline and child.is_running()
        time.sleep(0.05)
    family = [child, *child.children(recursive=True)]
    assert len(family) == 3  # with its guard, and what the function started
    run.kill()
    run.wait()
    assert_gone(family)
    run.stdout.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


SPAWNS = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from spawned_helper import length

@dataclass
class Text:
    content: str

def one(text): return length(text.content)
def put(queue, text): queue.put(one(text))
def pool(completions, **kw):
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as workers:
        return list(workers.map(one, map(Text, completions)))
def process(completions, **kw):
    context = mp.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=put, args=(queue, Text(completions[0])))
    child.start()
    value = queue.get(timeout=60)
    child.join()
    return [value]
def forkserver(completions, **kw):
    with mp.get_context("forkserver").Pool(1) as workers:
        return workers.map(one, map(Text, completions))
def loky(completions, **kw):
    from joblib import Parallel, delayed
    return Parallel(n_jobs=2)(delayed(one)(Text(text)) for text in completions)
"""


@pytest.mark.parametrize("name", ["pool", "process", "forkserver", "loky"])
def test_a_function_may_spawn_processes_that_run_its_own_file(tmp_path, name):
    if name == "loky":
        pytest.importorskip("joblib")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "spawned_helper.py").write_text("def length(text): return float(len(text))\n")
    with IsolatedReward("r", f"{tmp_path / 'spawns.py'}:{name}", timeout_s=90.0) as reward:
        assert reward([answer("abc")]) == [3.0]
