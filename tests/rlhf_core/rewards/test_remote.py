"""The client: contract, failover, deadlines and what it says when all fail."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards import remote
from rlhf_core.rewards.batches import BatchedReward, BatchFailed
from rlhf_core.rewards.remote import RemoteRewardClient
from rlhf_core.types import Generation
from tests.rlhf_core.rewards.answers import answer
from tests.support.reward_servers import lengths, scripted


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)


def answers(*texts: str) -> list[Generation]:
    return [answer(text, prompt=f"p{n}", asked="2+2? ", label=f"label {n}", tokens=()) for n, text in enumerate(texts)]


def client(*urls: str, timeout_s: float = 5.0, retries: int = 2, token_env: str = "") -> RemoteRewardClient:
    return RemoteRewardClient("far", urls, timeout_s=timeout_s, retries=retries, token_env=token_env)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/get_reward"


def test_it_speaks_openrlhfs_contract():
    with scripted(lengths) as server, client(server.url) as reward:
        outcome = reward(answers("4", "four"))
    assert server.asked == [
        {"query": ["2+2? 4", "2+2? four"], "prompts": ["2+2? ", "2+2? "], "labels": ["label 0", "label 1"]}
    ]
    assert outcome.values == (6.0, 9.0)
    assert outcome.logs == {"dummy_scores": (15.0, 2), "scores": (15.0, 2)}
    assert outcome.scores == outcome.values


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ({"rewards": [1, None]}, (1.0, None)),  # bare, and null for what does not apply
        ({"rewards": [[0.5], [1.5]], "extra_logs": {"hits": 0.5, "note": "x"}}, (0.5, 1.5)),  # a column, as some models
    ],
)
def test_other_servers_of_the_contract_are_understood(content, values):
    with scripted(lambda body: (200, json.dumps(content).encode())) as server, client(server.url) as reward:
        outcome = reward(answers("a", "b"))
    assert outcome.values == values
    assert set(outcome.logs) <= {"hits"}


def test_batches_go_to_all_servers_and_come_back_in_order():
    with scripted(lengths) as one, scripted(lengths) as two:
        with client(one.url, two.url) as worker:
            reward = BatchedReward("far", [worker] * 2, batch_size=2, retries=0, on_failure="fail")
            outcome = reward(answers(*("x" * length for length in range(1, 8))))
        assert outcome.values == tuple(5.0 + length for length in range(1, 8))
        assert sorted((len(one.asked), len(two.asked))) == [2, 2]


def test_a_server_that_fails_is_left_alone_for_a_while():
    with scripted(lambda body: (500, b"broken")) as bad, scripted(lengths) as good:
        with client(bad.url, closed_port(), good.url) as reward:
            assert reward(answers("a")).values == (6.0,)
            for _ in range(4):
                reward(answers("a"))
        assert (len(bad.asked), len(good.asked)) == (1, 5)


def test_one_that_recovers_is_asked_again():
    fails = iter([True, True, False])
    with scripted(lambda body: (503, b"") if next(fails) else lengths(body)) as server, client(server.url) as reward:
        assert reward(answers("a")).values == (6.0,)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((500, b"out of memory"), "returned status 500: out of memory"),
        ((200, b"<html>"), "invalid JSON: '<html>'"),
        ((200, b'{"reward": [1]}'), "no list of rewards"),
        ((200, b'{"rewards": [1, 2, 3]}'), "3 rewards for 2 answers"),
        ((200, b'{"rewards": [1, NaN]}'), "the reward nan, which is not a finite number"),
        ((200, b'{"rewards": [1, "2"]}'), "the reward '2', which is not a finite number"),
    ],
)
def test_what_is_no_answer_is_tried_again_and_then_named(answer, problem):
    with scripted(lambda body: answer) as server, client(server.url) as reward:
        with pytest.raises(BatchFailed) as caught:
            reward(answers("a", "b"))
        assert len(server.asked) == 3
    for part in ("rewards.far", "prompts p0 to p1", server.url, problem):
        assert part in str(caught.value)
    assert caught.value.divisible


def test_a_server_that_hangs_costs_one_deadline_per_try():
    def hang(body: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(5)
        return lengths(body)

    with scripted(hang) as server, client(server.url, timeout_s=0.3, retries=1) as reward:
        start = time.monotonic()
        with pytest.raises(RewardError, match=r"took longer than 0\.3 s"):
            reward(answers("a"))
        assert time.monotonic() - start < 3


def test_a_server_that_dribbles_is_late_too():
    """Each byte comes in time, the answer does not."""
    listening = socket.create_server(("127.0.0.1", 0))

    def dribble() -> None:
        connection, _ = listening.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        try:
            for _ in range(100):
                connection.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            return

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    with client(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=0.4, retries=0) as reward:
        start = time.monotonic()
        with pytest.raises(RewardError, match="took longer"):
            reward(answers("a"))
        assert time.monotonic() - start < 2.5
    thread.join(10)
    listening.close()


@pytest.mark.parametrize(("status", "asked"), [(500, 3), (401, 1)])
def test_the_token_goes_with_the_request_and_into_no_message_and_a_wrong_one_is_not_tried_again(
    monkeypatch, caplog, status, asked
):
    monkeypatch.setenv("FAR_TOKEN", "s3cret")
    with scripted(lambda body: (status, b"no")) as server, client(server.url, token_env="FAR_TOKEN") as reward:
        with pytest.raises(BatchFailed, match=f"status {status}") as caught:
            reward(answers("a"))
        assert server.headers[0]["Authorization"] == "Bearer s3cret" and len(server.asked) == asked
    assert "s3cret" not in str(caught.value) + caplog.text
    assert caught.value.divisible == (status == 500)  # smaller batches would be refused, too


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"rewards\.far\.token_env = 'NO_SUCH_TOKEN'"):
        client("http://127.0.0.1:1", token_env="NO_SUCH_TOKEN")
