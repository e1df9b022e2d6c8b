from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.agents.drivers import EpisodeFailed
from rlhf_core.agents.programs import ProgramResult
from rlhf_core.config.agents import VerifiersAgent
from rlhf_core.errors import ConfigError
from rlhf_core.integrations import verifiers
from rlhf_core.integrations.verifiers import Runner, RunnerEnded, open_agent, result_of
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
def stand_in(tmp_path: Path) -> str:
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
                results.append(await program({"messages": messages, "label": label}, 7, engine))  # type: ignore[arg-type]
            except EpisodeFailed as error:
                results.append(error)
        return results

    return asyncio.run(run())


def test_an_environment_plays_with_our_endpoint(stand_in: str) -> None:
    right, wrong = played(config(stand_in, version="0.1"), "3", "4")
    assert right == ProgramResult((1.0,), {"turns": 1.0}) and wrong.rewards == (0.0,)


def test_what_went_wrong_in_it_is_a_failure_and_no_reward(stand_in: str) -> None:
    error, swallowed, crash, after = played(config(stand_in), "error", "swallowed", "crash", "3")
    assert "the tool broke" in str(error) and "a reward function raised" in str(swallowed)
    assert "its interpreter has exited" in str(crash) and after.rewards == (1.0,)


def test_the_end_of_its_tokens_excuses_an_error_where_no_reward_is_needed_and_never_a_crash(stand_in: str) -> None:
    (error,) = played(config(stand_in), "error", cut=True)
    excused, crash = played(config(stand_in, needs_reward=False), "error", "crash later", cut=True)
    assert "the tool broke" in str(error) and excused == ProgramResult((), truncated=True)
    assert "its interpreter has exited" in str(crash)


def asking(answer: str) -> dict[str, Any]:
    """Return a request that does not reach the policy: nobody listens at its address."""
    base_url = "http://127.0.0.1:9/v1"
    asked = {"base_url": base_url, "api_key": "x", "model": "policy", "messages": [], "timeout_s": 5.0}
    return asked | {"task": {"answer": answer}}


def test_all_that_wait_after_a_crash_share_one_new_interpreter(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_interpreter_is_killed_if_it_hangs_and_not_if_it_waits(
    stand_in: str, monkeypatch: pytest.MonkeyPatch, answer: str, killed: bool
) -> None:
    monkeypatch.setattr(verifiers, "PING_TIMEOUT_S", 0.5 if killed else 30.0)

    async def scenario() -> tuple[bool, str]:
        runner = Runner(config(stand_in))
        process = runner._host.process
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runner.play(asking(answer))
        assert runner._ping is not None
        await runner._ping
        async with asyncio.timeout(30.0):
            while killed and process.poll() is None:
                await asyncio.sleep(0.01)
            (ended,) = await asyncio.gather(runner.play(asking("3")), return_exceptions=True)
        kill_group(runner._host.process)  # or it would say later how the wait came out
        return runner._host.process is not process, str(ended)

    changed, ended = asyncio.run(scenario())
    assert changed == killed and "Connection refused" in ended


def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start(stand_in: str) -> None:
    with pytest.raises(ConfigError, match="there is no environment missing"):
        open_agent(config(stand_in, environment="missing"), tokenizer=chat_folder())


def test_another_version_is_refused(stand_in: str) -> None:
    with pytest.raises(ConfigError, match=r"has verifiers 0\.1\.14"):
        open_agent(config(stand_in, version="0.1.1"), tokenizer=chat_folder())


def test_an_interpreter_without_verifiers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="verifiers"):
        open_agent(config(str(tmp_path)), tokenizer=chat_folder())


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    with pytest.raises(EpisodeFailed, match="its reward is None"):
        result_of({"reward": None, "metrics": {}}, cut=False)


@pytest.mark.slow
@pytest.mark.skipif(not LEGACY, reason="RLHF_TEST_VERIFIERS_LEGACY_PYTHON names no interpreter with verifiers 0.1")
def test_the_real_package_before_0_2() -> None:
    agent = VerifiersAgent(
        python=LEGACY, environment="digits-env", version="0.1", folders=(str(SERVERS / "verifiers_legacy"),)
    )
    right, raised = played(agent, "3", "crash")
    assert right.rewards == (1 / 8,) and "the digits are gone" in str(raised)


@pytest.mark.slow
@pytest.mark.skipif(not CURRENT, reason="RLHF_TEST_VERIFIERS_PYTHON names no interpreter with verifiers since 0.2")
def test_the_real_package_since_0_2() -> None:
    agent = VerifiersAgent(
        python=CURRENT,
        environment="digits-tasks",
        arguments={"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}},
        folders=(str(SERVERS / "verifiers_current"),),
    )
    (right,) = played(agent, "{}")
    assert right.rewards == (1 / 8,)
