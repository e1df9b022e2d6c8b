"""Reward functions in a process of their own: hostile ones must not harm the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.batches import BatchFailed
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.rewards.sandbox.local import find_isolation
from rlhf_core.types import Completion, Generation, Message, Prompt

HOSTILE = """
import os, re, sys, time

class Strange:
    def __reduce__(self):
        return int, ("no number",)

def by_mood(generations):
    mood = generations[0].completion.text
    if mood == "hang":
        re.match(r"(a+)+$", "a" * 40 + "b")   # backtracks for hours and holds the interpreter lock
    if mood == "fork":
        os.fork()                             # the child keeps the pipe of the answers open
        time.sleep(60)
    if mood == "crash":
        os._exit(3)
    if mood == "raise":
        raise KeyError("no such thing")
    if mood == "strange":                     # the next answer cannot be made again by whoever reads it
        sys.modules["__main__"]._answer = lambda *_: ("outcomes", Strange())
    if mood == "chatter":
        print("x" * 100_000)
        sys.stdin.read()
    return [len(g.completion.text) for g in generations]
"""


LIMITED = """
def limited(completions, unit, **kwargs):
    if completions[0] == "hog":
        held = [bytearray(64 * 2**20) for _ in range(64)]   # 4 GiB
    return [len(text) * unit for text in completions]
"""

MEETING = """
import asyncio

arrived = asyncio.Barrier(3)

async def meeting(completions, labels):
    await arrived.wait()
    return [float(len(text)) for text in completions]
"""


def batch(*texts: str) -> list[Generation]:
    return [
        Generation(
            Prompt(f"p{index}", (Message("user", "hi"),), "", "test"),
            (1,),
            Completion((2,), (-1.0,), text, "stop", 0, 0),
        )
        for index, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedReward]:
    file: Path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    file.write_text(HOSTILE)
    with IsolatedReward("mood", f"{file}:by_mood", timeout_s=2.0) as isolated:
        yield isolated


def test_scores_come_back_in_order(reward: IsolatedReward) -> None:
    assert reward(batch("aaa", "a", "aa")) == [3.0, 1.0, 2.0]
    assert reward([]) == []


def test_what_a_function_prints_or_reads_does_not_disturb_the_answers(reward: IsolatedReward) -> None:
    assert reward(batch("chatter")) == [7.0]


def test_an_exception_is_reported_with_its_traceback_and_prompts(reward: IsolatedReward) -> None:
    with pytest.raises(RewardError, match=r"(?s)rewards\.mood = 'prompts p0 to p1'.*no such thing"):
        reward(batch("raise", "x"))
    assert reward(batch("next")) == [4.0]


def test_a_function_that_holds_the_interpreter_for_ever_is_killed_at_the_deadline(reward: IsolatedReward) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 2 s"):
        reward(batch("hang"))
    assert time.monotonic() - start < 20
    assert reward(batch("next")) == [4.0]  # a fresh process


def test_a_child_of_the_function_does_not_outlive_the_deadline(reward: IsolatedReward) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 2 s"):
        reward(batch("fork"))
    assert time.monotonic() - start < 20
    assert reward(batch("next")) == [4.0]


def test_a_crash_is_reported_and_survived(reward: IsolatedReward) -> None:
    with pytest.raises(RewardError, match="ended with status 3"):
        reward(batch("crash"))
    assert reward(batch("next")) == [4.0]


def test_a_batch_that_failed_keeps_its_reason_in_a_line(reward: IsolatedReward) -> None:
    with pytest.raises(BatchFailed) as failed:
        reward(batch("raise"))
    assert failed.value.reason == "raised KeyError: 'no such thing'"
    with pytest.raises(BatchFailed) as failed:
        reward(batch("crash"))
    assert failed.value.reason == "ended with status 3"


def test_an_answer_that_cannot_be_read_is_reported_and_survived(reward: IsolatedReward) -> None:
    reward(batch("strange"))
    with pytest.raises(BatchFailed, match="returned a value that cannot be read") as failed:
        reward(batch("next"))
    assert failed.value.reason.startswith("answer cannot be read: ValueError")
    assert reward(batch("next")) == [4.0]  # a fresh process


def test_arguments_protocol_and_a_memory_limit_reach_the_process(tmp_path: Path) -> None:
    file = tmp_path / "limited.py"
    file.write_text(LIMITED)
    settings = WorkerSettings(arguments={"unit": 2.5}, protocol="trl_text", memory_bytes=512 * 2**20)
    with IsolatedReward("limited", f"{file}:limited", timeout_s=20.0, settings=settings) as limited:
        assert limited(batch("aa")) == [5.0]
        with pytest.raises(BatchFailed, match="MemoryError") as failed:
            limited(batch("hog"))
        assert failed.value.reason.startswith("raised MemoryError")
        assert limited(batch("a")) == [2.5]


def test_the_batches_of_an_async_function_are_under_way_together(tmp_path: Path) -> None:
    file = tmp_path / "meeting.py"
    file.write_text(MEETING)
    with IsolatedReward("meeting", f"{file}:meeting", timeout_s=20.0, batch_size=1) as meeting:
        assert meeting.is_async
        assert meeting(batch("a", "bb", "ccc")) == [1.0, 2.0, 3.0]  # each waits until all three have come
        assert meeting(batch("a", "bb", "ccc")) == [1.0, 2.0, 3.0]  # on the same loop as before


def test_too_few_values_cannot_be_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "short.py"
    file.write_text("def short(generations):\n    return [1.0]\n")
    with (
        IsolatedReward("short", f"{file}:short", timeout_s=20.0) as short,
        pytest.raises(BatchFailed, match=r"rewards\.short = 1: values for 2 generations") as failed,
    ):
        short(batch("a", "b"))
    assert not failed.value.divisible


def test_a_large_batch_passes_the_pipes(reward: IsolatedReward) -> None:
    assert reward(batch(*["y" * 500] * 2000)) == [500.0] * 2000


def test_a_function_that_does_not_exist_is_refused_before_any_batch() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.exact\.function = .*did you mean exact_match"):
        IsolatedReward("exact", "rlhf_core.rewards.verifiable:exact_mtch", timeout_s=5.0)


SECRETIVE = """
from rlhf_core.rewards.sandbox.local import Limits, run_program

