"""`rlhf serve-reward`: the verb as it is run, and a reward model that scores as the score stage does."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from pipelines.cli.main import main
from rlhf_contrib.serve.reward_server import Query
from rlhf_contrib.serve.reward_verb import listening, open_reward_model, read_json_arguments, read_token
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.remote import RemoteRewardClient
from rlhf_core.types import Completion, Generation, Message, Prompt
from tests.stages.test_score import reward_model_in
from tests.support.workshop import workshop


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def service(home: Path, *arguments: str, port: int, token: str) -> Iterator[subprocess.Popen[str]]:
    """Run the verb until it answers; kill it at the end if it still runs."""
    command = [sys.executable, "-m", "pipelines.cli.main", "serve-reward", *arguments, "--port", str(port)]
    environment = os.environ | {"RLHF_HOME": str(home), "REWARD_TOKEN": token, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not answers(port):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def asked(*texts: str, label: str) -> list[Generation]:
    prompt = Prompt("p", (Message("user", "2+2? "),), label, "test")
    return [Generation(prompt, (1,), Completion((), (), text, "stop", 0, 0)) for text in texts]


def test_the_verb_serves_a_function_with_arguments_and_a_token_until_it_is_terminated(tmp_path, monkeypatch):
    port = free_port()
    function = ["--function", "rlhf_core.rewards.library.text:regex_match", "--arguments", '{"pattern": "^{label}$"}']
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    with service(tmp_path, *function, "--token-env", "REWARD_TOKEN", port=port, token="s3cret") as process:
        url = f"http://127.0.0.1:{port}/get_reward"
        assert httpx.post(url, json={"query": ["4"], "labels": ["4"]}).status_code == 401
        with RemoteRewardClient("far", [url], timeout_s=30, retries=0, token_env="REWARD_TOKEN") as reward:
            assert reward(asked("4", "5", label="4")).values == (1.0, 0.0)
            assert reward(asked("4", label="")).values == (None,)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children  # the function runs in a process of its own
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--function", "no.such:thing"], "rewards.served.function = 'no.such:thing'"),
        (["--function", "a:b", "--arguments", "[1]"], "--arguments = '[1]': is not a JSON object"),
        (["--function", "a:b", "--host", "0.0.0.0"], "--host = '0.0.0.0': other machines can reach this address"),
        (["--function", "a:b", "--token-env", "NO_SUCH"], "--token-env = 'NO_SUCH'"),
        (["--reward-model", "nothing"], "reward model = 'nothing': is neither label nor digest of a reward model"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.delenv("NO_SUCH", raising=False)
    assert main(["serve-reward", "--port", "0", *arguments]) == 2
    assert capsys.readouterr().err.startswith(line)


def test_a_token_is_needed_where_others_can_ask(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    assert read_token("REWARD_TOKEN", host="0.0.0.0") == "s3cret"
    assert read_token("", host="127.0.0.1") == ""
    with pytest.raises(ConfigError):
        read_token("", host="0.0.0.0")
    assert read_json_arguments('{"n": 1}') == {"n": 1}


@pytest.mark.parametrize("render", [False, True])
def test_a_reward_model_scores_text_as_the_score_stage_scores_its_tokens(tmp_path, render):
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.rewards.model import score_with_reward_model

    shop = workshop(tmp_path)
    folder = shop.store.path(reward_model_in(shop, tmp_path))
    chat = ChatTemplate.load(folder)
    generations = []
    for question, answer in (("What is 12?", "It is 42."), ("Say hello", "12 + 30"), ("What is 30?", "")):
        prompt = Prompt(question, (Message("user", question),), "", "test")
        ids = (*chat.tokenizer(answer, add_special_tokens=False)["input_ids"], chat.eos_id)
        completion = Completion(ids, (-1.0,) * len(ids), answer, "stop", 0, 0)
        generations.append(Generation(prompt, chat.prompt_ids(prompt.messages), completion))
    with shop.runtime.trainer("reward_model", ModelSpec(str(folder), "score", None, 0), None) as trainer:
        expected = score_with_reward_model(trainer, chat, generations, max_length=64)

    plain = [Query(one.prompt.id + one.completion.text, one.prompt.id, "") for one in generations]
    texts = [chat.tokenizer.decode([*one.prompt_ids, *one.completion.token_ids]) for one in generations]
    queries = plain if render else [Query(text, "", "") for text in texts]
    with open_reward_model(folder, argparse.Namespace(render=render)) as score:
        found = score(queries).values
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 3  # the model tells them apart


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99999), ("127.0.0.1", -1), ("host.invalid", 0)])
def test_an_address_where_no_server_can_listen_is_one_error(host, port):
    with pytest.raises(
        ConfigError, match=r"^--port = '.*': no server can listen there \(.*\); name a port that is free"
    ):
        listening(host, port)
    with listening("localhost", 0) as taken, pytest.raises(ConfigError, match="no server can listen there"):
        assert taken.getsockname()[0] == "127.0.0.1"
        listening("127.0.0.1", taken.getsockname()[1])
