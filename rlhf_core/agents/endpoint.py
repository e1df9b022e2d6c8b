"""Serve the policy at an OpenAI-compatible endpoint, for agents that only know that protocol.

It serves `/session/<id>/v1/chat/completions`, `.../completions` and `.../models` on 127.0.0.1, so that a base URL alone
identifies the episode of a request; the API key is the run's. The stage's configuration decides how tokens are sampled:
a client's temperature and the like are ignored with a warning, and parameters that would change the answer's form (`n`,
`stop`, ...) are refused.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Generator, Mapping
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlhf_core.agents.conversation import Conversation, PolicyTurn, RequestRefused
from rlhf_core.agents.programs import EpisodeCut, ProgramEngine
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.pieces import token_text
from rlhf_core.http.door import Door
from rlhf_core.http.serving import BodyLimits, BodyRefused, limited, read_body

MODEL = "policy"
"""The name under which `/models` lists the policy; any name is answered."""

IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, [], ""),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "echo": (None, False),
    "suffix": (None, ""),
}
"""Parameters that change the form of an answer, with their neutral values."""

BODY = BodyLimits()

LOG = logging.getLogger(__name__)


class CompletionRequest(BaseModel):
    """Fields of both kinds of request; further keys are checked by `check_parameters`."""

    model_config = ConfigDict(extra="allow")
    model: str = MODEL
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    return_token_ids: bool = False
    logprobs: bool | int | None = None

    @property
    def most_tokens(self) -> int:
        """The client's limit of the turn in tokens, 0 for none."""
        return self.max_completion_tokens or self.max_tokens or 0


