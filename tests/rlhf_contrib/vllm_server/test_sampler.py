"""The sampler over servers that speak vLLM's wire; against `vllm serve` itself in `test_vllm_serve`."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf_contrib.vllm_server import sampler as vllm_server_sampler
from rlhf_contrib.vllm_server.sampler import VllmServerSampler
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import ConfigError, SamplerLostError, SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.types import Completion, SamplingRequest, floats
from tests.rlhf_contrib.vllm_server.vllm_wire import Answer, Wire, completion, served

REQUESTS = [SamplingRequest((10, 11, 12 + index), seed=100 + index) for index in range(12)]
SAMPLING = SamplingConfig(max_tokens=5, temperature=0.7, top_k=20)
GENERATE = "/inference/v1/generate"
Opened = Callable[..., closing[VllmServerSampler]]
Wires = tuple[Wire, Wire]
Hanging = Callable[..., Answer | None]


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    with ExitStack() as stack:
        yield stack.enter_context(served(Wire())), stack.enter_context(served(Wire()))


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """A fault under which the routes in `of` answer only when the test has ended, or seed 5 of completions alone."""
    ended = threading.Event()

    def wait(route: str, body: Any, *, of: str = GENERATE, seed: int | None = None) -> Answer | None:
        if route == of and body and seed in (None, body.get("sampling_params", {}).get("seed")):
            ended.wait(10)
        return None

    yield wait
    ended.set()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:
    monkeypatch.setattr(vllm_server_sampler, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def opened(policies: tuple[Path, Path], tmp_path) -> Opened:
    """Return a function that opens a sampler of the first policy on servers, given as wires or by URL."""

    def on(*servers: Wire | str, **fields: Any) -> closing[VllmServerSampler]:
        urls = tuple(one if isinstance(one, str) else one.url for one in servers)
        folder = str(tmp_path / "weights")
        config = VllmServerSamplerConfig(urls=urls, weights_folder=folder, max_model_len=96, **fields)
        return closing(VllmServerSampler(policies[0], config))

    return on


def trained(policy: Path) -> Weights:
    payload = load_file(policy / "model.safetensors")
    return Weights(payload, weights_digest(payload))


def expected(wire: Wire, request: SamplingRequest) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return tokens and log-probabilities as the wire makes them, through no client of ours."""
    params = {"seed": request.seed, "max_tokens": SAMPLING.max_tokens}
    answer = completion({"token_ids": list(request.prompt_ids), "sampling_params": params}, wire.digest, wire.label)
    content = json.loads(json.dumps(answer))["choices"][0]["logprobs"]["content"]
    return tuple(one["token_id"] for one in content), floats([one["logprob"] for one in content])


def said(completion: Completion) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return completion.token_ids, completion.logprobs


# ---------------------------------------------------------------- sampling


def test_each_request_gets_its_own_tokens_and_logprobs_from_one_of_the_servers(wires, opened):
    with opened(*wires) as sampler:
        completions = sampler.generate(REQUESTS, SAMPLING)
    assert [said(one) for one in completions] == [expected(wires[0], request) for request in REQUESTS]
    assert {(one.policy_version, one.finish_reason) for one in completions} == {(0, "length")}
    shares = [wire.routes().count(GENERATE) - 1 for wire in wires]  # one each looks whether the route is there
    assert sum(shares) == 12
    assert min(shares) >= 3


def test_a_request_carries_what_decides_its_answer(wires, opened):
    with opened(wires[0]) as sampler:
        sampler.generate([SamplingRequest((10, 11), seed=7, max_tokens=3)], SAMPLING)
        sampler.generate([SamplingRequest((10, 11), seed=7)], SamplingConfig(temperature=0, top_p=0.5, max_tokens=2))
    drawn, greedy = [body for route, body in wires[0].asked if route == GENERATE and body]
    assert drawn == {
        "token_ids": [10, 11],
        "cache_salt": wires[0].label,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 20,
            "max_tokens": 3,
            "seed": 7,
            "logprobs": 0,
            "stop_token_ids": [4],
            "detokenize": False,
        },
    }
    assert greedy["sampling_params"] | {"seed": None, "top_p": 1.0, "temperature": 0.0} == greedy["sampling_params"]


