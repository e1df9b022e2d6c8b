"""Terms as a profile names them, opened; and the table of what a reward function can do wrong."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from rlhf_core.config.rewards import FunctionReward, JudgeReward, RemoteReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards import terms
from rlhf_core.rewards.batches import BatchedReward, RewardOutcome
from rlhf_core.rewards.terms import episode_reward, identity, open_elsewhere
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt
from tests.support.reward_servers import scripted

MOODS = """
import ctypes, os, re, subprocess, sys, time

CHILDREN = []

def by_mood(prompts, completions, labels, **columns):
    for text in completions:
        if text == "hang":
            re.match(r"(a+)+$", "a" * 40 + "b")   # for hours, and holds the interpreter lock
        if text == "slow":
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
        if text == "child":
            CHILDREN.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
            time.sleep(60)
        if text == "print":
            os.write(1, b"\\x80\\x04garbage" * 10_000)
            print("x" * 100_000)
    wrong = {"nan": float("nan"), "inf": float("-inf"), "huge": 1e38, "none": None}
    scores = [wrong[text] if text in wrong else float(len(text)) for text in completions]
    return scores[:-1] if "short" in completions else scores
"""


def answers(*texts: str) -> list[Generation]:
    return [
        Generation(
            Prompt(f"p{i}", (Message("user", "hi"),), "", ""), (1,), Completion((2,), (-1.0,), text, "stop", 0, 0)
        )
        for i, text in enumerate(texts)
    ]


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[BatchedReward]:
    file = folder / "moods.py"
    file.write_text(MOODS)
    spec = FunctionReward.model_validate(
        {"function": f"{file}:by_mood", "timeout_s": 60.0, "memory_mb": 512} | settings
    )
    with ExitStack() as leases:
        yield open_elsewhere("mood", spec, folder / "work", leases)


@pytest.fixture(scope="module")
def tolerant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchedReward]:
    with opened(tmp_path_factory.mktemp("moods"), on_failure="invalid") as reward:
        yield reward


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchedReward]:
    with opened(tmp_path_factory.mktemp("moods"), on_failure="invalid", timeout_s=2.0) as reward:
        yield reward


FAULTS = [
    ("exit", "ended with status 3"),
    ("segfault", "ended with status -11"),
    ("leave", "ended with status 0"),
    ("raise", "raised KeyError: 'no such thing'"),
    ("hog", "raised MemoryError"),
    ("nan", "returned nan: must be finite and within +-1e+06"),
    ("inf", "returned -inf: must be finite and within +-1e+06"),
    ("huge", "returned 1e+38: must be finite and within +-1e+06"),
]


@pytest.mark.parametrize(("mood", "reason"), FAULTS)
def test_a_fault_is_found_and_named_and_costs_no_other_answer(tolerant: BatchedReward, mood: str, reason: str) -> None:
    outcome = tolerant(answers("good", mood))
    assert outcome.failures == {1: reason}
    assert outcome.values == (4.0, None)


@pytest.mark.parametrize("mood", ["hang", "slow", "child"])
def test_what_does_not_end_is_found_in_time_and_costs_no_other_answer(impatient: BatchedReward, mood: str) -> None:
    began = time.monotonic()
    outcome = impatient(answers("good", mood))
    assert outcome.failures == {1: "took longer than 2 s"}
    assert outcome.values == (4.0, None)
    assert time.monotonic() - began < 30  # two deadlines of 2 s, and starts on a busy machine


def test_what_it_prints_and_what_does_not_apply_are_no_faults(tolerant: BatchedReward) -> None:
    assert tolerant(answers("print", "none")) == RewardOutcome((5.0, None))


def test_a_wrong_number_of_values_costs_the_batch(tolerant: BatchedReward) -> None:
    reason = "returned 1 values for 2 generations"
    assert tolerant(answers("good", "short")).failures == {0: reason, 1: reason}


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("exit", r"rewards\.mood = 'prompts p0 to p1'.*ended with status 3"),
        ("raise", r"(?s)rewards\.mood = 'prompts p0 to p1'.*KeyError: 'no such thing'"),
        ("nan", r"rewards\.mood\[prompt p1\] = nan"),
        ("short", r"rewards\.mood = 1: values for 2 generations"),
    ],
)
def test_where_a_failure_ends_the_stage_the_error_names_the_reward_and_the_prompts(
    tmp_path: Path, mood: str, message: str
) -> None:
    with opened(tmp_path) as reward, pytest.raises(RewardError, match=message):
        reward(answers("good", mood))


def test_no_process_is_left_over(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with opened(tmp_path, on_failure="invalid", workers=2, timeout_s=4.0, batch_size=1) as reward:
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 4  # two workers, each with its guard
        assert reward(answers("good", "child", "x")).failures.keys() == {1}
        started |= set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(list(started), timeout=10)
    assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_function_that_cannot_be_called_is_refused_before_any_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mood\.arguments\.x = 1: is not a parameter"):
        file = tmp_path / "one.py"
        file.write_text("def one(generations):\n    return []\n")
        with ExitStack() as leases:
            open_elsewhere("mood", FunctionReward(function=f"{file}:one", arguments={"x": 1}), tmp_path, leases)


def test_a_library_reward_takes_its_arguments(tmp_path: Path) -> None:
    given = {"function": "rlhf_core.rewards.library.text:regex_match", "arguments": {"pattern": r".*\d+.*"}}
    with ExitStack() as leases:
        reward = open_elsewhere("digits", FunctionReward.model_validate(given), tmp_path, leases)
        assert reward(answers("a 1", "none")).values == (1.0, 0.0)


COUNTED = """
from pathlib import Path

