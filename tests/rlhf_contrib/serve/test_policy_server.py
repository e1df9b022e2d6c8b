"""The server of a policy: its command and its token; a champion served to an unmodified client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.services.home import Home
from pipelines.services.policy_server import ServingNote, serving, token_of
from pipelines.services.running import wait_for
from rlhf_contrib.serve.policy_server import (
    ServedModel,
    ServeOptions,
    check_served,
    serve_command,
    serve_environment,
)
from rlhf_contrib.serve.verb import served_model
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import process_stat
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PolicyRef
from tests.support.policies import SHAPE
from tests.support.records import commit, provenance

START_TIMEOUT_S = 500.0


@pytest.fixture
def model(policy: Path) -> ServedModel:
    return ServedModel("ppo", "3fa9c1d2" * 8, policy)


def named(policy: str, adapter: str) -> Namespace:
    return Namespace(policy=policy, adapter=adapter, profile="")


def test_the_token_is_in_the_environment_and_not_in_the_command(model, home):
    token = token_of(home, "")
    assert len(token) >= 32 and home.serve_token.stat().st_mode & 0o777 == 0o600 and token == token_of(home, "")
    command = serve_command(model, ServeOptions(8123), 3)
    assert serve_environment(token, on_gpu=False)["VLLM_API_KEY"] == token and token not in " ".join(command)
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[command.index("--port") + 1] == "8123"
    named = command.index("--served-model-name")
    assert command[named + 1 : named + 3] == ["ppo", "3fa9c1d23fa9"]


def test_a_token_may_be_in_a_variable_which_must_be_set(home):
    assert token_of(home, "MINE", {"MINE": "x"}) == "x" and not home.serve_token.exists()
    with pytest.raises(ConfigError, match="--token-env = 'MINE': this variable is not set"):
        token_of(home, "MINE", {})


def test_an_adapter_is_served_beside_the_policy(model, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 12}))
    adapted = ServedModel(model.name, model.digest, model.folder, tmp_path)
    command = " ".join(serve_command(adapted, ServeOptions(), 3))
    assert f"--enable-lora --max-lora-rank 16 --lora-modules ppo-adapter={tmp_path}" in command
    check_served(adapted)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        check_served(ServedModel(model.name, model.digest, model.folder, model.folder))


def test_an_adapter_is_refused_over_weights_that_it_was_not_trained_over(home):
    store = ArtifactStore(home.store)

    def made(key: str, label: str, start: str) -> PolicyRef:
        out = home.root / f"out-{label}"
        (out / "adapter").mkdir(parents=True)
        (out / "weights.txt").write_text(label)
        facts = provenance(label=label, payload={"inputs": {"policy": start}})
        return commit(store, key * 64, out, PolicyRef, children={}, record=facts)

    sft = made("a", "sft", "b" * 64)
    dpo = made("c", "dpo", sft.digest)
    made("d", "ppo", dpo.digest)
    assert served_model(named("dpo", "ppo"), store, home).adapter is not None
    rule = f"--adapter = 'ppo': was trained over other weights, {dpo.digest[:12]}; serve {dpo.digest[:12]} with it"
    with pytest.raises(ConfigError, match=rule):
        served_model(named("sft", "ppo"), store, home)


def test_a_policy_without_a_chat_template_is_refused(policy, tmp_path):
    shutil.copytree(policy, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template.jinja"))
    check_served(ServedModel("plain", "d", policy))
    with pytest.raises(ConfigError, match="policy = 'plain': its tokenizer has no chat template"):
        check_served(ServedModel("plain", "d", tmp_path / "plain"))


def test_a_note_of_a_server_that_is_gone_says_nothing(home):
    assert serving(home) is None
    home.serving.write_text(json.dumps({"url": "http://127.0.0.1:9/v1", "name": "ppo", "digest": "d"}))
    assert serving(home) is None


def test_a_note_counts_only_while_the_process_that_wrote_it_runs(home):
    found = process_stat(os.getpid())
    note = {"url": "http://127.0.0.1:9/v1", "name": "ppo", "digest": "d", "pid": os.getpid(), "started": found[1]}
    home.serving.write_text(json.dumps(note))
    assert serving(home) == ServingNote(**note)
    for changed in ({"started": found[1] + 1}, {"pid": 0}):
        home.serving.write_text(json.dumps(note | changed))
        assert serving(home) is None


# ---------------------------------------------------------------- with the real server


def published(home: Home, policy: Path) -> PolicyRef:
    """Put a policy into the store, and make it the champion of the registry, as `publish` does."""
    from rlhf_core.tracking.champions import move_tag
    from rlhf_core.tracking.mlflow import MlflowTracker

    store, out = ArtifactStore(home.store), home.root / "out"
    shutil.copytree(policy, out)
    ref = commit(store, "a" * 64, out, PolicyRef, children={}, record=provenance(label="ppo"))
    tracker = MlflowTracker(home.mlflow_uri, experiment="tiny", artifact_root=home.mlflow_artifacts)
    tracker.start("tiny", run_id=None, params={}, tags={})
    stage = tracker.stage("publish", key="k", params={}, tags={})
    stage.model("ppo", ref.digest, ref.uri)
    stage.register("support", ref.digest, aliases=["candidate", "champion"], tags=move_tag("publish", "won"))
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    return ref


@pytest.fixture
def policy_for_vllm(tmp_path) -> Path:
    """Write a policy with heads of 32 dimensions, the fewest that vLLM computes on the CPU."""
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer  # imports transformers

    train_tokenizer(["What is 12 + 30? It is 42."] * 5, vocab_size=320, folder=tmp_path / "wide")
    shape = SHAPE.model_copy(update={"hidden_size": 64, "max_positions": 128})
    initialize_llama(shape, tmp_path / "wide", seed=7)
    return tmp_path / "wide"


@pytest.fixture
def serve(home: Home, policy_for_vllm: Path) -> Iterator[tuple[PolicyRef, subprocess.Popen[str]]]:
    """`rlhf serve champion` in a process of its own, once it answers."""
    ref = published(home, policy_for_vllm)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipelines.cli.main", "serve", "champion", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--max-model-len", "128", "--kv-cache-gib", "0.25"],
        env=os.environ | {"RLHF_HOME": str(home.root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        up = wait_for(lambda: process.poll() is not None or serving(home) is not None, START_TIMEOUT_S)
        log = home.logs / "serve.log"
        assert up and process.poll() is None, log.read_text()[-3000:] if log.exists() else process.communicate()[0]
        yield ref, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_served_champion_answers_an_unmodified_openai_client(serve, home, policy_for_vllm, monkeypatch):
    openai = pytest.importorskip("openai")
    pytest.importorskip("vllm")
    from rlhf_core.data.chat import ChatTemplate

    ref, process = serve
    note = serving(home)
    assert note is not None and (note.name, note.digest) == ("champion", ref.digest)
    token = home.serve_token.read_text()
    client = openai.OpenAI(base_url=note.url, api_key=token)
    assert {model.id for model in client.models.list()} == {"champion", ref.digest[:12]}
    question: Any = [{"role": "user", "content": "What is 12 + 30?"}]
    answer = client.chat.completions.create(model="champion", messages=question, max_tokens=8, temperature=0)
    assert 1 <= answer.usage.completion_tokens <= 8 and answer.choices[0].finish_reason in ("stop", "length")
    ours = ChatTemplate.load(policy_for_vllm).prompt_ids((Message("user", "What is 12 + 30?"),))
    assert answer.usage.prompt_tokens == len(ours)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=note.url, api_key="wrong").models.list()

    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "rlhf_core.sampling.vllm_front" in running and token not in running
    assert token not in (home.logs / "serve.log").read_text()

    monkeypatch.setenv("RLHF_HOME", str(home.root))
    assert served_model(named("champion:support", ""), ArtifactStore(home.store), home).digest == ref.digest
    command = [
        sys.executable,
        "-m",
        "pipelines.cli.main",
        "chat",
        "champion",
        "--once",
        "What is 12 + 30?",
        "--max-tokens",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert f"champion at {note.url}\n" in done.stderr and token not in done.stdout + done.stderr

    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert token not in printed and str(home.serve_token) in printed
    assert serving(home) is None and not home.serving.exists()
