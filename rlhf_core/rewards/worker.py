"""Run a reward function in the child process of `rlhf_core.rewards.isolation`: `python -m rlhf_core.rewards.worker module:function [settings]`.

Reads pickled lists of batches from standard input and answers each with a pickled (kind, value) pair: the outcomes of
the batches. It ends with the process that holds the other end of its input, however that process ends and whatever the
function does then.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import sys
import traceback
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from rlhf_core.config.rewards import FunctionProtocol
from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import start_guard, take_standard_streams
from rlhf_core.rewards.protocols import Adapted, adapt
from rlhf_core.schema.secrets import resolved
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.user_code.dependencies import check_functions
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.watch import watch_process


class WorkerSettings(BaseModel):
    """Settings of the child beside the function's name; JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    arguments: dict[str, Any] = {}
    """With references where there are secrets: everyone on the machine can read a command line."""
    protocol: FunctionProtocol = "auto"
    code: dict[str, str] = {}
    """The digest that the function must have, if it is known: that by which the key of the stage was made."""
    notes: str = ""
    """File for reads of the function beyond its key; "" records none."""
    memory_bytes: int = 0
    """Most memory of the process; 0 sets no limit."""


def main(function: str, settings: WorkerSettings) -> None:
    """Serve the reward function until the input ends."""
    start_guard()
    answers, requests = take_standard_streams()
    try:
        arguments = resolved(settings.arguments, "arguments")
        loaded = load_callable("function", function, code=settings.code, notes=settings.notes)
        watch_process()
        reward = adapt(loaded, protocol=settings.protocol, arguments=arguments)
        check_functions(settings.code, key="function")
    except ConfigError as error:
        _send(answers, "refused", str(error))
        return
    _limit_memory(settings.memory_bytes)
    _send(answers, "ready", reward.is_async)
    with asyncio.Runner() as runner:  # one loop for all batches: a client that the function keeps belongs to it
        while True:
            try:
                batches = pickle.load(requests)
            except EOFError:
                return
            _send(answers, *_answer(reward, batches, runner))


def _answer(reward: Adapted, batches: Any, runner: asyncio.Runner) -> tuple[str, Any]:
    try:
        return "outcomes", reward.outcomes(batches, runner)
    except ConfigError as error:
        return "refused", str(error)
    except Exception:
        return "raised", without_secrets(traceback.format_exc())


def _limit_memory(limit: int) -> None:
    """Set a limit beyond which allocations raise MemoryError, before the machine runs out of memory.

    What is mapped and never written (libraries, reserved address space) does not count.
    """
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _send(answers: BinaryIO, kind: str, value: Any) -> None:
    pickle.dump((kind, value), answers)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], WorkerSettings.model_validate_json(sys.argv[2] if len(sys.argv) > 2 else "{}"))
