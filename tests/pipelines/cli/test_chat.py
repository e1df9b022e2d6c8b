"""`rlhf chat` answers with the policy that it is given."""

import io
import secrets
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.cli import chat
from pipelines.cli.chat import talk
from pipelines.cli.find_model import find_model, find_policy
from pipelines.cli.main import EXIT_REFUSED, main
from pipelines.execution.run import model_digests
from pipelines.services.home import Home
from pipelines.services.policy_server import ServingNote
from pipelines.services.run_notes import new_note
from pipelines.services.running import ServiceError
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import remove_tree
from rlhf_core.types import ArtifactRef, Message, PolicyRef, RewardModelRef, SamplingRequest
from tests.support.chat_server import ChatServer
from tests.support.policies import RUNTIME
from tests.support.records import commit, provenance


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def here(home: Home, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home.root))


def said(store: ArtifactStore, policy: Path | str, text: str, token_env: str = "") -> str:
    printed = io.StringIO()
    options = Namespace(policy=str(policy), profile="", once=text, max_tokens=12, temperature=1.0, token_env=token_env)
    talk(options, store, Console(file=printed, width=200))
    return printed.getvalue()


def test_the_answer_is_what_the_policy_samples(store, policy, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda below: 3)
    prompt = ChatTemplate.load(policy).prompt_ids((Message("user", "What is 12 + 30?"),))
    with LocalRuntime(RUNTIME).sampler(policy) as sampler:
        sampling = SamplingConfig(temperature=1.0, max_tokens=12)
        expected = sampler.generate([SamplingRequest(prompt, seed=3)], sampling)[0].text
    assert expected.strip()
    assert said(store, policy, "What is 12 + 30?") == f"{expected}\n"


def test_a_label_means_the_policy_of_the_newest_run_that_has_one(store, home):
    """Also of the profile that is named; not what another run has made under this label last."""

    def made(key: str, kind: type[ArtifactRef] = PolicyRef, label: str = "ppo") -> str:
        out = home.root / f"out-{key}"
        out.mkdir()
        (out / "weights.txt").write_text(key)
        return commit(store, key * 64, out, kind, children={}, record=provenance(label=label)).digest

    def noted(profile: str, **policies: str) -> None:
        note = new_note(
            home, f"run of {profile}", profile=profile, digest="d", overrides=[], until="", store=store.root
        )
        note.change(state="Completed", policies=policies)

    with pytest.raises(RlhfError, match="model = 'ppo': no run of tiny/rlvr has it; `rlhf run tiny/rlvr` makes it"):
        find_policy("ppo", "tiny/rlvr", store, home)
    first, second, last = made("a"), made("b"), made("c")
    store.note_label("ppo", "", {"key": "c" * 64})
    with pytest.raises(RlhfError, match="model = 'ppo': no run of tiny/rlvr has it; `rlhf run tiny/rlvr` makes it"):
        find_policy("ppo", "tiny/rlvr", store, home)
    assert find_policy("ppo", "", store, home)[0].digest == last
    noted("tiny/full", sft="f" * 64, ppo=first)
    noted("mine.toml", ppo=second)
    noted("tiny/full", sft="f" * 64)
    ref, line = find_policy("ppo", "", store, home)
    assert ref.digest == second and line.startswith(f"ppo: {second[:12]}, of the run run of mine.toml of mine.toml, 20")
    assert line.endswith(" UTC; --profile chooses another: tiny/full")
    ref, line = find_policy("ppo", "tiny/full", store, home)
    assert ref.digest == first and line.startswith(f"ppo: {first[:12]}, of the run run of tiny/full of tiny/full, 20")
    assert find_policy(last[:12], "tiny/full", store, home) == (store.latest("ppo").handle, f"{last[:12]}: {last[:12]}")  # type: ignore[union-attr]
    remove_tree(store.layout.object(second))
    assert find_policy("ppo", "", store, home)[0].digest == first
    helpful, _ = made("d", RewardModelRef, "reward_model"), made("e", RewardModelRef, "reward_model")
    noted("tiny/full", **model_digests({"reward_model": RewardModelRef(uri="", digest=helpful)}))
    model, line = find_model(RewardModelRef, "reward_model", "", store, home)
    assert model.digest == helpful and "of the run run of tiny/full" in line


