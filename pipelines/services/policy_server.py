"""Find the policy server of this state folder (`rlhf serve`), and its token."""

import os
from collections.abc import Mapping

from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import process_state
from rlhf_core.store.typed_json import Stored, read_stored


class ServingNote(Stored):
    """The served policy and its address."""

    url: str
    """Address for OpenAI clients, which ends in `/v1`."""
    name: str
    digest: str
    pid: int = 0
    """Process of the server's guard, which lives as long as the server; 0 in notes of earlier versions."""
    started: int = 0
    """Start time of that process: ids are used again."""


def serving(home: Home) -> ServingNote | None:
    """The policy server of this state folder, which had answered when it was noted; None if none is running.

    The address alone is no proof: once the server is gone, the port may be another user's. Its guard keeps the port.
    """
    note = read_stored(home.serving, ServingNote)
    if note is None or not note.pid or process_state(note.pid, note.started) == "gone":
        return None
    return note


def token_of(home: Home, token_env: str, environment: Mapping[str, str] = os.environ) -> str:
    """The token in the environment variable, or the one in the state folder's file for the owner alone."""
    if not token_env:
        return home.serve_token_string
    if not environment.get(token_env):
        raise ConfigError("--token-env", token_env, "this variable is not set", "set it, or leave the option out")
    return environment[token_env]
