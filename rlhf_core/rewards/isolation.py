"""Call a reward function in its own process, where it may hang, crash or print without harm to the run.

A process and not a thread: a regular expression that backtracks for ever holds the interpreter lock, and no thread of
the same process would live to see its deadline.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from rlhf_core.config.rewards import Compares
from rlhf_core.errors import ConfigError, explain
from rlhf_core.processes.child import kill_group
from rlhf_core.rewards.batches import BatchFailed, RewardOutcome, check_length, cut, joined_scores, merged_logs
from rlhf_core.rewards.worker import WorkerSettings
from rlhf_core.types import Generation
from rlhf_core.user_code.sources import search_path

START_TIMEOUT_S = 120.0
"""For the interpreter and the imports of the function's module."""

STATUS_TIMEOUT_S = 5.0
"""For a process that has closed its pipe to end."""


class IsolatedReward:
    """A `Reward` that runs `function` in a child process and gives each call `timeout_s`.

    The process starts at construction (ConfigError if the function cannot be loaded) and is restarted after a call
    that it did not survive. BatchFailed names the reward, the prompts and, where the function raised, its traceback.
    Several batches of `batch_size` (0: one), cut as it `compares`, are put to an async function at a time.

    >>> with IsolatedReward("exact", "rlhf_core.rewards.verifiable:exact_match", timeout_s=5.0) as reward:
    ...     reward([])
    []
    """

    def __init__(
        self,
        name: str,
        function: str,
        *,
        timeout_s: float,
        settings: WorkerSettings = WorkerSettings(),
        batch_size: int = 0,
        compares: Compares = "nothing",
    ) -> None:
        self._name = name
        self._function = function
        self._settings = settings
        self._timeout_s = timeout_s
        self._batch_size = batch_size
        self._compares: Compares = compares
        self._process, self.is_async = self._start()

    def __call__(self, generations: Sequence[Generation]) -> list[float | None]:
        """Return one value per generation, None where the reward does not apply."""
        return list(self.outcome(generations).values)

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Return the values and the logs of the function."""
        if not generations:
            return RewardOutcome(())
        if self._process.poll() is not None:
            self._process, self.is_async = self._start()
        size = self._batch_size or len(generations)
        batches = [list(batch) for batch in cut(generations, size, compares=self._compares)]
        kind, answer = self._exchange(self._process, batches, timeout_s=self._timeout_s)
        if kind == "outcomes":
            return self._joined(answer, batches)
        if kind == "refused":
            raise ConfigError(f"rewards.{self._name}.{answer}")
        raise self._failure(kind, answer, generations)

    def close(self) -> None:
        """End the process and all that it started."""
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failure(self, kind: str, answer: Any, generations: Sequence[Generation]) -> BatchFailed:
        last = str(answer).rstrip().splitlines()[-1:]  # of a traceback: the exception
        late = f"took longer than {self._timeout_s:g} s"
        problem, reason = {
            "raised": (f"{self._function} raised:\n{answer}", f"raised {' '.join(last)}"),
            "timeout": (f"{self._function} {late} for {len(generations)} generations", late),
            "unreadable": (
                f"{self._function} returned a value that cannot be read: {answer}",
                f"answer cannot be read: {answer}",
            ),
            "died": (f"the process of {self._function} ended with status {answer}", f"ended with status {answer}"),
        }[kind]
        ids = f"prompts {generations[0].prompt.id} to {generations[-1].prompt.id}"
        remedy = "fix the function, or raise timeout_s"
        return BatchFailed(explain(f"rewards.{self._name}", ids, problem, remedy), reason=reason)

    def _joined(self, outcomes: Sequence[RewardOutcome], batches: Sequence[Sequence[Generation]]) -> RewardOutcome:
        """Return the outcomes of the batches as one; BatchFailed if one has not a value for each generation."""
        for outcome, batch in zip(outcomes, batches, strict=True):
            check_length(self._name, outcome, batch)
        values = tuple(value for outcome in outcomes for value in outcome.values)
        logs = merged_logs([outcome.logs for outcome in outcomes])
        return RewardOutcome(values, logs=logs, scores=joined_scores(outcomes))

    def _start(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Return a new process that is ready, and whether its function is async."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "rlhf_core.rewards.worker",
            self._function,
            self._settings.model_dump_json(),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path())},
            start_new_session=True,
        )
        kind, answer = self._exchange(process, None, timeout_s=START_TIMEOUT_S)
        if kind == "ready":
            return process, bool(answer)
        _end(process)
        if kind == "refused":
            raise ConfigError(f"rewards.{self._name}.{answer}")
        problem = "did not load" if kind == "died" else f"did not load within {START_TIMEOUT_S:g} s"
        raise ConfigError(
            explain(
                f"rewards.{self._name}.function",
                self._function,
                problem,
                "import it in a Python shell to see the error",
            )
        )

    def _exchange(self, process: subprocess.Popen[bytes], message: Any, *, timeout_s: float) -> tuple[str, Any]:
        """Send `message` (None: nothing) and return the answer; the watchdog kills a late process and its children."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_group(process)

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
            if not expired.is_set():
                _await_status(process)
            _end(process)
            return ("timeout", None) if expired.is_set() else ("died", process.returncode)
        except Exception as error:  # whatever making the objects again raises: a class that only the child can import
            _end(process)
            return ("timeout", None) if expired.is_set() else ("unreadable", repr(error))
        finally:
            watchdog.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `process` with all that it started, and let go of its pipes."""
    kill_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # unsent bytes for a process that is gone
            pipe.close()


def _await_status(process: subprocess.Popen[bytes]) -> None:
    """Wait a moment for a process whose pipe has closed to end by itself, or its status would be that of our kill.

    It is not reaped, so that its group can still be killed by its number.
    """
    deadline = time.monotonic() + STATUS_TIMEOUT_S
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)
