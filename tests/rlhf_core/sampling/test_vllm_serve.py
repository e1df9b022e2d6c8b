"""`vllm serve` itself on the CPU: the same seeds give what the engine in this library's own process gives."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rlhf_contrib.vllm_server.sampler import VllmServerSampler
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import SamplerLostError
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.types import Completion
from tests.rlhf_core.sampling.vllm_program import REQUESTS, SAMPLING
from tests.support.warm_programs import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("vllm", reason="vLLM is not installed")

START_TIMEOUT_S = 400.0
OPTIONS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--max-model-len", "96"),
    *("--worker-extension-cls", "rlhf_core.sampling.vllm_worker.WeightReload", "--api-key", "secret"),
    *("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)),
)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture
def in_process(vllm_processes: tuple[dict[str, Any], dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the engine in a process of its own says to `REQUESTS`, under both policies."""
    full, _ = vllm_processes
    return [full["first"], full["fresh_other"]]


@pytest.fixture
def server(policies: tuple[Path, Path], tmp_path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the first policy: its URL and its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(policies[0]))
    log = tmp_path / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *module, "--host", "127.0.0.1", "--port", str(port), *OPTIONS],
            env=ENVIRONMENT, stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log)
        yield url, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def test_a_server_says_what_the_engine_in_process_says_before_and_after_new_weights(
    server, in_process, policies, tmp_path, monkeypatch
):
    url, process = server
    monkeypatch.setenv("SERVER_KEY", "secret")
    config = VllmServerSamplerConfig(
        urls=(url,), weights_folder=str(tmp_path / "weights"), max_model_len=96, token_env="SERVER_KEY"
    )
    payload = load_file(policies[1] / "model.safetensors")
    with closing(VllmServerSampler(policies[0], config)) as sampler:
        assert sampler.served_version.startswith("0.")
        agree(sampler.generate(REQUESTS, SAMPLING), in_process[0], version=0)
        sampler.load_weights(Weights(payload, weights_digest(payload)), version=5)
        agree(sampler.generate(REQUESTS, SAMPLING), in_process[1], version=5)
        agree(advanced(sampler), in_process[1], version=5)
        sampler.load_policy(policies[0])
        agree(sampler.generate(REQUESTS, SAMPLING), in_process[0], version=0)
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(SamplerLostError, match=f"{url} cannot be reached"):
            sampler.generate(REQUESTS, SAMPLING)


def advanced(sampler: VllmServerSampler) -> list[Completion]:
    done: dict[int, Completion] = {}
    new = list(enumerate(REQUESTS))
    while finished := sampler.advance(new, SAMPLING):
        done |= dict(finished)
        new = []
    return [done[number] for number in range(len(REQUESTS))]


def agree(completions: list[Completion], expected: list[dict[str, Any]], *, version: int) -> None:
    for completion, other in zip(completions, expected, strict=True):
        assert list(completion.token_ids) == other["token_ids"]
        assert completion.logprobs == pytest.approx(other["logprobs"], abs=1e-4)  # other batches, other rounding
        assert (completion.text, completion.finish_reason) == (other["text"], other["finish_reason"])
        assert completion.policy_version == version
