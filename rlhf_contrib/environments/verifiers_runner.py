"""Run environments of `verifiers` in an interpreter that has it installed: `python verifiers_runner.py`.

The first line of standard input is JSON with `environment`, `arguments` and `folders`. It may contain secrets, which is
why it is not a command-line argument. Each following line is a JSON request, answered by one line on standard output.
The first line of output tells whether the environment could be loaded, and its version. All other output goes to
standard error. Besides `verifiers`, this file needs only the standard library, because it runs where this project is
not installed.

Up to 0.1 an environment is the return value of its module's `load_environment`; since 0.2 it is a taskset with a
harness.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.metadata
import json
import logging
import os
import sys
import traceback
from typing import Any, TextIO

KEY_VARIABLE = "RLHF_POLICY_KEY"
"""The variable from which `verifiers` reads the policy's API key."""


PROBLEMS: contextvars.ContextVar[list[str]] = contextvars.ContextVar("PROBLEMS")
"""Errors of the episode whose code is running."""


class Overheard(logging.Handler):
    """Keeps errors that `verifiers` only logs: 0.1 scores 0 if a reward function raises."""

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message with its episode."""
        problems = PROBLEMS.get(None)
        if problems is not None:
            problems.append(record.getMessage())


# Each class imports `verifiers` where it is used: only the environment's interpreter has it, in one of the versions.


class Legacy:
    """An environment of `verifiers` 0.1."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import verifiers  # type: ignore[import-not-found]

        self._environment = verifiers.load_environment(settings["environment"], **settings["arguments"])

    def serving(self) -> Any:
        """A context manager that does nothing."""
        return contextlib.nullcontext()

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a task; returns its reward and metrics."""
        from verifiers.types import ClientConfig  # type: ignore[import-not-found]

        client = ClientConfig(
            api_key_var=KEY_VARIABLE, api_base_url=request["base_url"], max_retries=0, timeout=request["timeout_s"]
        )
        task = request["task"]
        row = {"example_id": 0, "prompt": request["messages"], "answer": "", "info": {}, **task}
        output = await self._environment.run_rollout(row, client, request["model"], {})
        if output.get("error"):
            raise RuntimeError(f"the rollout has an error: {output['error']}")
        return {"reward": output["reward"], "metrics": output.get("metrics") or {}}


class Current:
    """An environment of `verifiers` since 0.2: a taskset and a harness that drives the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # type: ignore[import-not-found]

        arguments = dict(settings["arguments"])
        taskset = {"id": settings["environment"], **arguments.pop("taskset", {})}
        self._environment = load_environment(resolve_env_config({"taskset": taskset, **arguments}))
        self._task_class = type(self._environment.taskset).task_type()

    def serving(self) -> Any:
        """The context that its rollouts share."""
        return self._environment.serving()

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a task; returns its reward and metrics."""
        from verifiers.v1.clients import ModelContext  # type: ignore[import-not-found]
        from verifiers.v1.configs.client import EvalClientConfig  # type: ignore[import-not-found]
        from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found]

        data = self._task_class.data_type().model_validate({"prompt": request["messages"], **request["task"]})
        task = self._task_class(data, self._environment.config.taskset.task)
        client = EvalClientConfig(base_url=request["base_url"], api_key_var=KEY_VARIABLE)
        context = ModelContext(client=client, model=request["model"], sampling=SamplingConfig())
        (slot,) = self._environment.slots(task)
        episode = await self._environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or errors:
            raise RuntimeError(f"the episode has errors: {[f'{error.type}: {error.message}' for error in errors]}")
        trace = episode.traces[0]
        if not trace.rewards or None in trace.rewards.values():
            raise RuntimeError(f"the episode was not scored: {trace.rewards}")
        return {"reward": trace.reward, "metrics": dict(trace.metrics)}


def write_message(answers: TextIO, message: dict[str, Any]) -> None:
    """Write a line of JSON and flush it."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def serve(environment: Legacy | Current, requests: TextIO, answers: TextIO) -> None:
    """Run the requested tasks concurrently until the input ends."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        problems: list[str] = []
        PROBLEMS.set(problems)
        try:
            played = await environment.play(request)
            if problems:
                raise RuntimeError("; ".join(problems))
            write_message(answers, {"id": request["id"], **played})
        except Exception:
            write_message(answers, {"id": request["id"], "error": traceback.format_exc()[-4000:]})

    async with environment.serving():
        while line := await loop.run_in_executor(None, requests.readline):
            request = json.loads(line)
            if "ping" in request:
                write_message(answers, {"id": request["id"]})
                continue
            os.environ[KEY_VARIABLE] = request["api_key"]
            task = asyncio.create_task(answer(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    """Load the environment, report the result, and serve."""
    answers, requests = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(requests.readline())
    sys.path[:1] = settings["folders"]  # replaces this file's folder, which has a module `verifiers`, too
    try:
        version = importlib.metadata.version("verifiers")
        kind: type[Legacy | Current] = Legacy if tuple(map(int, version.split(".")[:2])) < (0, 2) else Current
        environment = kind(settings)
        logging.getLogger("verifiers").addHandler(Overheard(logging.ERROR))
    except Exception as error:
        traceback.print_exc()
        write_message(answers, {"refused": f"{type(error).__name__}: {error}"})
        return
    write_message(answers, {"version": version})
    asyncio.run(serve(environment, requests, answers))


if __name__ == "__main__":
    main()
