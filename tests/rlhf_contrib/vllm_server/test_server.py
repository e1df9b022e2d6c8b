"""One server by its wire: what it must be able to do, and what of its answers is taken for a completion."""

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rlhf_contrib.vllm_server.sampler import Server, ServerFailed, generate_body, open_http_client
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.types import SamplingRequest
from tests.rlhf_contrib.vllm_server.vllm_wire import Answer, Wire, completion, served

GENERATE = "/inference/v1/generate"
BODY = generate_body(SamplingRequest((10, 11), seed=7), SamplingConfig(max_tokens=3), stops=(4,), salt="s")


@pytest.fixture
def wire() -> Iterator[Wire]:
    with served(Wire()) as one:
        yield one


def asked(url: str, call: Callable[[Server], Awaitable[Any]]) -> Any:
    """Return what `call` returns for the server at `url`."""

    async def run() -> Any:
        async with open_http_client({}, connections=2) as client:
            return await call(Server(url, client))

    return asyncio.run(run())


def generate(server: Server) -> Awaitable[tuple[list[int], list[float]]]:
    return server.generate(BODY, "default", timeout_s=20.0)


def answering(wire: Wire, **choice: Any) -> None:
    """Have completions differ in `choice`."""

    def changed(route: str, body: Any) -> Answer | None:
        answer = completion(body, wire.digest, wire.label)
        answer["choices"][0] |= choice
        return 200, answer

    wire.fault = changed


def test_the_tokens_and_their_log_probabilities_are_read_as_sent(wire):
    sent = completion(json.loads(json.dumps(BODY)), "", "default")["choices"][0]
    tokens, logprobs = asked(wire.url, generate)
    assert tokens == sent["token_ids"] and len(tokens) == 3
    assert logprobs == [one["logprob"] for one in sent["logprobs"]["content"]]


def test_what_json_cannot_hold_is_not_taken_for_a_number(wire):
    entries = [{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -0.5}]
    answering(wire, token_ids=[5, 6], logprobs={"content": entries})
    _, logprobs = asked(wire.url, generate)
    assert math.isnan(logprobs[0]) and logprobs[1] == -0.5


@pytest.mark.parametrize(
    ("choice", "problem", "refused"),
    [
        ({"finish_reason": "abort"}, r"aborted a completion \(abort\)", False),
        ({"token_ids": [1]}, "aborted a completion", False),
        ({"weight_versions": None}, "returned something other than a completion", True),
        ({"logprobs": None}, "returned something other than a completion", True),
    ],
)
def test_answers_that_are_no_completions_are_not_taken_for_some(choice, problem, refused, wire):
    answering(wire, **choice)
    with pytest.raises(ServerFailed, match=problem) as failed:
        asked(wire.url, generate)
    assert failed.value.refused == refused  # what is refused is asked of no other server


def test_a_completion_of_other_weights_makes_the_server_stale(wire):
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "newer", "start": 1, "end": 3}]
    answering(wire, weight_versions=spans)

    async def once(server: Server) -> bool:
        with pytest.raises(ServerFailed, match=r"weights \['default', 'newer'\] instead of default"):
            await generate(server)
        return server.stale

    assert asked(wire.url, once)


@pytest.mark.parametrize(("status", "refused"), [(400, True), (408, False), (429, False), (503, False)])
def test_what_may_pass_is_not_a_refusal(status, refused, wire):
    wire.fault = lambda route, body: (status, {"error": "the reason"})
    with pytest.raises(ServerFailed, match=rf"answered {GENERATE} with {status}: .*the reason") as failed:
        asked(wire.url, generate)
    assert failed.value.refused == refused


def test_every_call_has_its_deadline(wire):
    release = threading.Event()

    def hangs(route: str, body: Any) -> Answer | None:
        release.wait(20)
        return None

    wire.fault = hangs
    try:
        with pytest.raises(ServerFailed, match=rf"took longer than 0\.2 s for {GENERATE}"):
            asked(wire.url, lambda server: server.generate(BODY, "default", timeout_s=0.2))
    finally:
        release.set()


def test_a_load_that_is_refused_leaves_the_server_answering_under_nobodys_version(wire, tmp_path):
    def refuses(route: str, body: Any) -> Answer | None:
        return (200, {"results": [["the digest is another"]]}) if route == "/collective_rpc" else None

    wire.fault = refuses
    with pytest.raises(SamplingError, match="the digest is another"):
        asked(wire.url, lambda server: server.load(str(tmp_path), "0" * 64, "rlhf-1"))
    assert wire.routes() == ["/pause", "/update_weight_version", "/collective_rpc", "/resume"]
    assert wire.label == "reloading"


@pytest.mark.parametrize(
    ("route", "answer", "remedy"),
    [
        ("/collective_rpc", (404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", (500, {"error": "no attribute 'settings'"}), "--worker-extension-cls"),
        (GENERATE, (403, {"error": "disabled"}), "--enable-scale-out"),
        (GENERATE, (401, {"error": "Unauthorized"}), r"runtime\.sampler\.token_env"),
    ],
)
def test_a_server_that_lacks_a_route_is_refused_with_the_option_that_adds_it(route, answer, remedy, wire):
    config = VllmServerSamplerConfig(urls=(wire.url,), weights_folder="/weights", max_model_len=96)
    assert asked(wire.url, lambda server: server.check(config)) == "0.32.0"
    wire.fault = lambda asked, body: answer if asked == route else None
    with pytest.raises(ConfigError, match=remedy):
        asked(wire.url, lambda server: server.check(config))
