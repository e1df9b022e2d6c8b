"""Corrected faults, and the configurations whose earlier results they may have touched.

A stage's version is raised when all its results may be wrong. A correction here enters the keys of some configurations only:
results of others stay hits. Entries are never removed or renamed, because keys would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Correction:
    """A corrected fault: the stages where it was possible, whether a part of a configuration had it, and the reason."""

    stages: tuple[str, ...]
    touches: Callable[[Table], bool]
    about: str


_UNTOUCHED = {
    *(f"rlhf_core.rewards.verifiable:{name}" for name in ("think_format", "boxed_format", "finished")),
    *(f"rlhf_core.rewards.library.text:{name}" for name in ("regex_match", "length_target")),
    *(f"rlhf_core.rewards.library.text:{name}" for name in ("overlong_penalty", "repetition_penalty")),
    "rlhf_core.rewards.library.structure:think_format",
    *(f"rlhf_core.rewards.library.instructions:{name}" for name in ("instructions_followed", "on_topic")),
    "rlhf_core.rewards.library.reasoning_gym:reasoning_gym_reward",
}

_CODE = ("rlhf_contrib.sandbox.code:code_reward", "rlhf_core.rewards.library.code:code_reward")
_WORLDS = ("rlhf_contrib.worlds.", "rlhf_core.data.worlds.")


def _calls_function(part: Table) -> bool:
    named = {value for name in ("function", "gold") if isinstance(value := part.get(name), str) and ":" in value}
    return any(one not in _UNTOUCHED and not one.startswith(_WORLDS) for one in named)


CORRECTIONS: dict[str, Correction] = {
    "judges": Correction(
        ("score", "ppo", "collect_preferences", "evaluate_suite"),
        lambda part: part.get("type") == "judge",
        "judges: scores on another scale, in nested JSON or in a reply that was cut off were read",
    ),
    "functions": Correction(
        ("score", "ppo", "evaluate", "evaluate_suite"),
        _calls_function,
        "reward functions: labels in other spellings, code fences, programs that call exit() or run on a busy machine, and spawned processes got 0",
    ),
    "tool_calls": Correction(
        ("generate", "ppo", "distill"),
        lambda part: part.get("type") == "tools",
        "tools: calls with `args` or `parameters` for `arguments` were made without arguments",
    ),
    "code_tests": Correction(
        ("score", "ppo", "evaluate", "evaluate_suite"),
        lambda part: any(part.get(name) in _CODE for name in ("function", "gold")),
        "code_reward: programs could change the values that their tests compared with",
    ),
    "filtered_replies": Correction(
        ("synthesize",),
        lambda part: isinstance(part.get("server"), Mapping),
        "replies that a filter of the server cut off were kept",
    ),
}


def corrections(stage: str, config: Table) -> list[str]:
    """The names of corrections that may have touched earlier results of a stage with this configuration.

    >>> corrections("score", {"terms": {"helpful": {"type": "judge"}}}), corrections("sft", {"type": "judge"})
    (['judges'], [])
    """
    parts = list(_parts(config))
    return [name for name, one in CORRECTIONS.items() if stage in one.stages and any(map(one.touches, parts))]


def _parts(value: Any) -> Iterator[Table]:
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from _parts(inner)
