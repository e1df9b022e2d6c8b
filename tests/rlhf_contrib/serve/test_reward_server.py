"""The server: contract, batching, refusals, metrics."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rlhf_contrib.serve.reward_server import (
    Query,
    ServerLimits,
    as_it_stands,
    create_app,
    function_score,
    read_request,
    rendered,
    reward_model_score,
)
from rlhf_core.errors import RewardError
from rlhf_core.http import serving as http_serving
from rlhf_core.http.serving import BodyLimits
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.remote import RemoteRewardClient
from rlhf_core.types import Generation, Message
from tests.rlhf_core.rewards.answers import answers
from tests.support.reward_servers import serving


class Counting:
    """Scores the length of an answer; keeps the batches. An answer `bad` fails its batch, `none` does not apply."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.batches: list[int] = []
        self.threads: set[int] = set()
        self.started = threading.Event()
        self._gate = gate

    def __call__(self, queries: Sequence[Query]) -> RewardOutcome:
        self.batches.append(len(queries))
        self.threads.add(threading.get_ident())
        self.started.set()
        if self._gate is not None:
            assert self._gate.wait(20)
        if any(query.answer == "bad" for query in queries):
            raise RewardError("the reward refuses 'bad'")
        if any(query.answer == "bug" for query in queries):
            raise ZeroDivisionError
        values = tuple(None if query.answer == "none" else float(len(query.answer)) for query in queries)
        return RewardOutcome(values, logs={"seen": (float(len(queries)), len(queries))})


HTTP = httpx.Client(timeout=20)
"""One for all: each reads the certificates."""


def asked(url: str, *texts: str, **more: Any) -> httpx.Response:
    return HTTP.post(url, json={"query": list(texts), **more})


def test_it_answers_openrlhfs_contract_at_both_addresses():
    """What OpenRLHF's client reads: rewards, scores and extra_logs, one entry per query."""
    with serving(create_app(Counting(), name="n", token="")) as url:
        for path in ("/get_reward", "/"):
            answer = asked(url + path, "2+2? four", "2+2? none", prompts=["2+2? "] * 2, labels=["4", None])
            assert answer.json() == {"rewards": [4.0, None], "scores": [4.0, None], "extra_logs": {"seen": 1.0}}
        assert asked(url + "/get_reward").json()["rewards"] == []
        assert HTTP.get(url + "/health").json() == {"status": "ok", "serves": "n"}


def test_our_client_and_our_server_understand_each_other():
    with serving(create_app(Counting(), name="n", token="")) as url:
        urls = [url + "/get_reward"]
        with RemoteRewardClient("far", urls, timeout_s=10, retries=0, token_env="") as reward:
            outcome = reward(answers("a", "none", "abc"))
    assert outcome.values == (1.0, None, 3.0)


def test_requests_that_wait_are_scored_together_by_one_thread():
    gate = threading.Event()
    score = Counting(gate)
    app = create_app(score, name="n", token="", limits=ServerLimits(max_batch=8, max_wait_s=0.05))
    with serving(app) as url, ThreadPoolExecutor(20) as pool:
        first = pool.submit(asked, url, "x")
        assert score.started.wait(20)  # the scorer is at work; the others queue up behind it
        rest = [pool.submit(asked, url, "y" * number, "z") for number in range(1, 13)]
        HTTP.get(url + "/health").raise_for_status()
        wait_until_queued(url, len(rest))
        gate.set()
        assert first.result().json()["rewards"] == [1.0]
        found = [one.result().json()["rewards"] for one in rest]
    assert found == [[float(number), 1.0] for number in range(1, 13)]
    assert score.batches == [1, 8, 8, 8]
    assert len(score.threads) == 1


def test_one_request_that_fails_does_not_fail_its_neighbours():
    gate = threading.Event()
    score = Counting(gate)
    with serving(create_app(score, name="n", token="")) as url, ThreadPoolExecutor(4) as pool:
        first = pool.submit(asked, url, "x")
        assert score.started.wait(20)
        rest = [pool.submit(asked, url, text) for text in ("bad", "bug", "good")]
        wait_until_queued(url, len(rest))
        gate.set()
        assert first.result().status_code == 200
        bad, bug, good = (one.result() for one in rest)
        assert bad.status_code == 500 and "refuses 'bad'" in bad.json()["error"]
        assert bug.status_code == 500 and good.json()["rewards"] == [4.0]
        assert asked(url, "bug").status_code == 500, "alone in its batch"
        assert asked(url, "fine").json()["rewards"] == [4.0]


