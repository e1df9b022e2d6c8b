"""Terms as a profile names them, opened."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards import FunctionReward, JudgeReward, RemoteReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards import terms
from rlhf_core.rewards.batches import RewardOutcome, Worker
from rlhf_core.rewards.terms import episode_reward, identity, open_elsewhere
from rlhf_core.types import ActionSpan, Generation
from tests.rlhf_core.rewards.answers import answer, answers
from tests.support.reward_servers import scripted


def test_a_library_reward_takes_its_arguments(tmp_path):
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


def test_a_stage_that_goes_on_does_not_pay_again_unless_the_function_changed(tmp_path):
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


def test_the_identity_is_what_decides_the_values(tmp_path):
    file = tmp_path / "one.py"
    file.write_text("def one(generations):\n    return []\n")
    spec = FunctionReward(function=f"{file}:one")
    same = spec.model_copy(update={"weight": 3.0, "timeout_s": 1.0, "on_failure": "invalid", "normalize": "group"})
    assert identity(same) == identity(spec)
    assert identity(spec.model_copy(update={"arguments": {"x": 1}})) != identity(spec)
    first = identity(spec)
    file.write_text("def one(generations):\n    return [1]\n")
    assert identity(spec) != first
    judge = JudgeReward(url="http://a/v1", model="m", template="{completion}")
    assert identity(judge.model_copy(update={"url": "http://b/v1"})) == identity(judge)
    assert identity(judge.model_copy(update={"version": "2"})) != identity(judge)


def test_an_episode_has_the_sum_of_its_environments_rewards():
    plain = answer("x")
    spans = (ActionSpan(0, 1, 0, 0.25), ActionSpan(1, 1, 0, 0.5))
    scored = replace(plain, completion=replace(plain.completion, spans=spans))
    assert episode_reward([plain, scored]) == RewardOutcome((None, 0.75))
    graded = replace(scored, completion=replace(scored.completion, score=1.0))
    assert episode_reward([plain, graded]) == RewardOutcome((None, 0.75), scores=(None, 1.0))


class Paid(Worker):
    """A client of the kind that `rlhf_core.rewards.judge` has; it has no verdict on "bad"."""

    asked: list[str]

    def __init__(self, name: str, config: JudgeReward, *, seed: int) -> None:
        Paid.asked = []

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        texts = [one.completion.text for one in generations]
        Paid.asked += texts
        if "bad" in texts:
            raise RewardError("rewards.judge: no score")
        return RewardOutcome(tuple(float(len(text)) for text in texts))

    def close(self) -> None:
        pass


def test_a_verdict_is_kept_as_soon_as_it_is_paid_for(tmp_path, monkeypatch):
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
    ],
)
def test_what_a_server_cannot_score_is_named_and_costs_no_other_answer(tmp_path, faulty, reason):
    def score(body: dict[str, Any]) -> tuple[int, bytes]:
        queries = body["query"]
        assert len(queries) <= 4
        if any("bad" in query for query in queries):
            return faulty(queries)
        return 200, json.dumps({"rewards": [float(len(query)) for query in queries]}).encode()

    outcome, _ = remotely(tmp_path, score, answers("a", "bad", "ccc", "d", "ee", "f"))
    assert outcome.values == (3.0, None, 5.0, 3.0, 4.0, 3.0)  # with the prompt "hi"
    assert list(outcome.failures) == [1] and reason in outcome.failures[1]


def test_a_remote_reward_that_is_down_is_given_up_on(tmp_path):
    outcome, asked = remotely(tmp_path, lambda body: (500, b""), answers(*["a"] * 64), batch_size=64)
    assert len(outcome.failures) == 64 and asked <= terms.REMOTE_FAILED_CALLS + 2


def remotely(
    folder: Path, score: Callable[[dict[str, Any]], tuple[int, bytes]], given: list[Generation], batch_size: int = 4
) -> tuple[RewardOutcome, int]:
    """Return the outcome of a remote reward, and how many requests its server got."""
    with scripted(score) as script, ExitStack() as leases:
        spec = RemoteReward(urls=(script.url,), retries=0, timeout_s=20.0, on_failure="invalid", batch_size=batch_size)
        outcome = open_elsewhere("far", spec, folder, leases)(given)
        return outcome, len(script.asked)
