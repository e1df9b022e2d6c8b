"""Run environments in child processes: send calls, receive replies, replace processes that hang or crash."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from rlhf_core.agents.episode_rng import NO_EPISODE
from rlhf_core.agents.worker import Call, SessionEvent
from rlhf_core.config.agents import AgentConfig
from rlhf_core.errors import AgentError, ConfigError, explain
from rlhf_core.processes.guard import kill_group
from rlhf_core.processes.host import Ended, Host
from rlhf_core.processes.warm import start_warm
from rlhf_core.user_code.dependencies import check_file_digests
from rlhf_core.user_code.sources import user_code_environment

START_TIMEOUT_S = 300.0
"""Seconds for the interpreter and the imports of the user's module, which may be torch on a busy machine."""
GRACE_S = 2.0
"""Seconds after the deadline of a step. Code that does not `await` until then counts as hung, and its process is
killed."""

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an episode: a reply, or `lost` with its process; `blamed` if the episode is the reason."""

    ticket: int
    kind: str
    value: Any
    seconds: float = 0.0
    blamed: bool = True


class Environments:
    """Environments in `config.processes` processes, each episode known by a ticket.

    ConfigError if the user's code cannot be loaded, or has changed: `functions` and `files` are the digests from which
    the key of the stage was computed; other files that the code reads are noted in the file `notes`. `tokenizer` is the
    folder of a tokenizer, read only by agents that tokenize; `key` names the agent in errors.

    >>> with Environments(config, tokenizer="policy") as environments:            # doctest: +SKIP
    ...     ticket = environments.begin(prompt, seed=7)
    ...     environments.events(timeout_s=1.0)
    [Event(ticket=0, kind='observed', value=None, seconds=0.001, blamed=True)]
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        tokenizer: str,
        functions: Mapping[str, str] = MappingProxyType({}),
        files: Mapping[str, str] = MappingProxyType({}),
        notes: str = "",
        key: str = "agent",
    ) -> None:
        self.config = config
        self._key = key
        code = {name: functions[name] for name in config.callables() if name in functions}
        self._given = (config, tokenizer, code, notes, key)
        self._files = {name: files[name] for name in config.read_files() if name in files}
        self._inbox: queue.SimpleQueue[tuple[_Child, Any]] = queue.SimpleQueue()
        self._homes: dict[int, _Child] = {}
        self._tickets = 0
        self._children: list[_Child] = []
        try:
            for _ in range(config.processes):
                self._children.append(_Child(self._given, self._inbox))
            loaded = [child.ready() for child in self._children]
            self.tools, self.programs = loaded[0]
        except BaseException:
            self.close()
            raise

    def begin(self, prompt: Mapping[str, Any], seed: int, *, timeout_s: float) -> int:
        """Begin an episode; return its ticket. Tickets take turns among the processes.

        ConfigError if a file that is read for each episode has changed.
        """
        check_file_digests(self._files, key=self._key)
        ticket = self._tickets
        self._tickets += 1
        self._homes[ticket] = self._children[ticket % len(self._children)]
        self.call(ticket, "begin", prompt, seed, timeout_s=timeout_s)
        return ticket

    def call(self, ticket: int, verb: str, *arguments: Any, timeout_s: float) -> None:
        """Call a method of the episode's session; `events` returns its reply or the loss of its process."""
        if ticket in self._homes:
            self._homes[ticket].send(Call(ticket, verb, arguments, timeout_s))

    def end(self, ticket: int) -> None:
        """Forget the episode; its environment is closed."""
        child = self._homes.pop(ticket, None)
        if child is not None:
            child.send(Call(ticket, "end", (), self.config.step_timeout_s))

    def events(self, *, timeout_s: float) -> list[Event]:
        """Collect new events, waiting up to `timeout_s` for the first; a dead process is replaced."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            found += self._received(*self._inbox.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                found += self._received(*self._inbox.get_nowait())
        self._kill_the_hung()  # last: replies may have waited here for as long as the caller was busy
        return found

    def close(self) -> None:
        """End all processes and their children."""
        for child in self._children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self, child: _Child, message: SessionEvent | Ended) -> list[Event]:
        if isinstance(message, Ended):
            return self._lost(child) if child in self._children else []
        child.replied(message.ticket)
        if message.ticket not in self._homes:
            return []
        return [Event(message.ticket, message.kind, message.value, message.seconds)]

    def _lost(self, child: _Child) -> list[Event]:
        running = child.running()
        status = child.close()
        reason = child.verdict or f"its process ended with status {status}"
        lost = [ticket for ticket, home in self._homes.items() if home is child]
        blamed = set(child.owed) if running == NO_EPISODE else {running}  # a finished episode can hang while it closes
        self._children[self._children.index(child)] = fresh = _Child(self._given, self._inbox)
        fresh.ready()
        for ticket in lost:
            del self._homes[ticket]
        return [Event(ticket, "lost", reason, blamed=ticket in blamed) for ticket in lost]

    def _kill_the_hung(self) -> None:
        patience = self.config.step_timeout_s + GRACE_S
        for child in self._children:
            if child.silent_s() > patience and not child.verdict:
                child.verdict = f"it took longer than step_timeout_s = {self.config.step_timeout_s:g} without waiting"
                child.kill()


class _Child:
    """One process, and the state of its replies."""

    def __init__(
        self, given: tuple[AgentConfig, str, Mapping[str, str], str, str], inbox: queue.SimpleQueue[tuple[_Child, Any]]
    ) -> None:
        self._key = given[-1]
        self.owed: dict[int, None] = {}
        """Tickets of the episodes whose calls it has not answered, in order."""
        self.verdict = ""
        self._last_reply = time.monotonic()
        self._inbox = inbox
        self._started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loaded = False
        self._beacon = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._beacon.write(struct.pack("q", NO_EPISODE))
        self._beacon.flush()
        self._host = Host(
            start_warm(
                "rlhf_core.agents.worker",
                [str(self._beacon.fileno())],
                environment=user_code_environment(),
                pass_fds=(self._beacon.fileno(),),
            ),
            received=self._received,
        )
        self._host.send(given)

    def ready(self) -> tuple[tuple[dict[str, Any], ...], bool]:
        """Wait until the user's code is loaded; return the tools' schemas, and whether it plays programs.

        ConfigError if it cannot be loaded.
        """
        try:
            message = self._started.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            message = ("silent", f"did not load within {START_TIMEOUT_S:g} s")
        if not isinstance(message, Ended) and message[0] == "ready":
            loaded: tuple[tuple[dict[str, Any], ...], bool] = message[1]
            return loaded
        status = self.close()
        if isinstance(message, Ended):
            rule = "its process ended before the code was loaded"
            raise AgentError(self._key, status, rule, "see its error output")
        raise ConfigError(message[1] if message[0] == "refused" else explain(self._key, None, message[1], "fix it"))

    def send(self, call: Call) -> None:
        if call.verb != "end":
            if not self.owed:
                self._last_reply = time.monotonic()
            self.owed[call.ticket] = None
        self._host.send(call)

    def replied(self, ticket: int) -> None:
        self._last_reply = time.monotonic()
        self.owed.pop(ticket, None)

    def silent_s(self) -> float:
        """Seconds for which it has owed a reply without giving any."""
        return time.monotonic() - self._last_reply if self.owed else 0.0

    def running(self) -> int:
        """The ticket of the episode whose code ran last, NO_EPISODE if none was running."""
        return int(struct.unpack("q", os.pread(self._beacon.fileno(), 8, 0))[0])

    def kill(self) -> None:
        kill_group(self._host.process)

    def close(self) -> int:
        """Kill the process and its children; return its status."""
        status = self._host.close()
        self._beacon.close()
        return status

    def _received(self, message: Any) -> None:
        if not self._loaded:
            self._loaded = True
            self._started.put(message)
            return
        if isinstance(message, Ended) and message.problem:
            LOG.error("a reply of an agent's process cannot be unpickled: %s", message.problem)
            self.verdict = f"its reply cannot be read outside its process: {message.problem}"
        self._inbox.put((self, message))
