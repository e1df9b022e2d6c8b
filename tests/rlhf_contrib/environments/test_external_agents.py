"""Policy optimisation with agents and environments of others: unchanged programs and real servers.

What is not installed beside this project is named by variables: the interpreters that OpenEnv, NeMo Gym and `verifiers` are
installed in.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_core.config.agents import AgentConfig, NemoGymAgent, OpenEnvAgent, OpenRLHFAgent, ProgramAgent, VerifiersAgent
from tests.support.training import rewards_of_grpo

TESTS = Path(__file__).parents[2]
SERVERS = Path(__file__).parent / "servers"
PROGRAMS = TESTS / "stages/programs"
LIMITS: dict[str, Any] = {"max_episode_tokens": 64, "step_timeout_s": 200.0, "retries": 0}

pytestmark = pytest.mark.slow


def interpreter(variable: str) -> str:
    """Return the interpreter that a variable names; the test is skipped without it."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter")
    return os.environ[variable]


@contextlib.contextmanager
def server(python: str, script: str, path: str) -> Iterator[str]:
    """Run a server of `servers` until the block ends; wait until it answers at `path`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([python, str(SERVERS / script), str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 200
        while not answers(url + path):
            assert process.poll() is None and time.monotonic() < deadline, f"{script} did not start"
            time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30.0).is_success
    except httpx.HTTPError:
        return False


def assert_learns(root: Path, agent: AgentConfig, *, most: float) -> None:
    """A turn pays the share of digits in what was said: from less than 0.1 at random to near the most that there is."""
    rewards = rewards_of_grpo(root, agent=agent, steps=20, samples=8)
    assert rewards[0] < 0.1 and rewards[-1] > 0.9 * most


def test_an_agent_file_of_openrlhf(tmp_path):
    assert_learns(tmp_path, OpenRLHFAgent(file=str(PROGRAMS / "openrlhf_agent.py"), **LIMITS), most=2.0)


def test_a_program_that_posts_to_the_endpoint(tmp_path):
    agent = ProgramAgent(command=("python", "-I", "-S", str(PROGRAMS / "http_agent.py")), **LIMITS)
    # Two steps: that GRPO learns from episodes is shown by the test above in a fifth of the time.
    assert len(rewards_of_grpo(tmp_path, agent=agent, steps=2, prompts=2, samples=2)) == 2


def test_an_openenv_server(tmp_path):
    with server(interpreter("RLHF_TEST_OPENENV_PYTHON"), "openenv_server.py", "/health") as url:
        # A second turn rarely fits into the 64 tokens.
        assert_learns(tmp_path, OpenEnvAgent(url=url, **LIMITS), most=1.0)


def test_a_nemo_gym_resources_server(tmp_path):
    with server(interpreter("RLHF_TEST_NEMO_GYM_PYTHON"), "nemo_gym_server.py", "/openapi.json") as url:
        assert_learns(tmp_path, NemoGymAgent(url=url, **LIMITS), most=1.0)


def test_an_environment_of_verifiers(tmp_path):
    agent = VerifiersAgent(
        python=interpreter("RLHF_TEST_VERIFIERS_LEGACY_PYTHON"),
        environment="digits-env",
        folders=(str(SERVERS / "verifiers_legacy"),),
        **LIMITS,
    )
    assert_learns(tmp_path, agent, most=1.0)
