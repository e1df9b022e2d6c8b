"""References to environment variables, and what is refused in their place."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.agents import EnvironmentAgent, NemoGymAgent, OpenEnvAgent, ProgramAgent, VerifiersAgent
from rlhf_core.config.rewards import FunctionReward, JudgeReward, RemoteReward, RewardsConfig
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import Config, keyed
from rlhf_core.schema.secrets import bearer, check, resolved, with_secrets
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.fingerprint import canonical_json

TEMPLATE = "Rate {completion}"


def function(**arguments: Any) -> FunctionReward:
    return FunctionReward(function="mine:reward", arguments=arguments)


@pytest.mark.parametrize("value", ["abc\r", " abc", "a\nb", "tök"])
def test_a_token_that_no_header_can_hold_is_refused(value, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", value)
    with pytest.raises(ConfigError, match=r"^judge = 'JUDGE_TOKEN': .*: no header can hold it; set the variable to"):
        bearer("judge", "JUDGE_TOKEN")


def test_references_at_any_depth_are_what_their_variables_hold(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2/1")
    given = {"n": 3, "keys": ["env:JUDGE_KEY", None], "headers": {"Authorization": "Bearer ${env:JUDGE_KEY}"}}
    assert resolved(given, "arguments") == {
        "n": 3,
        "keys": ["hunter2/1", None],
        "headers": {"Authorization": "Bearer hunter2/1"},
    }


def test_in_an_address_the_value_is_quoted_so_that_it_stays_where_it_stands(monkeypatch):
    monkeypatch.setenv("PASSWORD", "a@b/c")
    assert resolved("https://me:${env:PASSWORD}@host/x", "url") == "https://me:a%40b%2Fc@host/x"
    assert resolved("https://[::${env:PASSWORD}", "url") == "https://[::a%40b%2Fc", "a library refuses it"


def test_what_was_read_is_taken_out_of_texts_as_it_stands_there(monkeypatch):
    monkeypatch.setenv("READ_SECRET", "pass 'word\"/1")
    value = resolved("env:READ_SECRET", "arguments.password")
    text = f"{value} | {[value]!r} | {resolved('http://h/?q=${env:READ_SECRET}', 'url')}"
    assert without_secrets(text) == "*** | ['***'] | http://h/?q=***"


@pytest.mark.parametrize("value", ["", None])
def test_a_variable_that_is_not_set_is_refused_by_its_key(monkeypatch, value):
    monkeypatch.delenv("NO_SUCH", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_SUCH", value)
    rewards = RewardsConfig(terms={"mine": function(options={"api_key": "env:NO_SUCH"})})
    with pytest.raises(
        ConfigError, match=r"^score\.terms\.mine\.arguments\.options\.api_key = 'env:NO_SUCH': NO_SUCH is not set; "
    ):
        check(rewards, "score")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (RemoteReward(urls=("http://a", "http://b/${env:NO_SUCH}")), r"x\.urls\[1\]"),
        (RemoteReward(urls=("http://a",), token_env="NO_SUCH"), r"x\.token_env"),
        (JudgeReward(url="http://me:${env:NO_SUCH}@a/v1", model="m", template=TEMPLATE), r"x\.url"),
        (EnvironmentAgent(environment="a:B", arguments={"key": "env:NO_SUCH"}), r"x\.arguments\.key"),
        (OpenEnvAgent(url="http://a", reset_arguments={"key": ["env:NO_SUCH"]}), r"x\.reset_arguments\.key\[0\]"),
        (NemoGymAgent(url="http://${env:NO_SUCH}@a"), r"x\.url"),
        (VerifiersAgent(python="p", environment="e", arguments={"a": "env:NO_SUCH"}), r"x\.arguments\.a"),
        (ProgramAgent(command=("p",), variables={"A": "env:NO_SUCH"}), r"x\.variables\.A"),
        (VllmServerSamplerConfig(urls=("http://me:${env:NO_SUCH}@a",), weights_folder="/w"), r"x\.urls\[0\]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Config) else value,
)
def test_every_place_that_may_hold_a_secret_is_looked_at(monkeypatch, config, key):
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(ConfigError, match=f"^{key} = .*is not set; export it"):
        check(config, "x")
    monkeypatch.setenv("NO_SUCH", "hunter2")
    check(config, "x")
    assert "hunter2" not in str(config) and "hunter2" not in canonical_json(keyed(config))
    assert ("hunter2" in str(with_secrets(config, "x"))) == (
        "token_env" not in key
    )  # a variable's name is no reference


MAKERS: dict[str, Callable[[Any], Config]] = {
    "arguments": lambda value: function(**value),
    "environment": lambda value: EnvironmentAgent(environment="a:B", arguments=value),
    "verifiers": lambda value: VerifiersAgent(python="p", environment="e", arguments=value),
    "reset": lambda value: OpenEnvAgent(url="http://a", reset_arguments=value),
    "variables": lambda value: ProgramAgent(command=("p",), variables=value),
    "remote": lambda value: RemoteReward(urls=(value,)),
    "judge": lambda value: JudgeReward(url=value, model="m", template=TEMPLATE),
    "openenv": lambda value: OpenEnvAgent(url=value),
    "nemo_gym": lambda value: NemoGymAgent(url=value),
    "vllm_server": lambda value: VllmServerSamplerConfig(urls=(value,), weights_folder="/w"),
    "token_env": lambda value: RemoteReward(urls=("http://a",), token_env=value),
    "command": lambda value: ProgramAgent(command=("python", *value)),
}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("arguments", {"api_key": "hunter2"}, "arguments.api_key = '***': is a secret in plain text"),
        ("arguments", {"token": "hunter2"}, 'write "env:TOKEN", and set that variable where you start the run'),
        ("arguments", {"headers": {"X-Api-Key": "hunter2"}}, "arguments.headers.X-Api-Key = '***'"),
        ("arguments", {"headers": {"Authorization": "Basic hunter2"}}, "arguments.headers.Authorization = '***'"),
        ("arguments", {"passwords": ["hunter2"]}, "arguments.passwords[0] = '***'"),
        ("arguments", {"at": "https://me:hunter2@host/x"}, "arguments.at = 'https://***@host/x'"),
        ("arguments", {"at": "https://host/x?access_token=hunter2"}, "arguments.at = 'https://host/x'"),
        ("arguments", {"which": "hf_hunter2hunter2hunter2"}, "arguments.which = '***'"),
        ("environment", {"client": {"clientSecret": "hunter2"}}, "arguments.client.clientSecret = '***'"),
        ("verifiers", {"judge_api_key": "hunter2"}, "arguments.judge_api_key = '***'"),
        ("reset", {"password": "hunter2"}, "reset_arguments.password = '***'"),
        ("variables", {"OPENAI_KEY": "hunter2"}, "variables.OPENAI_KEY = '***'"),
        ("variables", {"HF_TOKEN": "hunter2"}, "variables.HF_TOKEN = '***'"),
        ("remote", "https://me:hunter2@host/get_reward", 'write "${env:NAME}" in its place'),
        ("remote", "https://hunter2@host/get_reward", "urls[0] = 'https://***@host/get_reward'"),
        ("judge", "https://host/v1?key=hunter2", "url = 'https://host/v1'"),
        ("openenv", "https://me:hunter2@host", "url = 'https://***@host'"),
        ("nemo_gym", "https://host?api-key=hunter2", "url = 'https://host'"),
        ("vllm_server", "https://me:hunter2@host", "urls[0] = 'https://***@host'"),
        ("token_env", "hunter2-and-more", "token_env = '***': must be the name of an environment variable"),
        ("command", ("agent.py", "--api-key", "hunter2"), "command = '***': is a secret in plain text"),
        ("command", ("agent.py", "--api-key=hunter2"), "pass it to the program with `variables`"),
        ("command", ("agent.py", "https://me:hunter2@host"), "command = 'https://***@host'"),
    ],
)
def test_a_secret_in_clear_is_refused_and_not_repeated(place, value, message):
    with pytest.raises(ValidationError, match=re.escape(message)) as caught:
        MAKERS[place](value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("arguments", {"max_tokens": "64", "tokenizer": "gpt2", "stop_token": "END", "token": "<|im_end|>", "n_tokens": 3}),
        ("arguments", {"keywords": "a", "sort_key": "score", "key": "answer", "keys": ["a"], "api_key_env": "OPENAI"}),
        ("arguments", {"secretary": "a", "author": "b", "authority": "c", "passage": "d", "pass_rate": "e"}),
        ("arguments", {"at": "https://host:8000/v1?page=2", "task": "task-estimator-linear-model", "api_key": ""}),
        ("arguments", {"api_key": "env:JUDGE_KEY", "headers": {"Authorization": "Bearer ${env:JUDGE_KEY}"}}),
        ("arguments", {"at": "https://me:${env:PASSWORD}@host/x?token=${env:TOKEN}", "token": 50256, "secret": True}),
        ("variables", {"PATH": "/usr/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de", "API_KEY": "env:KEY"}),
        ("remote", "https://me:${env:PASSWORD}@host:1/get_reward"),
        ("judge", "http://127.0.0.1:8000/${env:HOOK}/v1"),
        ("vllm_server", "http://me:${env:PASSWORD}@host:8000"),
        ("token_env", "JUDGE_TOKEN"),
        ("command", ("agent.py", "--max-tokens", "64", "--token-limit=3", "--api-key-env", "KEY", "--secret", "--fast")),
    ],
)  # fmt: skip
def test_what_only_sounds_like_a_secret_and_references_pass(place, value):
    made = MAKERS[place](value)
    assert canonical_json(value).strip("[]") in canonical_json(made.model_dump(mode="json"))


def test_the_value_is_no_part_of_the_key_and_the_reference_is(monkeypatch):
    digests = set()
    for value in ("hunter2", "hunter3"):
        monkeypatch.setenv("JUDGE_KEY", value)
        digests.add(canonical_json(keyed(function(api_key="env:JUDGE_KEY"))))
    assert len(digests) == 1 and "env:JUDGE_KEY" in digests.pop()
