"""Errors of the library. Every message reads *dotted key = value: rule; remedy*.

Each class is also the standard exception that it replaces, so callers may catch either.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rlhf_core.secrets.redaction import without_secrets


class RlhfError(Exception):
    """Anything that this library refuses or could not finish; the message says how to mend it, and holds no secrets."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(without_secrets(part) if isinstance(part, str) else part for part in arguments))


class ConfigError(RlhfError, ValueError):
    """A profile, an option or a model that cannot be used as given; raised before compute is spent."""


class DataError(RlhfError, ValueError):
    """Rows that cannot be read or used; names file, line and reason."""


class ArtifactError(RlhfError, RuntimeError):
    """The store could not read, verify or commit an artifact."""


class SamplingError(RlhfError, RuntimeError):
    """The sampler failed; names the request."""


class TrainingError(RlhfError, RuntimeError):
    """The trainer failed; names the role and the step."""


class WorkerLostError(RlhfError, RuntimeError):
    """A worker process, its node or Ray itself died or gave no answer: the run is in order, and can be tried again."""


class TrainerLostError(WorkerLostError, TrainingError):
    """The trainer's worker is gone."""


class SamplerLostError(WorkerLostError, SamplingError):
    """The sampler's worker is gone."""


class AgentError(RlhfError, RuntimeError):
    """The environments of an agent could not be run at all; an episode that failed is counted instead."""


class RewardError(RlhfError, RuntimeError):
    """A reward could not be computed; names the reward and the sample. A failed sample is never scored 0."""


def explain(key: str, value: object, rule: str, remedy: str) -> str:
    """Return the one message form of the library.

    >>> explain("ppo.kl_coef", -1, "must be >= 0", "use 0 to switch the penalty off")
    'ppo.kl_coef = -1: must be >= 0; use 0 to switch the penalty off'
    """
    return f"{key} = {value!r}: {rule}; {remedy}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the remedy for a misspelt name: the one of `names` that was probably meant, else all of them.

    >>> nearest("finl_number", ["final_number", "finished"])
    'did you mean final_number?'
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(sorted(names))}" if names else "check the spelling"
