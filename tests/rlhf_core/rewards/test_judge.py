"""A judge over an OpenAI-compatible endpoint: what is asked, what is read, and what goes wrong."""

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf_core.config.rewards import GenerativeReward, JudgeReward, RewardsConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.batches import BatchedReward
from rlhf_core.rewards.generative import GenerativeModel
from rlhf_core.rewards.judge import CORRECTION, Judge, filled, orders_of
from rlhf_core.rewards.rubrics import check_rubrics
from rlhf_core.sequences import Sequences
from rlhf_core.types import Generation, TokenSample
from tests.rlhf_core.rewards.answers import answer
from tests.support.chat_server import ChatServer


def generation(text: str) -> Generation:
    return answer(text, prompt="p0", asked="2+2?", label="4")


@pytest.fixture
def endpoint() -> Iterator[ChatServer]:
    made = ChatServer()
    yield made
    made.close()


@contextmanager
def judge(endpoint: ChatServer, pauses: list[float] | None = None, **settings: Any) -> Iterator[BatchedReward]:
    given = {"url": endpoint.url, "model": "m", "template": "Rate {completion}", "retries": 2, "on_failure": "invalid"}
    waited = [] if pauses is None else pauses
    config = JudgeReward.model_validate(given | settings)
    with Judge("judge", config, pause=waited.append) as one:
        yield BatchedReward(
            "judge", [one.outcome], batch_size=1, retries=0, on_failure=config.on_failure, compares=config.compares
        )


def test_each_answer_is_asked_about_and_scored_in_its_place(endpoint):
    endpoint.says = lambda asked: f"It has {len(asked)} letters. Score: {len(asked) - 5}"
    with judge(endpoint, max_tokens=9) as one:
        outcome = one([generation(text) for text in ("a", "bb", "cccc")])
    assert outcome.values == (1.0, 2.0, 4.0)
    assert {request["path"] for request in endpoint.requests} == {"/v1/chat/completions"}
    assert all(request["max_tokens"] == 9 and request["temperature"] == 0.0 for request in endpoint.requests)
    assert {request["model"] for request in endpoint.requests} == {"m"}


def test_the_template_is_filled_in_once():
    template = 'Q: {prompt} A: {completion} Right: {label}. Say {"score": 0-10}.'
    assert filled(template, generation("{label}{prompt}")) == (
        'Q: 2+2? A: {label}{prompt} Right: 4. Say {"score": 0-10}.'
    )


def test_an_answer_that_cannot_be_judged_fails_alone_and_is_named(endpoint):
    endpoint.says = lambda asked: "Score: 2" if asked == "Rate a" else "I cannot say"
    with judge(endpoint) as one:
        outcome = one([generation("a"), generation("b")])
    assert outcome.values == (2.0, None)
    assert outcome.failures == {1: "the judge's answer holds no score: 'I cannot say'"}
    assert len(endpoint.requests) == 1 + 3 and endpoint.requests[-1]["messages"][-1]["content"] == CORRECTION
    with judge(endpoint, on_failure="fail") as one, pytest.raises(RewardError, match=r"rewards\.judge\[prompt p0\]"):
        one([generation("b")])


def test_a_fault_of_the_server_is_asked_about_again(endpoint):
    statuses = iter([503, 500])
    endpoint.says = lambda asked: next(statuses, "Score: 2")
    pauses: list[float] = []
    with judge(endpoint, pauses) as one:
        assert one([generation("a")]).values == (2.0,)
    assert pauses == [0.5, 1.0]


@pytest.mark.parametrize(
    ("says", "reason", "asked"),
    [
        (503, '{url} answered 503: {{"choices": [{{"message": {{"role": "assistant", "content": 503}}{tail}', 3),
        (401, '{url} answered 401: {{"choices": [{{"message": {{"role": "assistant", "content": 401}}{tail}', 1),
        (None, "{url} answered with an empty reply", 3),
        ("", "{url} answered with an empty reply", 3),
        ("<html>hello", "{url} answered with no chat completion: '<html>hello'", 3),
    ],
)
def test_a_server_that_does_not_answer_is_named(endpoint, says, reason, asked):
    endpoint.says = lambda _: says
    with judge(endpoint) as one:
        (found,) = one([generation("a")]).failures.values()
    tail = ', "finish_reason": "stop"}]}'
    assert found == reason.format(url=endpoint.url, tail=tail) and len(endpoint.requests) == asked


