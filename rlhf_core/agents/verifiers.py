"""Use environments of `verifiers`, which run in another interpreter and call the policy at our endpoint.

One process of `verifiers_runner` plays all episodes of a process of ours. It is restarted if it ends; the episodes that it
was playing have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.agents import verifiers_runner
from rlhf_core.agents.drivers import EpisodeFailed, label_columns
from rlhf_core.agents.endpoint import MODEL, Endpoint
from rlhf_core.agents.programs import Program, ProgramEngine, ProgramResult
from rlhf_core.config.agents import VerifiersAgent
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError, explain
from rlhf_core.processes import parent_death_guard
from rlhf_core.processes.child import OUR_OWN, kill_group

START_TIMEOUT_S = 100.0
"""Seconds for the interpreter, the imports of `verifiers` and the data of the environment."""
PING_TIMEOUT_S = 10.0
"""For the answer to a ping; then the interpreter is taken for hung in the environment's code, and killed."""

LOG = logging.getLogger(__name__)


class RunnerEnded(EpisodeFailed):
    """The interpreter ended while an episode was being played."""


class Runner:
    """A process of `verifiers_runner`; ConfigError if the environment cannot be loaded there, or the version is another."""

    def __init__(self, config: VerifiersAgent) -> None:
        self._config = config
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart: asyncio.Task[None] | None = None
        self._ping: asyncio.Task[None] | None = None
        self._process = self._start()

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of an episode; EpisodeFailed if it could not be played, RunnerEnded if the process ended."""
        self._loop = asyncio.get_running_loop()
        if self._process.poll() is not None:
            await self._started_again(self._loop)
        try:
            reply = await self._asked(self._loop, request)
        except asyncio.CancelledError:  # it took too long: the runner may hang
            if self._ping is None or self._ping.done():
                # A context of its own, as for a restart: it is not part of the episode that happens to be the first.
                self._ping = self._loop.create_task(self._kill_if_hung(self._loop), context=contextvars.Context())
            raise
        if "error" in reply:
            raise EpisodeFailed(f"{self._config.environment}: {reply['error']}")
        return reply

    async def _started_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a new process: one for all who wait, even if the first of them gives up."""

        async def start() -> None:
            try:
                self._process = await asyncio.to_thread(self._start)
            finally:
                self._restart = None

        if self._restart is None:
            self._restart = loop.create_task(start(), context=contextvars.Context())
        await asyncio.shield(self._restart)

    async def _asked(self, loop: asyncio.AbstractEventLoop, request: Mapping[str, Any]) -> dict[str, Any]:
        number, self._numbers = self._numbers, self._numbers + 1
        answer = self._waiting[number] = loop.create_future()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"id": number, **request}) + "\n")
            self._process.stdin.flush()
            reply = await answer
        except BrokenPipeError:
            reply = {"ended": True}
        finally:
            self._waiting.pop(number, None)
        if "ended" in reply:
            raise RunnerEnded(f"{self._config.environment}: its interpreter has exited")
        return reply

    async def _kill_if_hung(self, loop: asyncio.AbstractEventLoop) -> None:
        process = self._process
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                with contextlib.suppress(RunnerEnded):
                    await self._asked(loop, {"ping": True})
        except TimeoutError:
            LOG.warning("%s blocks its event loop: restarting its interpreter", self._config.environment)
            kill_group(process)

    def _start(self) -> subprocess.Popen[str]:
        own, held = os.pipe()
        settings = {
            "environment": self._config.environment,
            "arguments": self._config.arguments,
            "folders": [str(Path(folder).resolve()) for folder in self._config.folders],
        }
        runner = [self._config.python, verifiers_runner.__file__]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death_guard.__file__, str(own), *runner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in OUR_OWN},
            pass_fds=(own,),
            start_new_session=True,
            text=True,
        )
        os.close(own)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # an interpreter that ended at once is reported below
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
        first: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(process, first, held), daemon=True).start()
        try:
            said = first.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            process.kill()
            said = {"refused": f"it did not load within {START_TIMEOUT_S:g} s"}
        self._check(said)
        return process

    def _check(self, said: Mapping[str, Any]) -> None:
        if "refused" in said:
            where = f"could not be loaded by {self._config.python}: {said['refused']}"
            raise ConfigError(
                explain("agent.environment", self._config.environment, where, "try to load it there by hand")
            )
        wanted, found = self._config.version, str(said["version"])
        if wanted and f"{found}.".find(f"{wanted}.") != 0:
            problem = f"{self._config.python} has verifiers {found}"
            raise ConfigError(explain("agent.version", wanted, problem, "install that version, or change this"))

    def _listen(self, process: subprocess.Popen[str], first: queue.SimpleQueue[dict[str, Any]], held: int) -> None:
        """Pass on the output of the process; when it ends, fail the waiting episodes. Runs in its own thread."""
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout if line.endswith("\n"))  # the last may be half a line
        first.put(next(lines, {"refused": "its interpreter exited immediately; see its error output"}))
        for reply in lines:
            self._hand_on(reply["id"], reply)
        os.close(held)
        process.kill()
        process.wait()  # before the callers are notified: the next episode finds it ended, and starts another
        for number in list(self._waiting):
            self._hand_on(number, {"ended": True})

    def _hand_on(self, number: int, reply: dict[str, Any]) -> None:
        def settle() -> None:
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(reply)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(settle)


def open_verifiers(config: VerifiersAgent, *, tokenizer: str) -> Program:
    """Load the environment in its interpreter; return its episodes as a program."""
    runner = Runner(config)
    endpoint = Endpoint(ChatTemplate.load(Path(tokenizer)), request_timeout_s=config.request_timeout_s)

    async def program(prompt: Mapping[str, Any], seed: int, engine: ProgramEngine) -> ProgramResult:
        async with endpoint.session(engine) as session:
            request = {
                "base_url": session.base_url,
                "api_key": session.api_key,
                "model": MODEL,
                "messages": prompt["messages"],
                "task": label_columns(prompt["label"]) or {"answer": prompt["label"]},
                "timeout_s": config.request_timeout_s,
            }
            try:
                said = await runner.play(request)
            except RunnerEnded:
                raise
            except EpisodeFailed:
                if session.conversation.cut and not config.needs_reward:  # it has no answer to the end of its tokens
                    return ProgramResult((), truncated=True)
                raise
            return result_of(said, cut=session.conversation.cut)

    return program


def result_of(said: Mapping[str, Any], *, cut: bool) -> ProgramResult:
    """Return the runner's result of an episode; EpisodeFailed if there is no finite reward."""
    reward = said["reward"]
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EpisodeFailed(f"its reward is {reward}")
    metrics = {name: float(value) for name, value in said["metrics"].items() if isinstance(value, (int, float))}
    return ProgramResult((float(reward),), metrics, truncated=cut)
