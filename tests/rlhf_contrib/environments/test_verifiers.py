import asyncio
import contextlib
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_contrib.environments import verifiers
from rlhf_contrib.environments.verifiers import Runner, RunnerEnded, open_agent, result_of
from rlhf_contrib.environments.verifiers_runner import KEY_VARIABLE, Overheard, serve
from rlhf_core.agents.programs import EpisodeFailed, ProgramResult
from rlhf_core.config.agents import VerifiersAgent
from rlhf_core.errors import ConfigError
from rlhf_core.processes.guard import kill_group
from tests.rlhf_core.agents.scripted import chat, chat_folder
from tests.rlhf_core.agents.test_conversation import SpelledEngine

SERVERS = Path(__file__).with_name("servers")
LEGACY = os.environ.get("RLHF_TEST_VERIFIERS_LEGACY_PYTHON", "")
CURRENT = os.environ.get("RLHF_TEST_VERIFIERS_PYTHON", "")

STAND_IN = """
import json, logging, os, sys, time, urllib.request


class Environment:
    async def run_rollout(self, row, client, model, sampling_args):
        if row["answer"] == "crash":
            os._exit(7)
        if row["answer"] == "hang":
            time.sleep(60)
        if row["answer"] == "wait":
            await asyncio.sleep(60)
        print("on standard output")
        body = json.dumps({"model": model, "messages": row["prompt"]}).encode()
        key = {"Authorization": "Bearer " + os.environ[client.api_key_var]}
        request = urllib.request.Request(client.api_base_url + "/chat/completions", body, key)
        reply = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        if row["answer"] == "crash later":
            os._exit(7)
        if row["answer"] == "swallowed":
            logging.getLogger("verifiers.rubric").error("a reward function raised")
        reward = float(row["answer"] in reply["choices"][0]["message"]["content"])
        return {"reward": reward, "metrics": {"turns": 1}, "error": row["answer"] == "error" and "the tool broke"}


def load_environment(name, **arguments):
    os.system("echo noise")
    print("noise on standard output", name, arguments)
    if name == "missing":
        raise ImportError("there is no environment missing")
    return Environment()
"""
TYPES = """
class ClientConfig:
    def __init__(self, **fields):
        self.__dict__.update(fields)
"""


