"""The interface of a user's environment for one episode: `reset` and `step`, plain or `async`.

It runs in a separate process. A failure there (an exception, a hang, a crash) ends the episode as failed: it is counted
and left out, never scored 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Observation = str | Sequence[Mapping[str, str]]
"""The text of the next user turn, or messages such as `[{"role": "tool", "content": "42"}]`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a turn of the policy.

    `reward` belongs to the turn; an episode earns their sum. `extras` are figures to log as `episode/<name>`; if
    several turns report the same name, the last value counts.

    >>> StepResult("higher", reward=0.1).done
    False
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    extras: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """One episode. Subclassing is not needed; both methods may be `async`, and there may be a `close()`.

    Use `async def` for methods that wait (on a server, for example), so that the episodes of a process wait at the same
    time. While the code runs, the global generators of `random`, `numpy` and `torch` belong to the episode alone,
    seeded from its seed.

    >>> class Echo(Environment):
    ...     def step(self, action, **info):
    ...         return StepResult(reward=float("4" in action), done=True)
    >>> Echo().step("It is 4.").reward
    1.0
    """

    def reset(self, prompt: Mapping[str, Any], seed: int) -> str | None:
        """Begin the episode; return an addition to the prompt's last user turn, or None.

        `prompt` holds `id`, `messages` (role, content), `label`, `source`, `text` (the rendered prompt), `sampling`
        and, where the label is a JSON object, its keys.
        """
        return None

    def step(self, action: str, **info: Any) -> StepResult:
        """Take the policy's turn as text. `info` has `turn` (from 0) and `truncated` (whether it was cut for its length)."""
        raise NotImplementedError