def test_requests_that_join_later_get_the_same_answers(wires, opened):
    waiting = list(enumerate(REQUESTS))
    new, waiting = waiting[:4], waiting[4:]
    done: dict[int, Completion] = {}
    with opened(*wires) as sampler:
        while finished := sampler.advance(new, SAMPLING):
            done |= dict(finished)
            new, waiting = waiting[: len(finished)], waiting[len(finished) :]
        assert sampler.advance([], SAMPLING) == []
    assert [said(done[number]) for number in range(12)] == [expected(wires[0], request) for request in REQUESTS]


def test_what_is_still_being_sampled_is_dropped_by_the_next_batch(wires, opened, hanging):
    with opened(wires[0]) as sampler:
        wires[0].fault = partial(hanging, seed=5)
        sampler.advance([(0, SamplingRequest((10,), seed=5)), (1, REQUESTS[1])], SAMPLING)
        assert [said(one) for one in sampler.generate(REQUESTS[:1], SAMPLING)] == [expected(wires[0], REQUESTS[0])]
        assert sampler.advance([], SAMPLING) == []


def test_a_server_never_has_more_requests_than_it_may(wires, opened):
    wires[0].waits_for = 3
    with opened(wires[0], max_in_flight=3) as sampler:
        sampler.generate(REQUESTS, SAMPLING)
    assert wires[0].together == 3


# ---------------------------------------------------------------- weights


def test_new_weights_are_served_by_all_under_their_version(wires, opened, policies, tmp_path):
    weights = trained(policies[1])
    with opened(*wires) as sampler:
        before = sampler.generate(REQUESTS, SAMPLING)
        salt = wires[0].label
        for wire in wires:
            wire.asked.clear()
        sampler.load_weights(weights, version=3)
        assert [wire.digest for wire in wires] == [weights.digest] * 2
        after = sampler.generate(REQUESTS, SAMPLING)
        assert len(list((tmp_path / "weights").glob("*/*"))) == 1  # only the newest weights are kept
        assert sampler.accepts(policies[1])
        sampler.load_policy(policies[0])
        again = sampler.generate(REQUESTS, SAMPLING)
    assert wires[0].routes()[:5] == [
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/update_weight_version",
        "/resume",
    ]
    assert wires[0].asked[1][1] == {"new_version": "reloading"}
    assert {one.policy_version for one in after} == {3}
    assert {one.policy_version for one in again} == {0}
    assert [said(one) for one in after] != [said(one) for one in before] == [said(one) for one in again]
    assert wires[0].label != salt
    assert list((tmp_path / "weights").iterdir()) == []


def test_other_weights_than_those_that_were_sent_are_refused_and_never_sampled_from(wires, opened, policies):
    with opened(*wires) as sampler:
        with pytest.raises(SamplingError, match=rf"weights = '{wires[0].url}': the files in .* have the digest"):
            sampler.load_weights(Weights(load_file(policies[1] / "model.safetensors"), "0" * 64), version=3)
        assert {wire.label for wire in wires} == {"reloading"}
        assert [wire.routes()[-1] for wire in wires] == ["/resume"] * 2
        with pytest.raises(SamplerLostError, match="no server has the weights"):
            sampler.generate(REQUESTS[:1], SAMPLING)


def test_a_reload_that_the_engine_refuses_says_why(wires, opened, policies):
    def refuses(route: str, body: Any) -> Answer | None:
        return (500, {"error": "size mismatch"}) if route == "/collective_rpc" else None

    with opened(wires[0]) as sampler:
        wires[0].fault = refuses
        with pytest.raises(SamplingError, match=r"size mismatch.*serve the same architecture, and restart it"):
            sampler.load_weights(trained(policies[1]), version=1)


def test_weights_that_do_not_arrive_in_time_leave_the_server_out(wires, opened, hanging, policies, caplog):
    with opened(*wires) as sampler:
        sampler.config = sampler.config.model_copy(update={"load_timeout_s": 0.5})
        wires[1].fault = partial(hanging, of="/collective_rpc")
        sampler.load_weights(trained(policies[1]), version=1)
        assert f"{wires[1].url} took longer than 0.5 s to load" in caplog.text
        asked = len(wires[1].asked)
        assert len(sampler.generate(REQUESTS, SAMPLING)) == 12
        assert len(wires[1].asked) == asked
        wires[0].fault = partial(hanging, of="/collective_rpc")
        with pytest.raises(
            SamplerLostError, match=r"took longer than 0\.5 s to load; .* took longer than 0\.5 s to load"
        ):
            sampler.load_weights(trained(policies[1]), version=2)


# ---------------------------------------------------------------- servers that fail


