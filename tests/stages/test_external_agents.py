"""Policy optimisation with agents and environments of others: unchanged programs and real servers.

What is not installed beside this project is named by variables: the interpreters that OpenEnv, NeMo Gym and `verifiers` are
installed in.
"""

from __future__ import annotations

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

from rlhf_core.config.agents import AgentConfig, NemoGymAgent, OpenEnvAgent, ProgramAgent, VerifiersAgent
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import EpisodeReward, RewardsConfig
from stages.ppo import PPOConfig
from tests.stages.recording import make_policy
from tests.stages.training import series, shop_and_inputs

AGENTS = Path(__file__).parents[1] / "rlhf_core" / "agents"
SERVERS = AGENTS / "servers"
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


def trained(root: Path, agent: AgentConfig, *, steps: int, samples: int = 4) -> list[float]:
    """Return the mean reward of each step of GRPO; no episode may have failed."""
    shop, inputs = shop_and_inputs(root, make_policy(root / "policy"))
    settings = PPOConfig(
        steps=steps,
        prompts_per_step=4,
        samples_per_prompt=samples,
        sampling=SamplingConfig(max_tokens=8),
        advantage={"type": "grpo"},
        agent=agent,
        rewards=RewardsConfig(terms={"digits": EpisodeReward()}),
        optimizer=OptimizerConfig(learning_rate=2e-2, schedule="constant"),
        kl_coef=0.0,
    )
    shop.run("ppo", settings, inputs)
    assert set(series(shop, "rollout/failed_episodes")) == {0.0}
    return series(shop, "reward/mean")


def rises(rewards: list[float]) -> bool:
    return sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2


def test_an_agent_that_knows_openais_client_alone(tmp_path: Path) -> None:
    agent = ProgramAgent(command=("python", str(AGENTS / "openai_agent.py")), **LIMITS)
    assert len(trained(tmp_path, agent, steps=2, samples=2)) == 2


def test_an_openenv_server(tmp_path: Path) -> None:
    with server(interpreter("RLHF_TEST_OPENENV_PYTHON"), "openenv_server.py", "/health") as url:
        assert rises(trained(tmp_path, OpenEnvAgent(url=url, **LIMITS), steps=8))


def test_a_nemo_gym_resources_server(tmp_path: Path) -> None:
    with server(interpreter("RLHF_TEST_NEMO_GYM_PYTHON"), "nemo_gym_server.py", "/openapi.json") as url:
        assert rises(trained(tmp_path, NemoGymAgent(url=url, **LIMITS), steps=8))


def test_an_environment_of_verifiers(tmp_path: Path) -> None:
    agent = VerifiersAgent(
        python=interpreter("RLHF_TEST_VERIFIERS_LEGACY_PYTHON"),
        environment="digits-env",
        folders=(str(SERVERS / "verifiers_legacy"),),
        **LIMITS,
    )
    assert rises(trained(tmp_path, agent, steps=8))
