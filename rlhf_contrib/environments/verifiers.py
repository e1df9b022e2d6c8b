"""Use environments of `verifiers`, which run in another interpreter and call the policy at a local endpoint.

One process of `verifiers_runner` plays all episodes of one of our processes. It is restarted if it ends; the episodes
in progress have failed then.
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import os
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_contrib.environments import verifiers_runner
from rlhf_core.agents.endpoint import MODEL, Endpoint
from rlhf_core.agents.programs import EpisodeFailed, Program, ProgramEngine, ProgramResult, ProgramSession
from rlhf_core.config.agents import VerifiersAgent
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import OUR_OWN, guarded
from rlhf_core.processes.guard import kill_group
from rlhf_core.processes.host import Ended, Host, JsonLines, start_command
from rlhf_core.types import label_fields

SESSION = ProgramSession
START_TIMEOUT_S = 100.0
"""Seconds for starting the interpreter, importing `verifiers` and loading the environment's data."""
PING_TIMEOUT_S = 10.0
"""Seconds until a ping must be answered. If not, the interpreter hangs in the environment's code and is killed."""

LOG = logging.getLogger(__name__)


class RunnerEnded(EpisodeFailed):
    """The interpreter ended while an episode was being played."""


class Runner:
    """A process of `verifiers_runner`; ConfigError if the environment cannot be loaded there or its version differs."""

    def __init__(self, config: VerifiersAgent) -> None:
        self._config = config
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | Ended]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart: asyncio.Task[None] | None = None
        self._ping: asyncio.Task[None] | None = None
        self._host = self._start()

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Play one episode; EpisodeFailed if it could not be played, RunnerEnded if the process ended."""
        self._loop = asyncio.get_running_loop()
        if self._ended or self._host.process.poll() is not None:
            await self._started_again(self._loop)
        try:
            reply = await self._asked(self._loop, request)
        except asyncio.CancelledError:  # it took too long: the runner may hang
            if self._ping is None or self._ping.done():
                # A separate context, as for a restart: the ping is not part of the first episode that needs it.
                self._ping = self._loop.create_task(self._kill_if_hung(self._loop), context=contextvars.Context())
            raise
        if "error" in reply:
            raise EpisodeFailed(f"{self._config.environment}: {reply['error']}")
        return reply

    async def _started_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a new process, shared by all waiting episodes even if the first of them gives up."""

        async def start() -> None:
            try:
                await asyncio.to_thread(self._host.close)
                self._host = await asyncio.to_thread(self._start)
            finally:
                self._restart = None

        if self._restart is None:
            self._restart = loop.create_task(start(), context=contextvars.Context())
        await asyncio.shield(self._restart)

    async def _asked(self, loop: asyncio.AbstractEventLoop, request: Mapping[str, Any]) -> dict[str, Any]:
        number, self._numbers = self._numbers, self._numbers + 1
        answer = self._waiting[number] = loop.create_future()
        try:
            self._host.send({"id": number, **request})
            reply: dict[str, Any] | Ended = Ended() if self._ended else await answer
        finally:
            self._waiting.pop(number, None)
        if isinstance(reply, Ended):
            raise RunnerEnded(f"{self._config.environment}: its interpreter has exited")
        return reply

    async def _kill_if_hung(self, loop: asyncio.AbstractEventLoop) -> None:
        process = self._host.process
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                with contextlib.suppress(RunnerEnded):
                    await self._asked(loop, {"ping": True})
        except TimeoutError:
            LOG.warning("%s blocks its event loop: restarting its interpreter", self._config.environment)
            kill_group(process)

    def _start(self) -> Host:
        """Start a new process and wait until it has loaded the environment."""
        self._ended = False
        own, held = os.pipe()
        first: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def received(message: Any) -> None:
            if isinstance(message, Ended):
                self._ended = True  # before the callers are notified: the next episode starts another process
                os.close(held)  # its guard kills what is left of it
                first.put({"refused": "its interpreter exited immediately; see its error output"})
                for number in list(self._waiting):
                    self._hand_on(number, message)
            elif "id" in message:
                self._hand_on(message["id"], message)
            else:
                first.put(message)

        host = Host(
            start_command(
                guarded([self._config.python, verifiers_runner.__file__], own),
                environment={name: value for name, value in os.environ.items() if name not in OUR_OWN},
                pass_fds=(own,),
            ),
            received=received,
            codec=JsonLines(),
        )
        os.close(own)
        folders = [str(Path(folder).resolve()) for folder in self._config.folders]
        host.send({"environment": self._config.environment, "arguments": self._config.arguments, "folders": folders})
        try:
            self._check(first.get(timeout=START_TIMEOUT_S))
        except (queue.Empty, ConfigError) as error:
            host.close()
            if isinstance(error, ConfigError):
                raise
            self._check({"refused": f"it did not load within {START_TIMEOUT_S:g} s"})
        return host

    def _check(self, said: Mapping[str, Any]) -> None:
        if "refused" in said:
            where = f"could not be loaded by {self._config.python}: {said['refused']}"
            remedy = "try to load it there by hand"
            raise ConfigError("agent.environment", self._config.environment, where, remedy)
        wanted, found = self._config.version, str(said["version"])
        if wanted and f"{found}.".find(f"{wanted}.") != 0:
            problem = f"{self._config.python} has verifiers {found}"
            raise ConfigError("agent.version", wanted, problem, "install that version, or change this")

    def _hand_on(self, number: int, reply: dict[str, Any] | Ended) -> None:
        def settle() -> None:
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(reply)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(settle)


def open_agent(config: VerifiersAgent, *, tokenizer: str, **_: Any) -> Program:
    """Load the environment in its interpreter and wrap its episodes as a program."""
    runner = Runner(config)
    endpoint = Endpoint(ChatTemplate.load(Path(tokenizer)), request_timeout_s=config.request_timeout_s)

    async def program(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        async with endpoint.session(engine) as session:
            request = {
                "base_url": session.base_url,
                "api_key": session.api_key,
                "model": MODEL,
                "messages": prompt["messages"],
                "task": label_fields(prompt["label"]) or {"answer": prompt["label"]},
                "timeout_s": config.request_timeout_s,
            }
            try:
                said = await runner.play(request)
            except RunnerEnded:
                raise
            except EpisodeFailed:
                if session.conversation.cut and not config.needs_reward:  # it cannot handle running out of tokens
                    return ProgramResult((), truncated=True)
                raise
            return result_of(said, cut=session.conversation.cut)

    return program


def result_of(said: Mapping[str, Any], *, cut: bool) -> ProgramResult:
    """Read the runner's result of an episode; EpisodeFailed without a finite reward."""
    reward = said["reward"]
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EpisodeFailed(f"its reward is {reward}")
    metrics = {name: float(value) for name, value in said["metrics"].items() if isinstance(value, (int, float))}
    return ProgramResult((float(reward),), metrics, truncated=cut)