def counted(prompts, completions, labels, **columns):
    with Path({calls!r}).open("a") as stream:
        stream.write(" ".join(completions) + "\\n")
    return [float(len(text)) for text in completions]
"""


def test_a_stage_that_goes_on_does_not_pay_again_unless_the_function_changed(tmp_path: Path) -> None:
    calls, file = tmp_path / "calls.txt", tmp_path / "counted.py"

    def score(weight: float) -> tuple[float | None, ...]:
        spec = FunctionReward(function=f"{file}:counted", cache=True, weight=weight)
        with ExitStack() as leases:
            return open_elsewhere("counted", spec, tmp_path / "work", leases)(answers("a", "bb")).values

    file.write_text(COUNTED.format(calls=str(calls)))
    assert score(1.0) == score(2.0) == (1.0, 2.0)
    assert calls.read_text().splitlines() == ["a bb"]
    file.write_text(COUNTED.format(calls=str(calls)).replace("float(len(text))", "0.5"))
    assert score(1.0) == (0.5, 0.5)


def test_the_identity_is_what_decides_the_values(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text("def one(generations):\n    return []\n")
    spec = FunctionReward(function=f"{file}:one")
    same = spec.model_copy(update={"weight": 3.0, "timeout_s": 1.0, "on_failure": "invalid", "normalise": "group"})
    assert identity(same) == identity(spec)
    assert identity(spec.model_copy(update={"arguments": {"x": 1}})) != identity(spec)
    first = identity(spec)
    file.write_text("def one(generations):\n    return [1]\n")
    assert identity(spec) != first
    judge = JudgeReward(url="http://a/v1", model="m", template="{completion}")
    assert identity(judge.model_copy(update={"url": "http://b/v1"})) == identity(judge)
    assert identity(judge.model_copy(update={"version": "2"})) != identity(judge)


def test_an_episode_has_the_sum_of_its_environments_rewards() -> None:
    plain, episode = answers("x", "y")
    spans = (ActionSpan(0, 1, 0, 0.25), ActionSpan(1, 1, 0, 0.5))
    scored = Generation(episode.prompt, (1,), Completion((2,), (-1.0,), "y", "stop", 0, 0, spans))
    assert episode_reward([plain, scored]) == RewardOutcome((None, 0.75))
    graded = replace(scored, completion=replace(scored.completion, score=1.0))
    assert episode_reward([plain, graded]) == RewardOutcome((None, 0.75), scores=(None, 1.0))


class Served:
    """A client of the kind that `rlhf_core.rewards.remote` has."""

    made: dict[str, Any]

    def __init__(self, name: str, urls: Sequence[str], **settings: Any) -> None:
        Served.made = {"name": name, "urls": tuple(urls)} | settings
        self.open = False

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
        assert self.open
        assert len(generations) <= Served.made["batch_size"]
        if any(one.completion.text == "bad" for one in generations):
            raise RewardError("rewards.far: http://a answered status 500")
        return RewardOutcome(tuple(float(len(one.completion.text)) for one in generations))

    def __enter__(self) -> Served:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False


def test_a_remote_reward_is_asked_in_batches_and_what_it_cannot_score_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.rewards.remote.RemoteRewardClient", Served)
    given = {"type": "remote", "urls": ["http://a", "http://b"], "batch_size": 4, "on_failure": "invalid"}
    spec = TypeAdapter(RemoteReward).validate_python(given | {"token_env": "T", "timeout_s": 7.0, "retries": 3})
    with ExitStack() as leases:
        reward = open_elsewhere("far", spec, tmp_path, leases)
        outcome = reward(answers("a", "bb", "bad", "c", "dd", "e"))
    assert outcome.values == (1.0, 2.0, None, 1.0, 2.0, 1.0)
    assert outcome.failures == {2: "rewards.far: http://a answered status 500"}
    assert Served.made == {
        "name": "far",
        "urls": ("http://a", "http://b"),
        "timeout_s": 7.0,
        "retries": 3,
        "batch_size": 4,
        "token_env": "T",
        "compares": "nothing",
    }


def test_a_remote_reward_that_is_down_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Down(Served):
        def __call__(self, generations: Sequence[Generation]) -> RewardOutcome:
            asked.append(len(generations))
            raise RewardError("no server answers")

    monkeypatch.setattr("rlhf_core.rewards.remote.RemoteRewardClient", Down)
    spec = RemoteReward(urls=("http://a",), on_failure="invalid")
    with ExitStack() as leases:
        outcome = open_elsewhere("far", spec, tmp_path, leases)(answers(*["a"] * 64))
    assert len(outcome.failures) == 64
    assert len(asked) <= terms.REMOTE_FAILED_CALLS + 2


class Paid:
    """A client of the kind that `rlhf_core.rewards.judge` has; it has no verdict on "bad"."""

    asked: list[str]

    def __init__(self, name: str, config: JudgeReward) -> None:
        Paid.asked = []

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        texts = [one.completion.text for one in generations]
        Paid.asked += texts
        if "bad" in texts:
            raise RewardError("rewards.judge: no score")
        return RewardOutcome(tuple(float(len(text)) for text in texts))

    def __enter__(self) -> Paid:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_verdict_is_kept_as_soon_as_it_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.rewards.terms.Judge", Paid)
    spec = JudgeReward(url="http://a/v1", model="m", template="{completion}", concurrency=1, cache=True)
    for asked in (["a", "bb", "bad"], ["bad"]):
        with ExitStack() as leases, pytest.raises(RewardError, match="no score"):
            open_elsewhere("judge", spec, tmp_path, leases)(answers("a", "bb", "bad"))
        assert Paid.asked == asked


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (lambda queries: (200, json.dumps({"rewards": [math.nan] * len(queries)}).encode()), "is not a finite number"),
        (lambda queries: (200, b'{"rewards": []}'), "0 rewards"),
        (lambda queries: (500, b"out of memory"), "status 500: out of memory"),
        (lambda queries: (200, b"<html>"), "invalid JSON"),
    ],
)
def test_what_a_server_cannot_score_is_named_and_costs_no_other_answer(
    tmp_path: Path, faulty: Callable[[list[str]], tuple[int, bytes]], reason: str
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        queries = body["query"]
        if any("bad" in query for query in queries):
            return faulty(queries)
        return 200, json.dumps({"rewards": [float(len(query)) for query in queries]}).encode()

    with scripted(answer) as script, ExitStack() as leases:
        spec = RemoteReward(urls=(script.url,), retries=0, timeout_s=20.0, on_failure="invalid")
        outcome = open_elsewhere("far", spec, tmp_path, leases)(answers("a", "bad", "ccc", "d"))
    assert outcome.values == (3.0, None, 5.0, 3.0)  # with the prompt "hi"
    assert list(outcome.failures) == [1]
    assert reason in outcome.failures[1]
