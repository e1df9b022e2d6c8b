"""A judge over an OpenAI-compatible endpoint: what is asked, what is read, and what goes wrong."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlhf_core.config.rewards import JsonVerdict, JudgeReward, PatternVerdict
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.judge import Judge, question, read_score
from rlhf_core.types import Generation
from tests.rlhf_core.rewards.answers import answer
from tests.support.chat_server import ChatServer


def generation(text: str) -> Generation:
    return answer(text, prompt="p0", asked="2+2?", label="4")


@pytest.fixture
def endpoint() -> Iterator[ChatServer]:
    made = ChatServer()
    yield made
    made.close()


def judge(endpoint: ChatServer, pauses: list[float] | None = None, **settings: Any) -> Judge:
    given = {"url": endpoint.url, "model": "m", "template": "Rate {completion}", "retries": 2, "on_failure": "invalid"}
    waited = [] if pauses is None else pauses
    return Judge("judge", JudgeReward.model_validate(given | settings), pause=waited.append)


def test_each_answer_is_asked_about_and_scored_in_its_place(endpoint):
    endpoint.says = lambda asked: f"It has {len(asked)} letters. Score: {len(asked) - 5}"
    with judge(endpoint, max_tokens=9) as one:
        outcome = one.outcome([generation(text) for text in ("a", "bb", "cccc")])
    assert outcome.values == (1.0, 2.0, 4.0)
    assert {request["path"] for request in endpoint.requests} == {"/v1/chat/completions"}
    assert all(request["max_tokens"] == 9 and request["temperature"] == 0.0 for request in endpoint.requests)
    assert {request["model"] for request in endpoint.requests} == {"m"}


def test_the_template_is_filled_in_once():
    template = 'Q: {prompt} A: {completion} Right: {label}. Say {"score": 0-10}.'
    assert question(template, generation("{label}{prompt}")) == (
        'Q: 2+2? A: {label}{prompt} Right: 4. Say {"score": 0-10}.'
    )


@pytest.mark.parametrize(
    ("text", "verdict", "score"),
    [
        ("Score: 8", PatternVerdict(), 8.0),
        ("score = 3.5\nno: Score: 4", PatternVerdict(), 4.0),  # the last one counts
        ("SCORE:-1", PatternVerdict(), -1.0),
        ("**Score:** 8", PatternVerdict(), 8.0),
        ("__Score__: **7.5**", PatternVerdict(), 7.5),
        ('{"score": 8}', JsonVerdict(), 8.0),
        ('first {"score": 1} then ```{"why": {"x": 1}, "score": "2"}```', JsonVerdict(), 2.0),
    ],
)
def test_the_last_score_counts(text, verdict, score):
    assert read_score(text, verdict, low=-10, high=10) == score


@pytest.mark.parametrize(
    ("text", "verdict", "message"),
    [
        ("very good", PatternVerdict(), "holds no score"),
        ("Score: 11", PatternVerdict(), "not between 0 and 10"),
        ('{"score": [1]}', PatternVerdict(), "holds no score"),
        ('{"score": null}', JsonVerdict(), "holds no score"),
        ('{"score": "good"}', JsonVerdict(), "'good' is not a number"),
        ('{"score": NaN}', JsonVerdict(), "nan is not between"),
        ('{"points": 3}', JsonVerdict(), "holds no score"),
        ("{", JsonVerdict(), "holds no score"),
        ('{"a":' * 2000, JsonVerdict(), "holds no score"),
    ],
)
def test_an_answer_without_a_score_is_not_zero(text, verdict, message):
    with pytest.raises(ValueError, match=message):
        read_score(text, verdict, low=0, high=10)


def test_an_answer_that_cannot_be_judged_fails_alone_and_is_named(endpoint):
    endpoint.says = lambda asked: "I cannot say" if "b" in asked else "Score: 2"
    with judge(endpoint) as one:
        outcome = one.outcome([generation("a"), generation("b")])
    assert outcome.values == (2.0, None)
    assert outcome.failures == {1: "the judge's answer holds no score: 'I cannot say'"}
    assert len(endpoint.requests) == 2  # the same question would get the same answer
    with judge(endpoint, on_failure="fail") as one, pytest.raises(RewardError, match=r"rewards\.judge\[prompt p0\]"):
        one.outcome([generation("b")])


def test_a_fault_of_the_server_is_asked_about_again(endpoint):
    statuses = iter([503, 500])
    endpoint.says = lambda asked: next(statuses, "Score: 2")
    pauses: list[float] = []
    with judge(endpoint, pauses) as one:
        assert one.outcome([generation("a")]).values == (2.0,)
    assert pauses == [0.5, 1.0]


@pytest.mark.parametrize(
    ("says", "reason", "asked"),
    [
        (503, "{url} answered 503", 3),
        (401, "{url} answered 401", 1),
        ("<html>hello", "the judge's server answered with no chat completion: '<html>hello'", 1),
    ],
)
def test_a_server_that_does_not_answer_is_named(endpoint, says, reason, asked):
    endpoint.says = lambda _: says
    with judge(endpoint) as one:
        (found,) = one.outcome([generation("a")]).failures.values()
    assert found == reason.format(url=endpoint.url) and len(endpoint.requests) == asked


def test_a_slow_server_and_none_at_all_are_failures_in_time(endpoint):
    slow = threading.Event()

    def late(asked: str) -> str:
        slow.wait(20)
        return "Score: 1"

    endpoint.says = late
    began = time.monotonic()
    with judge(endpoint, timeout_s=0.3, retries=0) as one:
        (reason,) = one.outcome([generation("a")]).failures.values()
    assert "ReadTimeout" in reason
    slow.set()
    with judge(endpoint, url="http://127.0.0.1:9/v1", retries=1) as one:
        (reason,) = one.outcome([generation("a")]).failures.values()
    assert "ConnectError" in reason
    assert time.monotonic() - began < 15


def test_the_token_is_sent_and_must_be_there(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with judge(endpoint, token_env="JUDGE_TOKEN") as one:
        one.outcome([generation("a")])
    assert endpoint.tokens == ["Bearer secret"]
    with pytest.raises(ConfigError, match=r"rewards\.judge\.token_env = 'MISSING_TOKEN'"):
        judge(endpoint, token_env="MISSING_TOKEN")
