"""The child process on its own: its protocol over the pipes."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from typing import Any

from rlhf_core.types import Completion, Generation, Message, Prompt


def answers(function: str, *requests: list[Generation]) -> list[tuple[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_core.rewards.worker", function],
        input=b"".join(pickle.dumps(request) for request in requests),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    stream, found = io.BytesIO(done.stdout), []
    while stream.tell() < len(done.stdout):
        found.append(pickle.load(stream))
    return found


def test_it_answers_each_request_and_ends_with_the_input() -> None:
    prompt = Prompt("p", (Message("user", "1+1?"),), "2", "test")
    right = Generation(prompt, (1,), Completion((2,), (-1.0,), "2", "stop", 0, 0))
    found = answers("rlhf_core.rewards.verifiable:exact_match", [right], [])
    assert found == [("ready", None), ("scores", [1.0]), ("scores", [])]


def test_it_refuses_a_function_that_is_not_there() -> None:
    ((kind, message),) = answers("rlhf_core.rewards.verifiable:nothing")
    assert kind == "refused"
    assert message.startswith("function = 'rlhf_core.rewards.verifiable:nothing'")
