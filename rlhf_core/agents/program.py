"""Run a command per episode, which calls the policy as it would call OpenAI's server.

The command gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and the prompt as a line of JSON on its standard input. Its exit
status is 0 if the episode succeeded; its last line of output may hold the reward.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.agents.endpoint import MODEL, Endpoint
from rlhf_core.agents.programs import EpisodeFailed, Program, ProgramEngine, ProgramResult, ProgramSession, rewarded
from rlhf_core.config.agents import ProgramAgent
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import explain
from rlhf_core.processes.child import guarded_process
from rlhf_core.secrets.redaction import without_secrets

SESSION = ProgramSession
PROMPT_FIELDS = ("id", "messages", "source")
"""Fields of a prompt that a program receives unless it is given the label."""
SHOWN_CHARACTERS = 2000
"""Number of characters shown of a program's errors, counted from the end."""


def open_agent(config: ProgramAgent, *, tokenizer: str, **_: Any) -> Program:
    """Wrap the command as a program; all its episodes share one endpoint."""
    endpoint = Endpoint(ChatTemplate.load(Path(tokenizer)), request_timeout_s=config.request_timeout_s)

    async def program(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        async with endpoint.session(engine) as session:
            environment = dict(config.variables) | {
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "OPENAI_MODEL": MODEL,
                "RLHF_SEED": str(seed),
            }
            visible = {name: value for name, value in prompt.items() if config.give_label or name in PROMPT_FIELDS}
            status, output, errors = await run(config.command, environment, json.dumps(visible | {"seed": seed}))
            cut = session.conversation.cut
            # A program that fails because no token is left was cut; without `needs_reward` that is a valid end.
            if status != 0 and (config.needs_reward or not cut):
                raise EpisodeFailed(describe_failure(config.command, status, errors))
            result = ProgramResult(**earned("" if status else output), truncated=cut)
            return rewarded(result, needed=config.needs_reward)

    return program


async def run(command: tuple[str, ...], environment: Mapping[str, str], line: str) -> tuple[int, str, str]:
    """Run `command` with `line` as its input; return its exit status, output and errors."""
    async with guarded_process(command, environment=environment) as process:
        output, errors = await process.communicate(f"{line}\n".encode())
        status = await process.wait()
    return status, output.decode(errors="replace"), errors.decode(errors="replace")


def earned(output: str) -> dict[str, Any]:
    """Parse `rewards` and `extras` from a program's last line; no rewards unless it is a JSON object with a `reward`.

    >>> earned('thinking\\n{"reward": 1, "tries": 3}\\n')
    {'rewards': (1.0,), 'extras': {'tries': 3.0}}
    >>> earned("done")
    {'rewards': (), 'extras': {}}
    """
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        said = {}
    reward = said.pop("reward", None)
    extras = {name: float(value) for name, value in said.items() if isinstance(value, (int, float))}
    if reward is None:
        return {"rewards": (), "extras": extras}
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EpisodeFailed(
            explain("reward", reward, "the program's last line must hold a finite number", "fix the program")
        )
    return {"rewards": (float(reward),), "extras": extras}


def describe_failure(command: tuple[str, ...], status: int, errors: str) -> str:
    """Describe why a command's episode could not be played."""
    shown = without_secrets(errors.strip())[-SHOWN_CHARACTERS:]
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return explain("agent.command", list(command), f"{how}:\n{shown}", "run it by hand with a line of JSON as input")
