"""What the runner says over its streams. `verifiers` itself is played by stand-ins: see test_verifiers.py for the real one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.integrations import verifiers_runner
from rlhf_core.integrations.verifiers_runner import KEY_VARIABLE, Overheard, serve


class Tasks:
    """Plays what a task says; at `meet` an episode waits until `meeting` of them have come so far."""

    def __init__(self, meeting: int) -> None:
        self._barrier = asyncio.Barrier(meeting)

    def serving(self) -> Any:
        return contextlib.nullcontext()

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["task"]:
            case "meet":
                async with asyncio.timeout(10.0):
                    await self._barrier.wait()
            case "log":
                logging.getLogger("verifiers.rubric").error("a reward function raised")
            case "raise":
                raise ValueError("the task is broken")
        return {"reward": 1.0, "metrics": {"key": os.environ[KEY_VARIABLE]}}


def replies(*tasks: str) -> dict[int, dict[str, Any]]:
    """Ask for all tasks at once; return what is said of each."""
    answers = io.StringIO()

    async def run() -> dict[int, dict[str, Any]]:
        asked, ask = os.pipe()
        with os.fdopen(asked) as requests, os.fdopen(ask, "w") as mine:
            served = asyncio.create_task(serve(Tasks(len(tasks)), requests, answers))  # type: ignore[arg-type]
            for number, task in enumerate(tasks):
                mine.write(json.dumps({"id": number, "task": task, "api_key": "secret"}) + "\n")
            mine.flush()
            async with asyncio.timeout(20.0):
                while answers.getvalue().count("\n") < len(tasks):
                    await asyncio.sleep(0.01)
            mine.close()
            await served  # the end of the requests is its end
        said = [json.loads(line) for line in answers.getvalue().splitlines()]
        return {one.pop("id"): one for one in said}

    return asyncio.run(run())


def test_episodes_are_played_side_by_side_with_the_key_of_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    played = {"reward": 1.0, "metrics": {"key": "secret"}}
    assert replies("meet", "meet", "meet") == {0: played, 1: played, 2: played}


def test_what_raised_or_was_only_logged_is_an_error_of_that_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    logger, handler = logging.getLogger("verifiers"), Overheard(logging.ERROR)
    logger.addHandler(handler)
    try:
        said = replies("log", "raise", "play")
    finally:
        logger.removeHandler(handler)
    assert "a reward function raised" in said[0]["error"] and "the task is broken" in said[1]["error"]
    assert said[2]["reward"] == 1.0


def first_line(folder: Path) -> dict[str, Any]:
    """Run the program with what `folder` has; return its only line on standard output."""
    settings = {"environment": "digits", "arguments": {"level": 3}, "folders": [str(folder)]}
    command = [sys.executable, "-S", verifiers_runner.__file__]
    ran = subprocess.run(
        command, input=json.dumps(settings) + "\n", capture_output=True, text=True, timeout=60, check=True
    )
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


def test_an_interpreter_without_verifiers_says_so(tmp_path: Path) -> None:
    assert first_line(tmp_path)["refused"].startswith("PackageNotFoundError: ")


def test_the_version_is_said_and_nothing_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "verifiers").mkdir()
    stand_in = (
        "import os\nos.system('echo noise')\nprint('noise')\ndef load_environment(name, level): print(name, level)"
    )
    (tmp_path / "verifiers" / "__init__.py").write_text(stand_in)
    (tmp_path / "verifiers-0.1.14.dist-info").mkdir()
    (tmp_path / "verifiers-0.1.14.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.1.14\n")
    assert first_line(tmp_path) == {"version": "0.1.14"}