def test_without_the_token_there_is_no_reward_and_no_metrics():
    score = Counting()
    with serving(create_app(score, name="n", token="s3cret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert HTTP.post(url, json={"query": ["x"]}, headers=headers).status_code == 401
            assert HTTP.get(url + "/metrics", headers=headers).status_code == 401
        assert HTTP.get(url + "/health").status_code == 200  # says nothing of the data
        given = {"Authorization": "Bearer s3cret"}
        assert HTTP.post(url, json={"query": ["x"]}, headers=given).json()["rewards"] == [1.0]
    assert score.batches == [1]


def test_what_is_no_request_is_refused_with_the_reason():
    with serving(
        create_app(Counting(), name="n", token="", limits=ServerLimits(body=BodyLimits(max_bytes=1000)))
    ) as url:
        for content, reason in (
            (b"{", "Expecting property name"),
            (b"[]", "query must be a list"),
            (b'{"query": "x"}', "query must be a list"),
            (b'{"query": ["fine", "\\ud800"]}', "query[1] holds half of a surrogate pair"),
            (b'{"query": ["x"], "prompts": ["\\udfff"]}', "prompts[0] holds half of a surrogate pair"),
            (b'{"query": ["x"], "labels": ["a", "b"]}', "labels must be a list with an entry for each of the 1"),
        ):
            answer = HTTP.post(url, content=content)
            assert answer.status_code == 422 and reason in answer.json()["error"]
        assert asked(url, "x" * 2000).status_code == 413


def test_a_client_that_stops_half_way_is_sent_away_and_the_next_is_served():
    limits = ServerLimits(body=BodyLimits(timeout_s=0.3))
    with serving(create_app(Counting(), name="n", token="", limits=limits)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as half:
            half.sendall(b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            assert asked(url, "abc").json()["rewards"] == [3.0]
            assert half.recv(64).startswith(b"HTTP/1.1 408 ")


def test_metrics_count_what_happened():
    with serving(create_app(Counting(), name="n", token="")) as url:
        asked(url, "a", "b")
        asked(url, "bad")
        HTTP.post(url, content=b"{")
        lines = HTTP.get(url + "/metrics").text.splitlines()
    for line in (
        'reward_requests_total{status="200"} 1.0',
        'reward_requests_total{status="500"} 1.0',
        'reward_requests_total{status="422"} 1.0',
        "reward_samples_total 2.0",
        "reward_errors_total 1.0",
        "reward_batch_size_sum 3.0",
        "reward_request_seconds_count 3.0",
    ):
        assert line in lines


def test_labels_arrive_as_text():
    queries = read_request(json.dumps({"query": ["a"] * 3, "labels": [4, None, {"tests": ["x"]}]}).encode())
    assert [query.label for query in queries] == ["4", "", '{"tests": ["x"]}']


def wait_until_queued(url: str, count: int) -> None:
    """Until `count` requests are behind the one at work."""
    deadline = time.monotonic() + 20
    while f"reward_queued_requests {count}.0" not in HTTP.get(url + "/metrics").text.splitlines():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_never_ends_its_headers_is_sent_away_and_so_are_too_many(monkeypatch):
    monkeypatch.setattr(http_serving, "HEADERS_S", 2.0)  # all four must connect before it
    monkeypatch.setattr(http_serving, "MOST_CONNECTIONS", 3)
    begun = b"POST /get_reward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"
    with serving(create_app(Counting(), name="n", token="")) as url, contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        silent, half, again = (
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(3)
        )
        half.sendall(begun)
        again.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert again.recv(4096).startswith(b"HTTP/1.1 200 ")
        again.sendall(begun)  # a further request on the same connection
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
        for one in (silent, half, again):
            with contextlib.suppress(ConnectionResetError):
                while one.recv(4096):
                    continue
        assert asked(url, "abc").json()["rewards"] == [3.0]


# ---------------------------------------------------------------- what it scores with


class Model:
    """Scores a sequence by its sum; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        self.seen += sequences
        return [float(sum(sequence)) for sequence in sequences]


def tokenize(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_a_function_gets_prompt_answer_and_label_as_they_were_sent():
    seen: list[Generation] = []

    def reward(generations: Sequence[Generation]) -> RewardOutcome:
        seen.extend(generations)
        return RewardOutcome((1.0, None), logs={"hits": (1.0, 2)})

    outcome = function_score(reward)([Query("2+2? 4", "2+2? ", "4"), Query("no prompt", "", "")])
    assert outcome == RewardOutcome((1.0, None), logs={"hits": (1.0, 2)})
    assert [(one.prompt.messages, one.completion.text, one.prompt.label) for one in seen] == [
        ((Message("user", "2+2? "),), "4", "4"),
        ((Message("user", ""),), "no prompt", ""),
    ]


@pytest.mark.parametrize(
    ("values", "problem"), [((1.0,), "for 2 answers"), ((1.0, float("nan")), r"rewards\[1\] = nan")]
)
def test_what_json_cannot_say_is_refused(values, problem):
    score = function_score(lambda generations: RewardOutcome(values))
    with pytest.raises(RewardError, match=problem):
        score([Query("a", "", ""), Query("b", "", "")])


def test_a_rendered_query_is_read_as_it_stands_and_cut_like_in_training():
    model = Model()
    score = reward_model_score(model, as_it_stands(tokenize), max_length=3)
    assert score([Query("ab", "a", ""), Query("abcd", "", "")]).values == (97.0 + 98, 97.0 + 98 + 99)
    assert model.seen == [(97, 98), (97, 98, 99)]
    with pytest.raises(RewardError, match="no token"):
        score([Query("", "", "")])


def test_a_plain_query_is_rendered_by_the_template_with_an_end_of_turn():
    encode = rendered(lambda prompt, answer: (*tokenize(f"<{prompt}>{answer}"), 0))
    assert encode(Query("hi you", "hi ", "")) == (*b"<hi >you", 0)
    with pytest.raises(RewardError, match="does not begin with it"):
        encode(Query("you", "hi", ""))
