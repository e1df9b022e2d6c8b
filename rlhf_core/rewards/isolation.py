"""Call a reward function in its own process, where it may hang, crash or print without harm to the run.

A process and not a thread: a regular expression that backtracks for ever holds the interpreter lock, and no thread of
the same process would live to see its deadline.

The child runs `python -m rlhf_core.rewards.isolation module:function settings` as a fork of the warm parent
(`rlhf_core.processes.warm`), which has imported our modules but never user code. It reads lists of batches and answers each
with a (kind, value) pair: the outcomes of the batches. It ends with the process that holds the other end of its input,
however that process ends and even if the function is running.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rlhf_core.errors import ConfigError, explain
from rlhf_core.processes.child import take_standard_streams
from rlhf_core.processes.guard import start_guard
from rlhf_core.processes.host import Ended, Host, send_message
from rlhf_core.processes.warm import start_warm
from rlhf_core.rewards.batches import BatchFailed, RewardOutcome, Worker, check_length, cut, joined
from rlhf_core.rewards.protocols import Adapted, AnyProtocol, adapt
from rlhf_core.schema.secrets import resolved
from rlhf_core.secrets.redaction import hide_in_logs, without_secrets
from rlhf_core.types import Generation
from rlhf_core.user_code.dependencies import check_functions
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.sources import user_code_environment
from rlhf_core.user_code.watch import watch_process

if TYPE_CHECKING:
    from rlhf_core.config.rewards import Compares

START_TIMEOUT_S = 120.0
"""For the interpreter and the imports of the function's module."""


class WorkerSettings(BaseModel):
    """Settings of the child besides the function's name; passed as JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    arguments: dict[str, Any] = {}
    """With references where there are secrets: everyone on the machine can read a command line."""
    protocol: AnyProtocol = "auto"
    code: dict[str, str] = {}
    """The digest that the function must have, if it is known: that by which the key of the stage was made."""
    notes: str = ""
    """File for reads of the function beyond its key; "" records none."""
    memory_bytes: int = 0
    """Most memory of the process; 0 sets no limit."""


@dataclass(eq=False)
class IsolatedReward(Worker):
    """A `Reward` that runs `function` in a child process and gives each call `timeout_s`.

    The process starts at construction (ConfigError if the function cannot be loaded) and is restarted after a call
    that it did not survive. BatchFailed names the reward, the prompts and, where the function raised, its traceback.
    Several batches of `batch_size` (0: one), cut as it `compares`, are put to an async function at a time.

    >>> with IsolatedReward("exact", "rlhf_core.rewards.verifiable:exact_match", timeout_s=5.0) as reward:
    ...     reward([])
    []
    """

    name: str
    function: str
    _: KW_ONLY
    timeout_s: float
    settings: WorkerSettings = WorkerSettings()
    batch_size: int = 0
    compares: Compares = "nothing"

    def __post_init__(self) -> None:
        self.is_async = self._start()

    def __call__(self, generations: Sequence[Generation]) -> list[float | None]:
        """One value per generation, None where the reward does not apply."""
        return list(self.outcome(generations).values)

    def outcome(self, generations: Sequence[Generation]) -> RewardOutcome:
        """Score the generations in the process: values and logs of the function."""
        if not generations:
            return RewardOutcome(())
        if self._host.process.poll() is not None:
            self._host.close()
            self.is_async = self._start()
        size = self.batch_size or len(generations)
        batches = [list(batch) for batch in cut(generations, size, compares=self.compares)]
        self._host.send(batches)
        kind, answer = self._answer(self.timeout_s)
        if kind == "outcomes":
            for outcome, batch in zip(answer, batches, strict=True):
                check_length(self.name, outcome, batch)
            return joined(answer)
        if kind == "refused":
            raise ConfigError(f"rewards.{self.name}.{answer}")
        raise self._failure(kind, answer, generations)

    def close(self) -> None:
        """End the process and all that it started."""
        self._host.close()

    def _failure(self, kind: str, answer: Any, generations: Sequence[Generation]) -> BatchFailed:
        last = str(answer).rstrip().splitlines()[-1:]  # of a traceback: the exception
        late = f"took longer than {self.timeout_s:g} s"
        problem, reason = {
            "raised": (f"{self.function} raised:\n{answer}", f"raised {' '.join(last)}"),
            "timeout": (f"{self.function} {late} for {len(generations)} generations", late),
            "unreadable": (
                f"{self.function} returned a value that cannot be read: {answer}",
                f"answer cannot be read: {answer}",
            ),
            "died": (f"the process of {self.function} ended with status {answer}", f"ended with status {answer}"),
        }[kind]
        ids = f"prompts {generations[0].prompt.id} to {generations[-1].prompt.id}"
        remedy = "fix the function, or raise timeout_s"
        return BatchFailed(explain(f"rewards.{self.name}", ids, problem, remedy), reason=reason)

    def _start(self) -> bool:
        """Start a process and wait until its function is loaded; return whether the function is async."""
        settings = self.settings.model_dump_json()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._host = Host(
            start_warm("rlhf_core.rewards.isolation", [self.function, settings], environment=user_code_environment()),
            received=self._answers.put,
        )
        kind, answer = self._answer(START_TIMEOUT_S)
        if kind == "ready":
            return bool(answer)
        self._host.close()
        if kind == "refused":
            raise ConfigError(f"rewards.{self.name}.{answer}")
        problem = "did not load" if kind == "died" else f"did not load within {START_TIMEOUT_S:g} s"
        remedy = "import it in a Python shell to see the error"
        raise ConfigError(f"rewards.{self.name}.function", self.function, problem, remedy)

    def _answer(self, timeout_s: float) -> tuple[str, Any]:
        """Wait for the process's next answer. If none comes, kill the process and describe its failure instead."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._host.close()
            return "timeout", None
        if isinstance(answer, Ended):
            status = self._host.close()
            return ("unreadable", answer.problem) if answer.problem else ("died", status)
        kind, value = answer
        return kind, value