def test_a_policy_that_the_store_has_not_is_an_error(store):
    with pytest.raises(RlhfError, match="ppo"):
        said(store, "ppo", "What is 12 + 30?")


def test_a_server_without_models_is_an_error(store, server):
    server.models = []
    with pytest.raises(ServiceError, match="lists no models; name an OpenAI-compatible server"):
        said(store, server.url, "Hi")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["chat", "sft", "--temperature", "-1"], "--temperature = -1.0: must be greater than or equal to 0"),
        (["chat", "sft", "--temperature", "0.005"], "--temperature = 0.005: must be 0 (greedy) or at least 0.01"),
        (["chat", "http://[x", "--once", "Hi"], "policy = 'http://[x': has no host, or an invalid port"),
        (["chat", "http://h:99999", "--once", "Hi"], "policy = 'http://h:99999': has no host, or an invalid port"),
        (["chat", "sft", "--max-tokens", "0"], "--max-tokens = 0: must be greater than or equal to 1"),
        (["chat", "sft", "--temperature", "inf"], "--temperature = inf: must be finite; give a finite number"),
        (["try-reward", "a:b", "c", "--timeout-s", "inf"], "--timeout-s = inf: must be > 0 and <= 2000000"),
        (["try-reward", "a:b", "c", "--arguments", '{"x": NaN}'], "arguments.x = nan: must be finite"),
        (["serve-reward", "--function", "a:b", "--max-wait-ms", "inf"], "--max-wait-ms = inf: must be >= 0"),
        (["serve", "sft", "--port", "70000"], "--port = 70000: must be 1 to 65535; name another port"),
        (["serve", "sft", "--port", "0"], "--port = 0: must be 1 to 65535"),
        (["serve", "sft", "--max-model-len", "-1"], "--max-model-len = -1: must be >= 0"),
        (["serve", "sft", "--kv-cache-gib", "nan"], "--kv-cache-gib = nan: must be > 0"),
    ],
)
def test_a_number_that_cannot_be_is_refused(words, error, capsys):
    assert main(words) == EXIT_REFUSED
    assert capsys.readouterr().err.startswith(error)


def test_a_policy_that_is_served_is_asked_there_with_the_token_of_its_file(
    store, server, tmp_path, home, monkeypatch, capsys
):
    (tmp_path / "policy").mkdir()
    digest = store.external(PolicyRef, tmp_path / "policy").digest
    note = ServingNote(url=server.url, name="ppo", digest=digest)
    monkeypatch.setattr(chat, "serving", lambda home: note)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a proxy that does not answer
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    server.says = lambda asked: f"{asked} Indeed."
    assert said(store, tmp_path / "policy", "Is it 42?") == "Is it 42? Indeed.\n"
    assert f"ppo at {server.url}\n" in capsys.readouterr().err
    (asked,) = server.requests
    assert (asked["path"], asked["model"], asked["max_tokens"]) == ("/v1/chat/completions", "ppo", 12)
    assert server.tokens == [f"Bearer {home.serve_token_string}"]
    assert home.serve_token.stat().st_mode & 0o777 == 0o600


def test_any_openai_server_can_be_talked_to_by_its_address(store, server, monkeypatch):
    monkeypatch.setenv("THEIR_TOKEN", "theirs")
    server.says = lambda asked: "Yes."
    assert said(store, server.url.removesuffix("/v1"), "Is it 42?", "THEIR_TOKEN") == "Yes.\n"
    assert server.requests[0]["model"] == "served" and set(server.tokens) == {"Bearer theirs"}
    server.says = lambda asked: 500
    with pytest.raises(ServiceError, match=r"no answer \(500: "):
        said(store, server.url, "Is it 42?", "THEIR_TOKEN")


def test_the_token_of_our_own_server_is_not_sent_to_others(store, server, monkeypatch):
    said(store, server.url, "Is it 42?")  # on this machine, but none that `rlhf serve` has started
    elsewhere = ServingNote(url="http://127.0.0.1:9/v1", name="ppo", digest="d")
    monkeypatch.setattr(chat, "serving", lambda home: elsewhere)
    said(store, server.url, "Is it 42?")
    assert set(server.tokens) == {None}
