"""A reward function in a process of its own: it may hang, crash or print without harm to the run.

A process and not a thread: a regular expression that backtracks for ever holds the interpreter lock, and no thread of
the same process would live to see its deadline.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rlhf_core.errors import ConfigError, RewardError, explain
from rlhf_core.types import Generation

START_TIMEOUT_S = 120.0
"""For the interpreter and the imports of the function's module."""


class IsolatedReward:
    """A `RewardFunction` that runs `function` in a child process and gives each batch `timeout_s`.

    The process starts at construction (ConfigError if the function cannot be loaded) and is started anew after a batch
    that it did not survive. RewardError names the reward, the prompts and, where the function raised, its traceback.

    >>> with IsolatedReward("exact", "rlhf_core.rewards.verifiable:exact_match", timeout_s=5.0) as reward:
    ...     reward([])
    []
    """

    def __init__(self, name: str, function: str, *, timeout_s: float) -> None:
        self._name = name
        self._function = function
        self._timeout_s = timeout_s
        self._process = self._start()

    def __call__(self, generations: Sequence[Generation]) -> list[float]:
        """Return one float per generation."""
        if not generations:
            return []
        if self._process.poll() is not None:
            self._process = self._start()
        kind, answer = self._exchange(list(generations), timeout_s=self._timeout_s)
        if kind == "scores":
            return [float(value) for value in answer]
        ids = f"prompts {generations[0].prompt.id} to {generations[-1].prompt.id}"
        problem = {
            "raised": f"{self._function} raised:\n{answer}",
            "timeout": f"{self._function} took longer than {self._timeout_s:g} s for {len(generations)} generations",
            "died": f"the process of {self._function} ended with status {answer}",
        }[kind]
        raise RewardError(explain(f"rewards.{self._name}", ids, problem, "mend the function, or raise timeout_s"))

    def close(self) -> None:
        """End the process and all that it started."""
        _kill_group(self._process)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # unsent bytes for a process that is gone
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.rewards.worker", self._function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
            start_new_session=True,
        )
        kind, answer = self._exchange(None, timeout_s=START_TIMEOUT_S)
        if kind == "ready":
            return self._process
        self.close()
        if kind == "refused":
            raise ConfigError(f"rewards.{self._name}.{answer}")
        problem = "did not load" if kind == "died" else f"did not load within {START_TIMEOUT_S:g} s"
        raise ConfigError(
            explain(f"rewards.{self._name}.function", self._function, problem, "import it by hand to see why")
        )

    def _exchange(self, message: Any, *, timeout_s: float) -> tuple[str, Any]:
        """Send `message` (None: nothing) and return the answer; the watchdog kills a late process and its children."""
        process, expired = self._process, threading.Event()

        def expire() -> None:
            expired.set()
            _kill_group(process)

        watchdog = threading.Timer(timeout_s, expire)
        watchdog.daemon = True
        watchdog.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            if message is not None:
                pickle.dump(message, process.stdin)
                process.stdin.flush()
            answer: tuple[str, Any] = pickle.load(process.stdout)
            return answer
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            _kill_group(process)
            status = process.wait()
            return ("timeout", None) if expired.is_set() else ("died", status)
        finally:
            watchdog.cancel()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill `process` and its children: one that lives on would hold the pipe open, and a reader would wait for it."""
    if process.returncode is None:  # once reaped, the number may be another process's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