@pytest.fixture
def stand_in(tmp_path) -> str:
    """Return a folder with a package that looks like `verifiers` 0.1."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text(f"import asyncio\n{STAND_IN}")
    (tmp_path / "verifiers" / "types.py").write_text(TYPES)
    (tmp_path / "verifiers-0.1.14.dist-info").mkdir()
    (tmp_path / "verifiers-0.1.14.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.1.14\n")
    return str(tmp_path)


def config(folder: str, **settings: Any) -> VerifiersAgent:
    return VerifiersAgent(**{"python": sys.executable, "environment": "digits", "folders": (folder,), **settings})


def played(agent: VerifiersAgent, *labels: str, cut: bool = False) -> list[Any]:
    """Return what an episode for each label came to, one after another; the policy says `It is 3.`"""
    program = open_agent(agent, tokenizer=chat_folder())
    messages = [{"role": "user", "content": "What is 3?"}]

    async def run() -> list[Any]:
        results: list[Any] = []
        for label in labels:
            try:
                engine = SpelledEngine(chat(), "It is 3.", cut=cut)
                results.append(await program({"messages": messages, "label": label}, 7, engine))
            except EpisodeFailed as error:
                results.append(error)
        return results

    return asyncio.run(run())


def test_an_environment_plays_with_our_endpoint(stand_in):
    right, wrong = played(config(stand_in, version="0.1"), "3", "4")
    assert right == ProgramResult((1.0,), {"turns": 1.0}) and wrong.rewards == (0.0,)


def test_what_went_wrong_in_it_is_a_failure_and_no_reward(stand_in):
    error, swallowed, crash, after = played(config(stand_in), "error", "swallowed", "crash", "3")
    assert "the tool broke" in str(error) and "a reward function raised" in str(swallowed)
    assert "its interpreter has exited" in str(crash) and after.rewards == (1.0,)


def test_the_end_of_its_tokens_excuses_an_error_where_no_reward_is_needed_and_never_a_crash(stand_in):
    (error,) = played(config(stand_in), "error", cut=True)
    excused, crash = played(config(stand_in, needs_reward=False), "error", "crash later", cut=True)
    assert "the tool broke" in str(error) and excused == ProgramResult((), truncated=True)
    assert "its interpreter has exited" in str(crash)


def asking(answer: str) -> dict[str, Any]:
    """Return a request that does not reach the policy: nobody listens at its address."""
    base_url = "http://127.0.0.1:9/v1"
    asked = {"base_url": base_url, "api_key": "x", "model": "policy", "messages": [], "timeout_s": 5.0}
    return asked | {"task": {"answer": answer}}


def test_all_that_wait_after_a_crash_share_one_new_interpreter(stand_in, monkeypatch):
    async def scenario() -> tuple[list[str], int]:
        runner = Runner(config(stand_in))
        with pytest.raises(RunnerEnded):
            await runner.play(asking("crash"))
        starts: list[None] = []
        start = runner._start
        monkeypatch.setattr(runner, "_start", lambda: (starts.append(None), start())[1])
        ended = await asyncio.gather(*(runner.play(asking("3")) for _ in range(3)), return_exceptions=True)
        return [str(one) for one in ended], len(starts)

    ended, starts = asyncio.run(scenario())
    assert starts == 1 and all("Connection refused" in one for one in ended)


@pytest.mark.parametrize(("answer", "killed"), [("hang", True), ("wait", False)])
def test_an_interpreter_is_killed_if_it_hangs_and_not_if_it_waits(stand_in, monkeypatch, answer, killed):
    monkeypatch.setattr(verifiers, "PING_TIMEOUT_S", 0.5 if killed else 30.0)

    async def scenario() -> tuple[bool, str]:
        runner = Runner(config(stand_in))
        process = runner._host.process
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runner.play(asking(answer))
        await runner._ping
        async with asyncio.timeout(30.0):
            while killed and process.poll() is None:
                await asyncio.sleep(0.01)
            (ended,) = await asyncio.gather(runner.play(asking("3")), return_exceptions=True)
        kill_group(runner._host.process)  # or it would say later how the wait came out
        return runner._host.process is not process, str(ended)

    changed, ended = asyncio.run(scenario())
    assert changed == killed and "Connection refused" in ended


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"environment": "missing"}, "there is no environment missing"),
        ({"version": "0.1.1"}, r"has verifiers 0\.1\.14"),
        ({"folders": ()}, "PackageNotFoundError: "),
        ({"python": "/no/such/python"}, "its interpreter exited immediately"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_refused(stand_in, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        open_agent(config(stand_in, **settings), tokenizer=chat_folder())


def test_a_reward_that_is_no_number_is_a_failure():
    with pytest.raises(EpisodeFailed, match="its reward is None"):
        result_of({"reward": None, "metrics": {}}, cut=False)


@pytest.mark.slow
@pytest.mark.skipif(not LEGACY, reason="RLHF_TEST_VERIFIERS_LEGACY_PYTHON names no interpreter with verifiers 0.1")
def test_the_real_package_before_0_2():
    agent = VerifiersAgent(
        python=LEGACY, environment="digits-env", version="0.1", folders=(str(SERVERS / "verifiers_legacy"),)
    )
    right, raised = played(agent, "3", "crash")
    assert right.rewards == (1 / 8,) and "the digits are gone" in str(raised)


@pytest.mark.slow
@pytest.mark.skipif(not CURRENT, reason="RLHF_TEST_VERIFIERS_PYTHON names no interpreter with verifiers since 0.2")
def test_the_real_package_since_0_2():
    agent = VerifiersAgent(
        python=CURRENT,
        environment="digits-tasks",
        arguments={"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}},
        folders=(str(SERVERS / "verifiers_current"),),
    )
    (right,) = played(agent, "{}")
    assert right.rewards == (1 / 8,)


# ---------------------------------------------------------------- the runner, in this process


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
            served = asyncio.create_task(serve(Tasks(len(tasks)), requests, answers))
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


def test_episodes_are_played_side_by_side_with_the_key_of_their_requests(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "")
    played = {"reward": 1.0, "metrics": {"key": "secret"}}
    assert replies("meet", "meet", "meet") == {0: played, 1: played, 2: played}


def test_what_raised_or_was_only_logged_is_an_error_of_that_episode_alone(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "")
    logger, handler = logging.getLogger("verifiers"), Overheard(logging.ERROR)
    logger.addHandler(handler)
    try:
        said = replies("log", "raise", "play")
    finally:
        logger.removeHandler(handler)
    assert "a reward function raised" in said[0]["error"] and "the task is broken" in said[1]["error"]
    assert said[2]["reward"] == 1.0
