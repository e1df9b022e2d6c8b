"""Use environments of an OpenEnv server by its protocol: an episode is a session on `/ws`, the rest is HTTP.

The policy's turn becomes a field of an action, and a field of the observation becomes the next user turn. The server's
schemas define which fields. If the server rejects an action, the policy gets the error and the episode continues.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.programs import EpisodeFailed
from rlhf_core.agents.sessions import EnvironmentSession
from rlhf_core.config.agents import OpenEnvAgent, ServedAgent
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.secrets import bearer
from rlhf_core.types import label_fields

SESSION = EnvironmentSession
PROBE_TIMEOUT_S = 20.0  # per request at the start; a server that has loaded answers in milliseconds
MESSAGE_BYTES = 2**26  # of an observation; websockets allows 2**20, and pictures take more
ENVELOPE = ("done", "reward", "metadata")
"""Schema fields of the protocol, which are not part of the action or observation itself."""
WHOLE = "json"
"""Field name that means that the turn is the JSON of the whole action."""


class ServerMessage(BaseModel):
    """A message of the server."""

    type: str
    data: dict[str, Any]


class Observed(BaseModel):
    """Result of a reset or a step."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Wire:
    """Conversion of text to an action, and of an observation to text. `observation_field` "" means all of it (JSON)."""

    action_field: str
    action_is_text: bool
    observation_field: str

    def action(self, turn: str) -> dict[str, Any]:
        """Convert a turn to an action; ValueError if it must be JSON and is not."""
        if self.action_field == WHOLE:
            action = json.loads(turn)
            if not isinstance(action, dict):
                raise ValueError("the action must be a JSON object")
            return action
        return {self.action_field: turn if self.action_is_text else json.loads(turn)}

    def text(self, observation: Mapping[str, Any]) -> str:
        """Convert an observation to text for the policy; EpisodeFailed if it lacks the field."""
        if self.observation_field and self.observation_field not in observation:
            raise EpisodeFailed(f"the observation has no {self.observation_field!r}, only {sorted(observation)}")
        value = observation[self.observation_field] if self.observation_field else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


class OpenEnvEpisode:
    """One episode: `reset` opens a session, `close` ends it."""

    def __init__(self, config: OpenEnvAgent, wire: Wire) -> None:
        self._config = config
        self._wire = wire
        self._socket: ClientConnection | None = None
        self._rewarded = False

    async def reset(self, prompt: Mapping[str, Any], seed: int) -> str:
        """Open a session and reset it with the seed; returns the first observation."""
        address = f"ws{self._config.url.removeprefix('http').rstrip('/')}/ws"
        self._socket = await connect(address, additional_headers=authorization(self._config), max_size=MESSAGE_BYTES)
        given = label_fields(str(prompt["label"])) if self._config.give_label else {}
        observed = await self._ask("reset", given | self._config.reset_arguments | {"seed": seed})
        if observed.done:
            raise EpisodeFailed("it was over as soon as it was reset")
        return self._wire.text(observed.observation)

    async def step(self, action: str) -> StepResult:
        """Send the turn as an action; returns its result."""
        try:
            observed = await self._ask("step", self._wire.action(action))
        except (ValueError, InvalidAction) as error:
            return StepResult(f"error: {error}", extras={"invalid_actions": 1.0})
        self._rewarded = self._rewarded or observed.reward is not None
        if observed.done and self._config.needs_reward and not self._rewarded:
            raise EpisodeFailed("it ended without any reward (needs_reward = false takes rewards from elsewhere)")
        text = "" if observed.done else self._wire.text(observed.observation)
        return StepResult(text, observed.reward or 0.0, observed.done)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):  # a server may end a session itself
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        assert self._socket is not None
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            received = ServerMessage.model_validate_json(await self._socket.recv())
            if received.type == "observation":
                return Observed.model_validate(received.data)
        except ConnectionClosed as error:
            raise EpisodeFailed(f"the server closed the connection at the {kind}: {error}") from error
        except ValidationError as error:  # it is a ValueError, which `step` would blame on the policy's turn
            raise EpisodeFailed(f"the server answered {kind} with what its protocol does not know: {error}") from error
        code, message = received.data.get("code", "none"), received.data.get("message", received.data)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise InvalidAction(
                f"{message} {json.dumps(received.data['errors'])}" if "errors" in received.data else str(message)
            )
        if code == "CAPACITY_REACHED":
            message = f"{message}; let it serve as many sessions as episodes are played at a time (max_concurrent_envs)"
        raise EpisodeFailed(f"the server answered {kind} with {code}: {message}")


class InvalidAction(Exception):
    """The server rejected an action as invalid."""


def open_agent(config: OpenEnvAgent, **_: Any) -> Callable[[], OpenEnvEpisode]:
    """Probe the server and build a factory of episodes. ConfigError if its protocol or protocol version differs."""
    with httpx.Client(base_url=config.url, headers=authorization(config), timeout=PROBE_TIMEOUT_S) as client:
        health = get_object(client, "/health")
        if health.get("status") != "healthy":
            raise ConfigError("agent.url", config.url, f"the server reports {health}", "fix the server")
        schema = get_object(client, "/schema")
        said = str(get_object(client, "/metadata").get("version") or "")
    if config.version and said and said != config.version:
        raise ConfigError(
            "agent.version", config.version, f"the server at {config.url} is {said}", "change one of them"
        )
    return partial(OpenEnvEpisode, config, wire_of(config, schema))


def get_object(client: httpx.Client, path: str) -> dict[str, Any]:
    """GET `path` from the server and parse the JSON object; ConfigError if it has another form."""
    try:
        response = client.get(path)
        response.raise_for_status()
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        problem = f"GET {path} fails ({type(error).__name__}: {error})"
        raise ConfigError("agent.url", str(client.base_url), problem, "start the server there") from error
    if not isinstance(body, dict):
        raise ConfigError(
            "agent.url", str(client.base_url), f"{path} is not a JSON object", "see the server's protocol"
        )
    return body


def wire_of(config: OpenEnvAgent, schema: Mapping[str, Any]) -> Wire:
    """Choose the fields of the configuration, or else the only text fields of the schemas; ConfigError if ambiguous."""
    try:
        actions = own_fields(schema["action"])
        observations = own_fields(schema["observation"])
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"/schema has no schemas of action and observation ({error!r}): it is of another version of OpenEnv"
        raise ConfigError("agent.url", config.url, problem, "see docs/score.md") from error
    action = config.action_field or only_text(actions)
    if not action or (action != WHOLE and action not in actions):
        problem = f"the action's fields are {sorted(actions)}"
        raise ConfigError("agent.action_field", config.action_field, problem, nearest(action, [*actions, WHOLE]))
    observation = config.observation_field or only_text(observations)
    is_text = action == WHOLE or "string" in json.dumps(actions[action])
    return Wire(action, is_text, observation)


def own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> schema of the fields, without the fields of the protocol itself."""
    return {name: field for name, field in schema["properties"].items() if name not in ENVELOPE}


def only_text(fields: Mapping[str, Any]) -> str:
    """The name of the only text field; "" if the schema has none or several."""
    texts = [name for name, field in fields.items() if field.get("type") == "string"]
    return texts[0] if len(texts) == 1 else ""


def authorization(config: ServedAgent) -> dict[str, str]:
    """The headers for a server that requires a token; ConfigError if the token's variable is not set."""
    return bearer("agent.token_env", config.token_env)