def test_an_empty_reply_is_asked_for_again(endpoint):
    replies = iter([None, " ", "<html>busy"])
    endpoint.says = lambda asked: next(replies, "Score: 2")
    with judge(endpoint, retries=3) as one:
        assert one([generation("a")]).values == (2.0,)


@pytest.mark.parametrize(("asked_s", "waited"), [("20", [20.0]), ("0", [0.5]), ("86400", []), ("soon", [0.5])])
def test_a_server_that_asks_for_a_pause_gets_it_unless_it_is_hours(endpoint, asked_s, waited):
    statuses = iter([429])
    endpoint.says = lambda asked: next(statuses, "Score: 2")
    endpoint.headers = {"Retry-After": asked_s}
    pauses: list[float] = []
    with judge(endpoint, pauses) as one:
        assert one([generation("a")]).values == ((2.0,) if waited else (None,))
    assert pauses == waited


@pytest.mark.parametrize("ends", ["length", "content_filter", "MAX_TOKENS", "abort", "SAFETY"])
def test_a_reply_that_was_cut_off_is_not_read(endpoint, ends):
    endpoint.says, endpoint.ends = lambda asked: "At first sight Score: 3. Score: 1", lambda asked: ends
    with judge(endpoint, corrections=0) as one:
        (reason,) = one([generation("a")]).failures.values()
    assert "cut off" in reason and "max_tokens" in reason
    endpoint.ends = lambda asked: "stop" if asked == CORRECTION else ends
    with judge(endpoint) as one:
        assert one([generation("a")]).values == (1.0,)


def test_a_slow_server_and_none_at_all_are_failures_in_time(endpoint):
    slow = threading.Event()

    def late(asked: str) -> str:
        slow.wait(20)
        return "Score: 1"

    endpoint.says = late
    began = time.monotonic()
    with judge(endpoint, timeout_s=0.3, retries=0) as one:
        (reason,) = one([generation("a")]).failures.values()
    assert "ReadTimeout" in reason
    slow.set()
    with judge(endpoint, url="http://127.0.0.1:9/v1", retries=1) as one:
        (reason,) = one([generation("a")]).failures.values()
    assert "ConnectError" in reason
    assert time.monotonic() - began < 15


