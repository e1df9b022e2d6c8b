import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from rlhf_core.agents.endpoint import Endpoint, Session
from rlhf_core.http.serving import BodyLimits
from tests.rlhf_core.agents.scripted import chat
from tests.rlhf_core.agents.test_conversation import TOOL, SpelledEngine, with_tools

USER = {"role": "user", "content": "What is 3?"}
Work = Callable[[httpx.AsyncClient, Session, SpelledEngine], Awaitable[Any]]


def served(work: Work, *texts: str, cut: bool = False, template: Any = None, request_timeout_s: float = 20.0) -> Any:
    """Return what `work` does with a client of a session whose policy says `texts`."""

    async def run() -> Any:
        chosen = template or chat()
        engine = SpelledEngine(chosen, *texts, cut=cut)
        endpoint = Endpoint(chosen, request_timeout_s=request_timeout_s)
        try:
            async with endpoint.session(engine) as session:
                headers = {"Authorization": f"Bearer {session.api_key}"}
                async with httpx.AsyncClient(base_url=session.base_url, headers=headers, timeout=20.0) as client:
                    return await work(client, session, engine)
        finally:
            await endpoint.close()

    return asyncio.run(run())


async def asked(client: httpx.AsyncClient, route: str = "/chat/completions", **body: Any) -> httpx.Response:
    return await client.post(route, json={"model": "policy", "messages": [USER]} | body)


def test_a_chat_completion_says_its_tokens_and_log_probabilities():
    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        body = (await asked(client, logprobs=True, return_token_ids=True)).json()
        return body, session.conversation.turns[0], engine.asked[0]

    body, turn, prompt_ids = served(work, "It is 3.")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is 3."} and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == list(turn.answer.token_ids) and body["prompt_token_ids"] == list(prompt_ids)
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == list(turn.answer.logprobs)
    assert body["usage"]["completion_tokens"] == len(turn.answer.token_ids)


def test_a_plain_completion_says_its_tokens():
    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        body = {"prompt": [5, 6, 7], "logprobs": 0, "return_token_ids": True}
        return (await client.post("/completions", json=body)).json(), session.conversation.turns[0]

    body, turn = served(work, " 3")
    (choice,) = body["choices"]
    assert choice["text"] == " 3" and choice["token_ids"] == list(turn.answer.token_ids)
    assert choice["logprobs"]["token_logprobs"] == list(turn.answer.logprobs)
    assert choice["prompt_token_ids"] == [5, 6, 7]


def test_a_call_of_a_tool_is_one_of_the_protocol():
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    (choice,) = served(lambda client, *_: asked(client, tools=[TOOL]), said, template=with_tools()).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_stream_is_one_chunk_and_the_end():
    streamed = served(lambda client, *_: asked(client, stream=True), "It is 3.").text
    events = [line.removeprefix("data: ") for line in streamed.split("\n") if line]
    assert events[-1] == "[DONE]" and len(events) == 2
    chunk = json.loads(events[0])
    assert chunk["object"] == "chat.completion.chunk" and chunk["choices"][0]["delta"]["content"] == "It is 3."


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [({"Authorization": "Bearer guess"}, "", 401), ({}, "/../../unknown/v1", 404)],
    ids=["another key", "another session"],
)
def test_strangers_are_turned_away(headers, path, status):
    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        url = f"{session.base_url.rsplit('/session/', 1)[0]}/session/unknown/v1" if path else session.base_url
        return (await client.get(f"{url}/models", headers=headers)).status_code, (await client.get("/models")).json()

    given, models = served(work)
    assert given == status and models["data"][0]["id"] == "policy"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"n": 2}, "unsupported_parameter"),
        ({"stop": ["."]}, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter"),
        ({"messages": "Hi"}, "invalid_request"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ],
)
def test_what_would_change_a_turn_or_has_another_form_is_refused(body, code):
    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        response = await asked(client, **body)
        return response.status_code, response.json()["error"]["code"], engine.asked

    assert served(work, "3") == (400, code, [])


def test_how_tokens_are_drawn_is_not_the_clients_business(caplog):
    with caplog.at_level(logging.WARNING, logger="rlhf_core.agents.endpoint"):
        assert served(lambda client, *_: asked(client, temperature=0.0), "3").status_code == 200
    assert "temperature = 0.0: ignored" in caplog.text


def test_an_episode_that_ends_while_a_request_is_read_is_unknown():
    async def run() -> int:
        endpoint = Endpoint(chat(), request_timeout_s=20.0)
        ending = contextlib.AsyncExitStack()
        session = await ending.enter_async_context(endpoint.session(SpelledEngine(chat())))

        async def slowly() -> AsyncIterator[bytes]:
            yield json.dumps({"messages": [USER]}).encode()
            await asyncio.sleep(0.2)  # the server has the header by now, and waits for the end of the request
            await ending.aclose()

        headers = {"Authorization": f"Bearer {session.api_key}"}
        try:
            async with httpx.AsyncClient(base_url=session.base_url, headers=headers, timeout=20.0) as client:
                return (await client.post("/chat/completions", content=slowly())).status_code
        finally:
            await endpoint.close()

    assert asyncio.run(run()) == 404


def test_the_end_of_the_budget_is_an_error_that_clients_know():
    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        return (await asked(client)).json()["error"]["code"], session.conversation.cut

    assert served(work) == ("context_length_exceeded", True)


def test_a_request_has_a_deadline(monkeypatch):
    async def never(self: SpelledEngine, prompt_ids: tuple[int, ...], *, max_tokens: int = 0) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(SpelledEngine, "generate", never)
    assert served(lambda client, *_: asked(client), request_timeout_s=0.05).status_code == 504


def test_a_body_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("rlhf_core.agents.endpoint.BODY", BodyLimits(max_bytes=1000, timeout_s=0.3))

    async def work(client: httpx.AsyncClient, session: Session, engine: SpelledEngine) -> Any:
        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(5)

        large = await client.post("/chat/completions", content=b" " * 2000)
        slow = await client.post("/chat/completions", content=slowly())
        return large.status_code, slow.status_code, (await asked(client)).status_code

    assert served(work, "It is 3.") == (413, 408, 200)
