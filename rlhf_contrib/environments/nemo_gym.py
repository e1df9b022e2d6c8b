"""Use a NeMo Gym resources server by its protocol: this module is the agent, the server has tools and verifier.

An episode is `POST /seed_session` (its cookie identifies the session), `POST /<tool>` for each call that the policy
makes, and `POST /verify` with the whole conversation in the form of OpenAI's Responses. Each of the policy's items
carries its sampled tokens and log-probabilities. A sample that the server masks (`mask_sample`) has failed and has no
reward.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from rlhf_contrib.environments.openenv import PROBE_TIMEOUT_S, authorization, get_object
from rlhf_core.agents.conversation import ChatMessage, Conversation, PolicyTurn, ToolUse
from rlhf_core.agents.endpoint import MODEL
from rlhf_core.agents.programs import EpisodeCut, EpisodeFailed, Program, ProgramEngine, ProgramResult, ProgramSession
from rlhf_core.config.agents import NemoGymAgent
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import label_fields

SESSION = ProgramSession
ROUTES = ("/seed_session", "/verify")
SHOWN_CHARACTERS = 500
"""Maximum length of a server's error in messages."""


class Verified(BaseModel):
    """The fields of a `/verify` response that are read."""

    reward: float
    reward_components: dict[str, float] = {}
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


def open_agent(config: NemoGymAgent, *, tokenizer: str, **_: Any) -> Program:
    """Probe the server and wrap its episodes as a program. ConfigError if it is not a resources server."""
    with httpx.Client(base_url=config.url, headers=authorization(config), timeout=PROBE_TIMEOUT_S) as client:
        described = get_object(client, "/openapi.json")
    lacking = [route for route in ROUTES if route not in described.get("paths", {})]
    if lacking:
        raise ConfigError("agent.url", config.url, f"it lacks {lacking[0]}", "name a resources server")
    template = ChatTemplate.load(Path(tokenizer))

    async def program(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        task = task_of(prompt, label_field=config.label_field)
        async with httpx.AsyncClient(base_url=config.url, headers=authorization(config), timeout=None) as client:
            return await play(client, task, Conversation(template, engine))

    return program


async def play(client: httpx.AsyncClient, task: Mapping[str, Any], conversation: Conversation) -> ProgramResult:
    """Run one task; `client` keeps the session's cookie."""
    params = task["responses_create_params"]
    messages: list[dict[str, Any]] = [dict(message) for message in params["input"]]
    tools = [chat_tool(tool) for tool in params.get("tools", ())]
    items: list[dict[str, Any]] = []
    await posted(client, "/seed_session", task)
    try:
        while True:
            turn = await conversation.chat(messages, tools=tools)
            calls = items_of(turn, len(conversation.turns))
            items += calls
            if not turn.message.calls:
                break
            results = [await tool_result(client, call, tools) for call in turn.message.calls]
            messages.append(as_message(turn.message))
            messages += [{"role": "tool", "content": result} for result in results]
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": result}
                for call, result in zip(
                    (item for item in calls if item["type"] == "function_call"), results, strict=True
                )
            ]
    except EpisodeCut:
        conversation.cut = True  # the server judges the answer so far
    answer = await posted(client, "/verify", {**task, "response": response_of(params, items)})
    verified = Verified.model_validate(answer)
    if verified.mask_sample:
        raise EpisodeFailed(f"the server masks it: {verified.failure_kind}, {verified.failure_reason}")
    return ProgramResult((verified.reward,), verified.reward_components, truncated=conversation.cut)


def task_of(prompt: Mapping[str, Any], *, label_field: str) -> dict[str, Any]:
    """Build the task of a prompt: the keys of its label, and the prompt as `responses_create_params.input`.

    >>> task = task_of({"messages": [], "label": "4"}, label_field="expected_answer")
    >>> task
    {'expected_answer': '4', 'responses_create_params': {'input': []}}
    """
    task = label_fields(prompt["label"]) or ({label_field: prompt["label"]} if label_field else {})
    params = dict(task.get("responses_create_params", {}))
    params["input"] = list(prompt["messages"])
    return {**task, "responses_create_params": params}


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool from the Responses form to the chat form that templates expect."""
    if "function" in tool:
        return dict(tool)
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
    }


def as_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a turn of the policy to the chat message that repeats it."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in message.calls]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


async def tool_result(client: httpx.AsyncClient, call: ToolUse, tools: Sequence[Mapping[str, Any]]) -> str:
    """Call one of `tools`; an unknown tool or invalid arguments are reported to the policy."""
    names = [tool["function"]["name"] for tool in tools]
    if call.name not in names:  # otherwise the policy could call /verify
        return f"error: there is no tool {call.name}; {nearest(call.name, names)}"
    response = await client.post(f"/{call.name}", content=call.arguments, headers={"Content-Type": "application/json"})
    if response.status_code in (400, 422):
        return f"error: {response.text[:SHOWN_CHARACTERS]}"
    return checked(response).text


async def posted(client: httpx.AsyncClient, route: str, body: Mapping[str, Any]) -> Any:
    """POST `body` and parse the server's JSON response."""
    return checked(await client.post(route, json=body)).json()


def checked(response: httpx.Response) -> httpx.Response:
    """Pass `response` through; EpisodeFailed with the server's message if it is an error."""
    if response.is_error:
        said = without_secrets(response.text)[:SHOWN_CHARACTERS]
        raise EpisodeFailed(f"the server answered {response.request.url.path} with {response.status_code}: {said}")
    return response


def items_of(turn: PolicyTurn, number: int) -> list[dict[str, Any]]:
    """Convert a turn to output items; the first item carries the tokens of the whole turn."""
    items: list[dict[str, Any]] = []
    if turn.message.content or not turn.message.calls:
        content = [{"type": "output_text", "text": turn.message.content, "annotations": []}]
        items.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}
        )
    for index, call in enumerate(turn.message.calls):
        name = f"call_{number}_{index}"
        items.append(
            {
                "id": f"fc_{number}_{index}",
                "type": "function_call",
                "call_id": name,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    items[0] |= {
        "prompt_token_ids": list(turn.prompt_ids),
        "generation_token_ids": list(turn.answer.token_ids),
        "generation_log_probs": list(turn.answer.logprobs),
    }
    return items


def response_of(params: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The conversation as a Responses object."""
    return {
        "id": "resp_0",
        "created_at": 0.0,
        "model": MODEL,
        "object": "response",
        "output": list(items),
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"),
        "tools": list(params.get("tools", ())),
    }