def secretive(completions, key, **kwargs):
    if "raise" in str(completions[0]):
        raise RuntimeError(f"refused: {key}")
    seen = run_program("import os; print(dict(os.environ))", limits=Limits())
    assert seen.outcome == "finished", seen
    return [float(len(key)), float(key in seen.stdout or "FAR_KEY" in seen.stdout)]
"""


def test_the_function_alone_has_the_secret_not_its_command_line_its_errors_or_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        find_isolation(False)
    except ConfigError as error:
        pytest.skip(str(error))
    (tmp_path / "mine.py").write_text(SECRETIVE)
    monkeypatch.setenv("FAR_KEY", "a-secret-of-14")
    settings = WorkerSettings(arguments={"key": "env:FAR_KEY"})
    function = f"{tmp_path}/mine.py:secretive"
    with IsolatedReward("mine", function, timeout_s=60.0, settings=settings) as reward:
        command = b" ".join(Path(f"/proc/{reward._host.process.pid}/cmdline").read_bytes().split(b"\0"))
        assert b"env:FAR_KEY" in command and b"a-secret" not in command
        assert reward(batch("a", "b")) == [14.0, 0.0]
        with pytest.raises(BatchFailed, match=r"refused: \*\*\*") as caught:
            reward(batch("raise"))
        assert "a-secret" not in caught.value.reason and caught.value.reason.endswith("refused: ***")
    monkeypatch.delenv("FAR_KEY")
    with pytest.raises(ConfigError, match=r"^rewards\.mine\.arguments\.key = 'env:FAR_KEY': FAR_KEY is not set"):
        IsolatedReward("mine", function, timeout_s=60.0, settings=settings)
