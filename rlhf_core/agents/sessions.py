"""Open a session for each episode of the child process, by the configuration's `type`.

A session has `begin(prompt, seed)`, then `step(...)` (environments) or `answer(...)` (programs), and `close()`; each
returns an event as (kind, value). The modules of other agents are in `AGENT_MODULES`, by their `type`.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.programs import ProgramSession
from rlhf_core.agents.tools import ToolEnvironment, load_tools
from rlhf_core.config.agent_modules import AGENT_MODULES
from rlhf_core.config.agents import AgentConfig, EnvironmentAgent, ToolsAgent
from rlhf_core.types import plain_text
from rlhf_core.user_code.modules import NO_DIGESTS, load_callable


@dataclass(frozen=True, slots=True)
class Sessions:
    """Opens a session per episode. `tools` are JSON schemas for the chat template."""

    open: Callable[[], Any]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def programs(self) -> bool:
        """Whether the sessions run programs, and not environments."""
        return isinstance(self.open(), ProgramSession)


class EnvironmentSession:
    """One episode of an environment."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._environment: Any = None
        self._wanted: frozenset[str] | None = None

    async def begin(self, prompt: Mapping[str, Any], seed: int) -> tuple[str, str | None]:
        """Create and reset the environment; return its addition to the prompt."""
        self._environment = self._make()
        self._wanted = wanted_keywords(self._environment.step)
        added = (
            await await_value(self._environment.reset(prompt, seed)) if hasattr(self._environment, "reset") else None
        )
        if added is not None and not isinstance(added, str):
            raise TypeError(f"reset returned a {type(added).__name__}; it must return a text or None")
        return "observed", None if added is None else plain_text(added)

    async def step(self, action: str, info: Mapping[str, Any]) -> tuple[str, StepResult]:
        """Take a turn; return its result."""
        passed = {name: value for name, value in info.items() if self._wanted is None or name in self._wanted}
        result = await await_value(self._environment.step(action, **passed))
        return "stepped", checked_step(result)

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await await_value(self._environment.close())


def open_sessions(
    config: AgentConfig, *, tokenizer: str, code: Mapping[str, str] = NO_DIGESTS, notes: str = ""
) -> Sessions:
    """Load the user's code. Raises ConfigError if it cannot be loaded, or has another digest than in `code`.

    Files that it reads beyond its key are noted in the file `notes`. `tokenizer` is a folder, read only by agents that
    tokenize.
    """
    match config:
        case EnvironmentAgent():
            make = load_callable("agent.environment", config.environment, code=code, notes=notes)
            return Sessions(partial(EnvironmentSession, partial(make, **config.arguments)))
        case ToolsAgent():
            tools = load_tools(config.tools, code=code, notes=notes)
            functions = {name: tool.function for name, tool in tools.items()}
            make = partial(ToolEnvironment, functions, max_tool_calls=config.max_tool_calls)
            return Sessions(partial(EnvironmentSession, make), tools=tuple(tool.schema for tool in tools.values()))
        case _:
            integration = importlib.import_module(AGENT_MODULES[config.type])
            opened = integration.open_agent(config, tokenizer=tokenizer, code=code, notes=notes)
            return Sessions(partial(integration.SESSION, opened))


async def await_value(value: Any) -> Any:
    """Await `value` if it is awaitable: methods may be plain or `async`."""
    return await value if inspect.isawaitable(value) else value


def wanted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the parameters of `function` after the first; None if it accepts any keyword."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters[1:])


def checked_step(result: Any) -> StepResult:
    """Check that `result` is a StepResult of the right shape, and convert its numbers to floats. Raises TypeError."""
    if not isinstance(result, StepResult):
        raise TypeError(f"step returned a {type(result).__name__}; it must return a StepResult")
    observation: Any = result.observation  # set by the user's code
    if isinstance(observation, str):
        observation = plain_text(observation)
    elif not isinstance(observation, Sequence):
        raise TypeError(f"step returned a {type(observation).__name__} as observation; it must return text or messages")
    else:
        observation = [{key: plain_text(turn[key]) for key in ("role", "content")} for turn in observation]
    extras = {plain_text(str(name)): float(value) for name, value in result.extras.items()}
    return StepResult(observation, float(result.reward), bool(result.done), extras)
