"""The child process of `rlhf_core.rewards.isolation`: `python -m rlhf_core.rewards.worker module:function`.

Reads pickled lists of generations from standard input and answers each with a pickled (kind, value) pair.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any, BinaryIO

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.functions import as_floats, load_reward


def main(function: str) -> None:
    """Serve the reward function until the input ends."""
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
