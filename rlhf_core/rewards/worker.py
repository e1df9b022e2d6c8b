"""The child process of `rlhf_core.rewards.isolation`: `python -m rlhf_core.rewards.worker module:function`.

Reads pickled lists of generations from standard input and answers each with a pickled (kind, value) pair. It lives no
longer than whoever holds the other end of its input, however that one ends and whatever the function does then.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
from typing import Any, BinaryIO

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.functions import as_floats, load_reward

GUARD_LOOKS_EVERY_MS = 1000


def main(function: str) -> None:
    """Serve the reward function until the input ends."""
    _start_guard()
    answers, requests = _take_standard_streams()
    try:
        reward = load_reward(function)
    except ConfigError as error:
        _send(answers, "refused", str(error))
        return
    _send(answers, "ready", None)
    while True:
        try:
            generations = pickle.load(requests)
        except EOFError:
            return
        try:
            scores = as_floats(reward, generations)
        except Exception:
            _send(answers, "raised", traceback.format_exc())
        else:
            _send(answers, "scores", scores)


def _start_guard() -> None:
    """Fork a process that kills our group when nobody holds the other end of our input any more, or when we are gone.

    A process and not a thread: the function may hold the interpreter lock for ever. It is one of the group that
    `isolation` kills at the end. Polling for nothing reports the end alone and leaves the requests to us.
    """
    worker = os.getpid()
    if os.getpgrp() != worker or os.fork() != 0:  # in a group of somebody else's there would be more to kill
        return
    for descriptor in (1, 2):  # or a reader would wait for us to end
        os.close(descriptor)
    poll = select.poll()
    poll.register(0, 0)
    while not poll.poll(GUARD_LOOKS_EVERY_MS) and os.getppid() == worker:
        continue
    os.killpg(0, signal.SIGKILL)


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep both pipes for ourselves: what the function prints goes to standard error, what it reads is empty."""
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return answers, requests


def _send(answers: BinaryIO, kind: str, value: Any) -> None:
    pickle.dump((kind, value), answers)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