def test_requests_of_a_server_that_is_lost_are_sent_to_another(wires, opened, policies, caplog):
    with ExitStack() as stack:
        mortal = Wire()
        running = stack.enter_context(ExitStack())
        running.enter_context(served(mortal))
        sampler = stack.enter_context(opened(mortal, wires[1]))
        running.close()
        completions = sampler.generate(REQUESTS, SAMPLING)
        assert [said(one) for one in completions] == [expected(wires[1], request) for request in REQUESTS]
        assert f"{mortal.url} cannot be reached" in caplog.text
        sampler.load_weights(trained(policies[1]), version=1)  # by those that are left
        assert {one.policy_version for one in sampler.generate(REQUESTS, SAMPLING)} == {1}
        wires[1].fault = lambda route, body: (503, {"error": "no memory"})
        with pytest.raises(SamplerLostError, match=rf"request \(seed 100\).*{wires[1].url} answered .* 503.*no memory"):
            sampler.generate(REQUESTS[:1], SAMPLING)


def test_a_server_that_restarted_with_other_weights_is_left_out(wires, opened, policies, caplog):
    with opened(*wires) as sampler:
        wires[0].label, wires[0].digest = "default", "another policy"
        completions = sampler.generate(REQUESTS, SAMPLING)
        assert [said(one) for one in completions] == [expected(wires[1], request) for request in REQUESTS]
        assert "sampled with the weights ['default'] instead of rlhf-" in caplog.text
        sampler.load_weights(trained(policies[1]), version=1)  # which brings it back
        assert wires[0].digest == wires[1].digest


def test_a_policy_that_has_diverged_is_no_answer(wires, opened):
    wire = wires[0]

    def diverged(route: str, body: Any) -> Answer | None:
        if route != GENERATE or not body:
            return None
        answer = completion(body, wire.digest, wire.label)
        answer["choices"][0]["logprobs"]["content"][2]["logprob"] = -9999.0  # vLLM's way to write a NaN
        return 200, answer

    with opened(wire) as sampler:
        wire.fault = diverged
        with pytest.raises(SamplingError, match=r"\(seed 100\)\.logprobs .* must be finite"):
            sampler.generate(REQUESTS[:1], SAMPLING)


def test_a_request_that_is_refused_is_not_sent_again(wires, opened):
    with opened(*wires) as sampler:
        for wire in wires:
            wire.asked.clear()
            wire.fault = lambda route, body: (400, {"error": "prompt is too long"})
        with pytest.raises(SamplingError, match=r"request \(seed 100\) = 'refused'.*prompt is too long"):
            sampler.generate(REQUESTS[:1], SAMPLING)
        assert sum(len(wire.asked) for wire in wires) == 1


def test_a_request_has_a_deadline(wires, opened, hanging):
    with opened(wires[0], request_timeout_s=0.3, retries=1) as sampler:
        wires[0].fault = hanging
        with pytest.raises(SamplerLostError, match=rf"{wires[0].url} took longer than 0\.3 s"):
            sampler.generate(REQUESTS[:1], SAMPLING)


# ---------------------------------------------------------------- how a server was started


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"logprobs_mode": "raw_logprobs"},
            "its logprobs_mode is raw_logprobs; start it with --logprobs-mode processed_l",
        ),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16; start it with --dtype float32"),
        (
            {"head_dtype": "bfloat16"},
            """its head_dtype is bfloat16; start it with --hf-overrides '{"head_dtype": "float32"}'""",
        ),
        ({"max_model_len": 64}, "its max_model_len is 64; start it with --max-model-len 96"),
    ],
)
def test_a_server_that_would_answer_otherwise_is_refused(settings, remedy, wires, opened, tmp_path):
    wires[0].settings |= settings
    with pytest.raises(ConfigError, match=remedy):
        opened(wires[0])
    assert not (tmp_path / "weights").exists()


def test_without_any_server_the_urls_are_named(opened):
    with pytest.raises(SamplerLostError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        opened("http://127.0.0.1:9")


def test_the_token_is_sent_and_must_be_set(wires, opened, monkeypatch):
    with pytest.raises(ConfigError, match=r"runtime\.sampler\.token_env = 'SERVERS_KEY': is not set"):
        opened(wires[0], token_env="SERVERS_KEY")
    monkeypatch.setenv("SERVERS_KEY", "secret")
    with opened(wires[0], token_env="SERVERS_KEY") as sampler:
        assert sampler.served_version == "0.32.0"
    assert {one.get("Authorization", one.get("authorization")) for one in wires[0].headers} == {"Bearer secret"}