def test_the_token_is_sent_and_must_be_there(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with judge(endpoint, token_env="JUDGE_TOKEN") as one:
        one([generation("a")])
    assert endpoint.tokens == ["Bearer secret"]
    config = JudgeReward(url=endpoint.url, model="m", template="{completion}", token_env="MISSING_TOKEN")
    with pytest.raises(ConfigError, match=r"rewards\.judge\.token_env = 'MISSING_TOKEN'"):
        Judge("judge", config)


# ---------------------------------------------------------------- rubrics

RUBRIC = [{"criterion": "has an x", "weight": 3}, {"description": "has a y"}, {"criterion": "has a z", "points": -2}]


def with_rubric(text: str, rubric: Any = RUBRIC) -> Generation:
    return answer(text, prompt="p0", label=json.dumps({"rubric": rubric}))


def has_letter(asked: str) -> str:
    """Return whether the answer has the letter of the criterion."""
    text, _, criterion = asked.partition(" has a")
    return f"Score: {int(criterion[-1] in text)}"


@pytest.mark.parametrize(
    ("text", "rubric", "value"),
    [("xy", RUBRIC, 1.0), ("x", RUBRIC, 0.75), ("yz", RUBRIC, -0.25), ("q", RUBRIC, 0.0), ("y", "has a y", 1.0)],
)
def test_the_verdicts_on_the_criteria_are_weighed(endpoint, text, rubric, value):
    endpoint.says = has_letter
    given = {"template": "{completion} {criterion}", "rubric_column": "rubric", "high": 1.0}
    with judge(endpoint, **given) as one:
        assert one([with_rubric(text, rubric)]).values == (value,)


def test_a_rubric_is_shown_as_a_whole_and_a_criterion_without_a_verdict_is_a_failure(endpoint):
    with judge(endpoint, template="{completion}:\n{rubric}", rubric_column="rubric") as one:
        assert one([with_rubric("a")]).values == (5.0,)
        with pytest.raises(ConfigError, match="has no such column"):  # not a failure of the answer
            one([generation("a")])
    shown = endpoint.requests[0]["messages"][0]["content"]
    assert shown == "a:\n1. has an x (weight 3)\n2. has a y (weight 1)\n3. has a z (weight -2)"
    endpoint.says = lambda asked: "Score: 1" if " has an x" in asked else "hm"
    with judge(endpoint, template="{completion} {criterion}", rubric_column="rubric", corrections=0) as one:
        outcome = one([with_rubric("a")])
    assert outcome.values == (None,) and "holds no score: 'hm'" in outcome.failures[0]


@pytest.mark.parametrize(
    ("label", "rule"),
    [
        ("4", r"prompt p0 \('hi'\) has no such column; its label has no fields; add it, or choose prompts by sources"),
        ('{"answer": 4}', "has no such column; its label has answer"),
        ('{"rubric": []}', r"prompt p0 \('hi'\) has '\[\]'; give a text, or a list of \{criterion, weight\}"),
        ('{"rubric": null}', "has 'None'; give a text"),
        ('{"rubric": " "}', "give a text"),
        ('{"rubric": [{"weight": 1}]}', "give a text"),
        ('{"rubric": [{"criterion": "a", "weight": "much"}]}', "give a text"),
        ('{"rubric": [{"criterion": "a", "weight": -1}]}', "of which one has a weight above 0"),
        ('{"rubric": [3]}', "give a text"),
    ],
)
def test_a_prompt_without_a_rubric_is_refused_unless_the_term_is_for_others(label, rule):
    term = {
        "type": "judge",
        "url": "http://a/v1",
        "model": "m",
        "rubric_column": "rubric",
        "template": "{completion}{rubric}",
    }
    rows = [answer("", prompt="p0", label=label).prompt, with_rubric("").prompt]
    with pytest.raises(ConfigError, match=rf"ppo\.rewards\.terms\.j\.rubric_column = 'rubric': .*{rule}"):
        check_rubrics(RewardsConfig.model_validate({"terms": {"j": term}}), rows, key="ppo.rewards")
    others = RewardsConfig.model_validate({"terms": {"j": term | {"sources": ["others"]}}})
    check_rubrics(others, rows, key="ppo.rewards")
    whole = RewardsConfig.model_validate({"terms": {"j": term | {"rubric_column": "label"}}})
    check_rubrics(whole, [answer("", label='["is short", "is right"]').prompt], key="ppo.rewards")


# ---------------------------------------------------------------- groups

GROUP = {
    "template": "{prompt}\n{answers}",
    "compares": "group",
    "verdict": {"type": "json", "field": "scores"},
}


def group(*texts: str) -> list[Generation]:
    return [generation(text) for text in texts]


def shown_answers(asked: str) -> list[str]:
    return re.findall(r"Answer \d+:\n(.*)", asked)


def test_a_group_is_scored_in_one_question_for_each_order_and_a_preference_for_places_cancels(endpoint):
    def says(asked: str) -> str:
        scores = [len(text) + place for place, text in enumerate(shown_answers(asked))]  # late places get more
        return f"The longer, the better. {json.dumps({'scores': scores})}"

    endpoint.says = says
    with judge(endpoint, **GROUP) as one:
        outcome = one(group("a", "bb", "cccc"))
        assert outcome.values == (2.0, 3.0, 5.0)
        assert outcome.logs == {"order_gap": (4.0, 3)}
        first, second = (shown_answers(request["messages"][0]["content"]) for request in endpoint.requests)
        assert first == second[::-1] and {*first} == {"a", "bb", "cccc"}
        assert one(group("a", "bb", "cccc")).values == outcome.values
    again = [request["messages"] for request in endpoint.requests]
    assert again[:2] == again[2:], "the orders follow from the seed and the prompt"
    with judge(endpoint, **GROUP) as one:
        assert one(group("bb")).values == (2.0,), "what failed episodes leave alone is scored alone"


def test_every_answer_stands_at_every_place_in_as_many_orders_as_answers():
    for count, number in ((4, 8), (3, 6), (2, 2), (1, 2), (5, 1)):
        found = orders_of(count, number, seed=3)
        assert len(found) == number and all(sorted(order) == list(range(count)) for order in found)
        if number == 2 * count:
            assert all({*places} == {*range(count)} for places in zip(*found, strict=True))
    assert len({tuple(orders_of(8, 1, seed=seed)[0]) for seed in range(8)}) > 4


@pytest.mark.parametrize(
    "reply", ["fine", '{"scores": [1]}', '{"scores": [1, 11]}', '{"scores": 3}', '{"scores": [1, "b"]}']
)
def test_a_group_without_scores_is_asked_again_and_then_fails_as_a_whole(endpoint, reply):
    endpoint.says = lambda asked: reply
    with judge(endpoint, **GROUP) as one:
        outcome = one(group("a", "b"))
    assert outcome.values == (None, None) and outcome.failures.keys() == {0, 1} and len(endpoint.requests) == 3
    endpoint.says = lambda asked: '{"scores": [1, 2]}' if asked == CORRECTION else reply
    with judge(endpoint, **GROUP) as one:
        assert one(group("a", "b")).values == (1.5, 1.5)
    endpoint.says = lambda asked: reply
    with (
        judge(endpoint, **GROUP, on_failure="fail") as one,
        pytest.raises(RewardError, match=r"prompt p0.*gave no score"),
    ):
        one(group("a", "b"))


# ---------------------------------------------------------------- policies as judges


class Reader:
    """A frozen trainer: a reply "Yes" has probability 0.6 if the answer has the letter of the criterion, else 0.2; "No" 0.2."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat = chat
        self.samples: list[TokenSample] = []

    def logprobs(self, samples: Sequences, *, temperature: float) -> NDArray[np.float32]:
        assert temperature == 1.0
        rows = zip(samples.split(samples.token_ids), samples.split(samples.loss_mask), strict=True)
        asked = [TokenSample(token_ids, loss_mask) for token_ids, loss_mask in rows]
        self.samples += asked
        values_S = np.zeros(len(samples.token_ids), np.float32)
        values_S[samples.offsets[:-1] + 1] = [math.log(self.probability(self.chat.preview(one))) for one in asked]
        return values_S

    def probability(self, shown: str) -> float:
        text, letter, reply = re.search(r"(\w+) has an? (\w).*【(\w+)", shown, re.DOTALL).groups()  # type: ignore[union-attr]
        return 0.6 if reply == "Yes" and letter in text else 0.2


def test_a_policy_judges_by_the_probabilities_of_its_verdicts(policy):
    chat = ChatTemplate.load(policy)
    reader = Reader(chat)
    given = {"model": "judge", "template": "{completion} {criterion}", "rubric_column": "rubric"}
    one = GenerativeModel("j", GenerativeReward.model_validate(given), cast(Any, reader), chat, longest=None)
    outcome = one([with_rubric("x"), with_rubric("q", ["has an x"])])
    assert outcome.values == pytest.approx([(3 * 0.75 + 0.5 - 2 * 0.5) / 4, 0.5])
    assert outcome.logs["mass"] == (pytest.approx(0.8 + 3 * 0.4), 4)
    replies = [[t for t, m in zip(one.token_ids, one.loss_mask, strict=True) if m] for one in reader.samples[:2]]
    assert [chat.decode(one) for one in replies] == ["Yes", "No"] and {one[-1] for one in replies} == {chat.eos_id}


def test_a_question_that_is_longer_than_the_judge_reads_is_a_failure_of_its_answer(policy):
    chat = ChatTemplate.load(policy)
    given = {"model": "judge", "template": "{completion} has an x", "on_failure": "invalid"}
    config = GenerativeReward.model_validate(given)
    one = GenerativeModel("j", config, cast(Any, Reader(chat)), chat, longest=60)
    outcome = one(group("x", "y" * 99))
    assert outcome.values == (pytest.approx(0.75), None) and "the judge reads at most 60 tokens" in outcome.failures[1]
    strict = GenerativeModel(
        "j", config.model_copy(update={"on_failure": "fail"}), cast(Any, Reader(chat)), chat, longest=60
    )
    with pytest.raises(
        RewardError, match=r"rewards\.j\[prompt p0\] = 'a question of \d+ tokens': the judge reads at most"
    ):
        strict(group("y" * 99))