# ---------------------------------------------------------------- the child process


def main(function: str, settings: WorkerSettings) -> None:
    """Serve the reward function until the input ends."""
    start_guard()
    hide_in_logs()
    answers, requests = take_standard_streams()
    try:
        arguments = resolved(settings.arguments, "arguments")
        loaded = load_callable("function", function, code=settings.code, notes=settings.notes)
        watch_process()
        reward = adapt(loaded, protocol=settings.protocol, arguments=arguments)
        check_functions(settings.code, key="function")
    except ConfigError as error:
        send_message(answers, ("refused", str(error)))
        return
    if settings.memory_bytes:
        # Allocations beyond it raise MemoryError, before the machine runs out. Memory that is mapped and never written
        # (libraries, reserved address space) does not count.
        resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, settings.memory_bytes))
    send_message(answers, ("ready", reward.is_async))
    with asyncio.Runner() as runner:  # one loop for all batches: a client that the function keeps belongs to it
        while True:
            try:
                batches = pickle.load(requests)
            except EOFError:
                return
            send_message(answers, _answer(reward, batches, runner))


def _answer(reward: Adapted, batches: Any, runner: asyncio.Runner) -> tuple[str, Any]:
    try:
        return "outcomes", reward.outcomes(batches, runner)
    except ConfigError as error:
        return "refused", str(error)
    except Exception:
        return "raised", without_secrets(traceback.format_exc())


if __name__ in ("__main__", "__mp_main__"):
    given = WorkerSettings.model_validate_json(sys.argv[2] if len(sys.argv) > 2 else "{}")
    if __name__ == "__main__":
        main(sys.argv[1], given)
    else:  # a process that the function has spawned: pickle looks for the function's module there
        load_callable("function", sys.argv[1], code=given.code, notes=given.notes)
