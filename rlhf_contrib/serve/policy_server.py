"""Serve a policy with vLLM's OpenAI server on 127.0.0.1, with a token that is hidden from process lists."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.services.home import LOOPBACK, Home
from pipelines.services.policy_server import ServingNote
from pipelines.services.running import await_health, bound_port, port_of
from pipelines.services.servers import start_guarded
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import process_stat, process_state
from rlhf_core.sampling.vllm_front import TOKEN
from rlhf_core.store.layout import write_json
from rlhf_core.store.typed_json import read_stored

SERVE_PORT = 8000  # vLLM's own
START_TIMEOUT_S = 900.0  # large models take minutes to read and compile
STOP_PATIENCE_S = 10.0  # between SIGTERM and SIGKILL
TEMPLATE = "chat_template.jinja"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum adapter ranks that vLLM accepts."""
GIB = 1 << 30  # bytes


@dataclass(frozen=True)
class ServedModel:
    """A policy to serve: its names for clients, its folder, and an optional adapter."""

    name: str
    digest: str
    folder: Path
    adapter: Path | None = None
    """Folder of a LoRA adapter; clients then choose the model `<name>-adapter`."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the vLLM server."""

    port: int = SERVE_PORT
    max_model_len: int = 0
    """Maximum number of tokens of a conversation; 0 means the model's number of positions."""
    kv_cache_gib: float = 1.0
    """Memory for the cache of a server without a GPU."""
    on_gpu: bool = False


def check_served(model: ServedModel) -> None:
    """Raise ConfigError for a policy without a chat template, or an adapter folder without an adapter."""
    if not has_chat_template(model.folder):
        rule = "its tokenizer has no chat template"
        raise ConfigError("policy", model.name, rule, "serve a policy that a stage made, or add one to the folder")
    if model.adapter is not None and not (model.adapter / "adapter_config.json").is_file():
        rule = "has no adapter_config.json"
        raise ConfigError("--adapter", str(model.adapter), rule, "name the folder `adapter` of a policy with LoRA")


def has_chat_template(folder: Path) -> bool:
    """Whether the policy's tokenizer has a chat template, which vLLM then uses."""
    if (folder / TEMPLATE).is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))


def serve_command(model: ServedModel, options: ServeOptions, descriptor: int) -> list[str]:
    """The server's command line with the socket `descriptor`; it contains no secrets."""
    command = [sys.executable, "-P", "-m", "rlhf_core.sampling.vllm_front", str(descriptor)]
    command += ["--middleware", "rlhf_core.sampling.vllm_front.PolicyDoor", "--model", str(model.folder)]
    command += ["--served-model-name", model.name, model.digest[:12]]
    command += ["--host", LOOPBACK, "--port", str(options.port), "--uvicorn-log-level", "warning"]
    if options.max_model_len:
        command += ["--max-model-len", str(options.max_model_len)]
    if not options.on_gpu:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(options.kv_cache_gib * GIB))]
    if model.adapter is not None:
        rank = json.loads((model.adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        largest = next((known for known in LORA_RANKS if known >= rank), rank)
        command += ["--enable-lora", "--max-lora-rank", str(largest)]
        command += ["--lora-modules", f"{model.name}-adapter={model.adapter}"]
    return command


def serve_environment(token: str, *, on_gpu: bool) -> dict[str, str]:
    """The server's environment variables, including its token."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    ready = {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(START_TIMEOUT_S))}
    cpu = {} if on_gpu else {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**os.environ, **quiet, **ready, **cpu, TOKEN: token}


@contextmanager
def policy_server(home: Home, model: ServedModel, options: ServeOptions, token: str) -> Iterator[ServingNote]:
    """Start the server and yield its address once it responds; it ends with the block or with this process.

    Raises ServiceError, which names the log, if it does not start.
    """
    check_served(model)
    listener, log = bound_port(options.port), home.logs / "serve.log"
    command = serve_command(model, replace(options, port=port_of(listener)), listener.fileno())
    environment = serve_environment(token, on_gpu=options.on_gpu)
    with log.open("ab") as stream:
        process = start_guarded(command, environment, stream, patience_s=STOP_PATIENCE_S, listener=listener)
    found = process_stat(process.pid)
    note = ServingNote(
        url=f"http://{LOOPBACK}:{port_of(listener)}/v1",
        name=model.name,
        digest=model.digest,
        pid=process.pid,
        started=0 if found is None else found[1],
    )
    try:
        await_health(health_url(note.url), token, process, START_TIMEOUT_S, log)
        write_json(home.serving, note.model_dump())
        yield note
    finally:
        if read_stored(home.serving, ServingNote) == note:
            home.serving.unlink(missing_ok=True)
        if process.stdin is not None:
            process.stdin.close()  # the guard stops the server
        process.wait()
        listener.close()


def wait_for_end(note: ServingNote, every_s: float = 5.0) -> None:
    """Block until the server's process has ended; a busy server may not respond for a while."""
    while process_state(note.pid, note.started) != "gone":
        time.sleep(every_s)


def health_url(url: str) -> str:
    """The health address of a server, from its address for OpenAI clients.

    >>> health_url("http://127.0.0.1:8000/v1")
    'http://127.0.0.1:8000/health'
    """
    return f"{url.rstrip('/').removesuffix('/v1')}/health"
