"""Talk to a policy in the terminal (`rlhf chat`): to a server if one serves it, else in this process."""

import argparse
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx
from pydantic import ValidationError
from rich.console import Console

from pipelines.cli.common import console, store_folder
from pipelines.cli.find_model import find_policy
from pipelines.services.home import Home
from pipelines.services.policy_server import serving, token_of
from pipelines.services.running import ServiceError
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import http_address
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PolicyRef, SamplingRequest

Answer: TypeAlias = Callable[[Sequence[Message]], str]
ANSWER_TIMEOUT_S = 600.0
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
SHOWN_CHARACTERS = 300


def chat(options: argparse.Namespace) -> None:
    """Talk to a policy."""
    talk(options, ArtifactStore(store_folder(options)), console)


def talk(options: argparse.Namespace, store: ArtifactStore, console: Console) -> None:
    """Answer `--once TEXT`, or every line of input until an empty one."""
    history: list[Message] = []
    with open_answer(options, store, console) as answer:
        while True:
            try:
                text = options.once or console.input("[bold]> [/bold]").strip()
            except EOFError:
                return
            if not text:
                return
            history.append(Message("user", text))
            said = answer(history)
            console.print(said, markup=False, highlight=False)
            history.append(Message("assistant", said))
            if options.once:
                return


@contextmanager
def open_answer(options: argparse.Namespace, store: ArtifactStore, console: Console) -> Iterator[Answer]:
    """Yield a function that answers a conversation: by the server at a URL, `rlhf serve`, or the policy in this process."""
    sampling = _sampling(options)
    if options.policy.startswith(("http://", "https://")):
        with served_answer(options.policy, "", options.token_env, sampling) as answer:
            yield answer
        return
    home = Home.here()
    ref, which = find_policy(options.policy, options.profile, store, home)
    sys.stderr.write(f"{which}\n")  # standard output has the answers alone
    note = serving(home)
    if note is not None and note.digest == ref.digest:
        sys.stderr.write(f"{note.name} at {note.url}\n")
        with served_answer(note.url, note.name, options.token_env, sampling) as answer:
            yield answer
        return
    with own_answer(store, ref, sampling) as answer:
        yield answer


def _sampling(options: argparse.Namespace) -> SamplingConfig:
    try:
        return SamplingConfig(temperature=options.temperature, max_tokens=options.max_tokens)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if not first["loc"]:  # a rule that names its key
            raise ConfigError(f"--{rule}") from None
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise ConfigError(option, first["input"], rule, "give another number") from None


@contextmanager
def served_answer(url: str, model: str, token_env: str, sampling: SamplingConfig) -> Iterator[Answer]:
    """Yield a client of an OpenAI-compatible server; if `model` is empty, it asks the first model of the server.

    The token is in the environment variable `token_env`. If that is not given, the token in the state folder's file is
    used, and only for the server of `rlhf serve`. Raises ServiceError.
    """
    try:
        http_address(url)
    except ValueError as error:
        raise ConfigError(f"policy = {error}") from None
    base = url.rstrip("/") if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
    # The token of our own server is sent to that process alone: another address, even on this machine, may be anybody's.
    note = None if token_env else serving(Home.here())
    known = token_env or (note is not None and note.url == base)
    headers = {"Authorization": f"Bearer {token_of(Home.here(), token_env)}"} if known else {}
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=10.0)
    direct = httpx.URL(url).host in LOCAL_HOSTS  # a proxy cannot reach this machine, and must not see the token
    with httpx.Client(headers=headers, timeout=timeout, trust_env=not direct) as client:
        name = model or _first_model(client, base)

        def answer(history: Sequence[Message]) -> str:
            body = {
                "model": name,
                "messages": [{"role": message.role, "content": message.content} for message in history],
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
            }
            answered = _asked(client, "POST", f"{base}/chat/completions", body)
            return str(answered["choices"][0]["message"]["content"] or "")

        yield answer


def _first_model(client: httpx.Client, base: str) -> str:
    listed = _asked(client, "GET", f"{base}/models", None)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        remedy = "name an OpenAI-compatible server that serves one"
        raise ServiceError(f"{without_secrets(base)}: lists no models; {remedy}") from None


def _asked(client: httpx.Client, method: str, url: str, body: object) -> Any:
    try:
        response = client.request(method, url, json=body)
        if not response.is_error:
            return response.json()
        said = f"{response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
    except (httpx.HTTPError, ValueError) as error:
        said = repr(error)
    raise ServiceError(f"{without_secrets(url)}: no answer ({said}); see whether the server runs, and --token-env")


@contextmanager
def own_answer(store: ArtifactStore, ref: PolicyRef, sampling: SamplingConfig) -> Iterator[Answer]:
    """Yield the policy itself, sampled with plain transformers: that answers before vLLM would have started."""
    from rlhf_core.data.chat import ChatTemplate  # these import torch, which a server elsewhere does without
    from rlhf_core.runtime.local_runtime import open_runtime

    policy = store.path(ref)
    template = ChatTemplate.load(policy)
    runtime = open_runtime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))
    try:
        with runtime.sampler(policy) as sampler:

            def answer(history: Sequence[Message]) -> str:
                request = SamplingRequest(template.prompt_ids(tuple(history)), secrets.randbelow(2**31))
                return sampler.generate([request], sampling)[0].text

            yield answer
    finally:
        runtime.close()