class ChatCompletionRequest(CompletionRequest):
    """A request for a chat completion."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class TextCompletionRequest(CompletionRequest):
    """A request for a plain completion: text, or tokens, of one prompt."""

    prompt: str | list[int]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the process is not ours: its signals stay unchanged


class Session:
    """The address of an episode, and its conversation."""

    def __init__(self, base_url: str, api_key: str, conversation: Conversation) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.conversation = conversation


class Endpoint:
    """The server; it starts with the first session, on the event loop of that session.

    >>> async with endpoint.session(engine) as session:                   # doctest: +SKIP
    ...     openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    """

    def __init__(self, template: ChatTemplate, *, request_timeout_s: float) -> None:
        self._template = template
        self._request_timeout_s = request_timeout_s
        self._api_key = secrets.token_urlsafe(24)
        self._sessions: dict[str, Conversation] = {}
        self._warned: set[str] = set()
        self._address = ""
        self._serving: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def session(self, engine: ProgramEngine) -> AsyncIterator[Session]:
        """Open a session for an episode; after the block its address is no longer served."""
        self._start()
        name = secrets.token_hex(8)
        conversation = self._sessions[name] = Conversation(self._template, engine)
        try:
            yield Session(f"{self._address}/session/{name}/v1", self._api_key, conversation)
        finally:
            del self._sessions[name]

    async def close(self) -> None:
        """Stop serving."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None

    def _start(self) -> None:
        if self._serving is not None:
            return
        listening = socket.create_server(("127.0.0.1", 0))
        self._address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = _Server(limited(self.app(), lifespan="off"))
        # A separate context: the server is not part of the episode that happens to come first.
        self._serving = asyncio.get_running_loop().create_task(
            server.serve(sockets=[listening]), context=contextvars.Context()
        )

    def app(self) -> Door:
        """The application of all sessions, which needs the run's API key."""
        routes = [
            Route("/session/{name}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/session/{name}/v1/completions", self._complete, methods=["POST"]),
            Route("/session/{name}/v1/models", self._models, methods=["GET"]),
        ]
        return Door(Starlette(routes=routes), authorization=f"Bearer {self._api_key}")

    async def _models(self, request: Request) -> Response:
        refusal = self._unknown(request)
        return refusal or JSONResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlhf"}]}
        )

    async def _chat(self, request: Request) -> Response:
        async def answer(wanted: ChatCompletionRequest, conversation: Conversation) -> dict[str, Any]:
            turn = await conversation.chat(wanted.messages, tools=wanted.tools or (), max_tokens=wanted.most_tokens)
            return self._chat_reply(wanted, turn, f"chatcmpl-{request.path_params['name']}-{len(conversation.turns)}")

        return await self._answered(request, ChatCompletionRequest, answer)

    async def _complete(self, request: Request) -> Response:
        async def answer(wanted: TextCompletionRequest, conversation: Conversation) -> dict[str, Any]:
            turn = await conversation.continue_text(wanted.prompt, max_tokens=wanted.most_tokens)
            return self._text_reply(wanted, turn, f"cmpl-{request.path_params['name']}-{len(conversation.turns)}")

        return await self._answered(request, TextCompletionRequest, answer)

    async def _answered(self, request: Request, kind: Any, answer: Any) -> Response:
        refusal = self._unknown(request)
        if refusal is not None:
            return refusal
        try:
            wanted = kind.model_validate_json(await read_body(request, BODY))
            self._check_parameters(wanted)
            refusal = self._unknown(request)  # again: the episode may have ended while the request was read
            if refusal is not None:
                return refusal
            async with asyncio.timeout(self._request_timeout_s):
                reply = await answer(wanted, self._sessions[request.path_params["name"]])
        except BodyRefused as refused:
            return problem(refused.status, "invalid_request", str(refused))
        except ValidationError as error:
            return problem(400, "invalid_request", str(error))
        except RequestRefused as error:
            return problem(409 if error.code == "busy" else 400, error.code, str(error))
        except EpisodeCut as error:
            return problem(400, "context_length_exceeded", f"the episode is over: {error}")
        except TimeoutError:
            return problem(504, "timeout", f"no turn was sampled within {self._request_timeout_s:g} s")
        return (
            StreamingResponse(events(reply), media_type="text/event-stream") if wanted.stream else JSONResponse(reply)
        )

    def _unknown(self, request: Request) -> Response | None:
        if request.path_params["name"] not in self._sessions:
            return problem(404, "unknown_session", "there is no episode at this address, or it is over")
        return None

    def _check_parameters(self, wanted: CompletionRequest) -> None:
        given = wanted.model_extra or {}
        for name, harmless in REFUSED.items():
            if name in given and given[name] not in harmless:
                raise RequestRefused(
                    "unsupported_parameter", f"{name} = {given[name]!r} would change what a turn is; remove it"
                )
        for name in IGNORED:
            if given.get(name) is not None and name not in self._warned:
                self._warned.add(name)
                LOG.warning(
                    "an agent requested %s = %r: ignored, because `sampling` of the stage sets it", name, given[name]
                )

    def _chat_reply(self, wanted: ChatCompletionRequest, turn: PolicyTurn, name: str) -> dict[str, Any]:
        sampled, reason = turn.message, turn.answer.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": sampled.content}
        if sampled.calls:
            message["content"] = sampled.content or None
            message["tool_calls"] = [
                {"id": f"{name}-{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(sampled.calls)
            ]
        tokens = zip(self._texts(turn), turn.answer.logprobs)
        rows = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in tokens]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if sampled.calls and reason == "stop" else reason,
            "logprobs": {"content": rows} if wanted.logprobs else None,
        }
        return reply("chat.completion", wanted, turn, choice, name)

    def _text_reply(self, wanted: TextCompletionRequest, turn: PolicyTurn, name: str) -> dict[str, Any]:
        rows = {"tokens": self._texts(turn), "token_logprobs": list(turn.answer.logprobs)}
        choice = {
            "index": 0,
            "text": turn.answer.text,
            "finish_reason": turn.answer.finish_reason,
            # 0 returns the log-probabilities of the sampled tokens alone; no others are kept.
            "logprobs": None if wanted.logprobs is None or wanted.logprobs is False else rows,
        }
        return reply("text_completion", wanted, turn, choice, name)

    def _texts(self, turn: PolicyTurn) -> list[str]:
        tokenizer = self._template.tokenizer
        return [token_text(tokenizer, token, skip_special_tokens=False) for token in turn.answer.token_ids]


def reply(kind: str, wanted: CompletionRequest, turn: PolicyTurn, choice: dict[str, Any], name: str) -> dict[str, Any]:
    """The answer to a request; with `return_token_ids` it contains the tokens in the format of vLLM's server."""
    prompt, said = len(turn.prompt_ids), len(turn.answer.token_ids)
    body: dict[str, Any] = {
        "id": name,
        "object": kind,
        "created": 0,
        "model": wanted.model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said},
    }
    if wanted.return_token_ids:
        choice["token_ids"] = list(turn.answer.token_ids)
        (choice if kind == "text_completion" else body)["prompt_token_ids"] = list(turn.prompt_ids)
    return body


async def events(body: dict[str, Any]) -> AsyncIterator[str]:
    """Yield a whole answer as server-sent events: one chunk, and the end."""
    choice = dict(body["choices"][0])
    if "message" in choice:
        message = choice.pop("message")
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        body = body | {"object": "chat.completion.chunk"}
    yield f"data: {json.dumps(body | {'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def problem(status: int, code: str, message: str) -> JSONResponse:
    """An error in the format that OpenAI's clients parse."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status_code=status)
