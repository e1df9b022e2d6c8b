"""Serve a reward function or a reward model over HTTP (`rlhf serve-reward`)."""

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from pipelines.cli.common import print_line, store_folder
from pipelines.cli.find_model import find_model
from pipelines.cli.options import function_options, store_option
from pipelines.cli.try_reward import check_timeout, read_json_arguments
from pipelines.services.home import Home
from rlhf_contrib.serve.reward_server import (
    Score,
    ServerLimits,
    as_it_stands,
    create_app,
    function_score,
    rendered,
    reward_model_score,
)
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.pieces import encode as encode_text
from rlhf_core.errors import ConfigError
from rlhf_core.http.serving import limited, listening
from rlhf_core.interfaces import ModelSpec
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.rewards.model import Contract, verify_contract
from rlhf_core.runtime.local_runtime import open_runtime
from rlhf_core.schema.base import LONGEST_S
from rlhf_core.schema.secrets import bearer
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import RewardModelRef

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def serve_reward_options(parser: argparse.ArgumentParser) -> None:
    reward = parser.add_mutually_exclusive_group(required=True)
    reward.add_argument("--function", default="", help="module:function or file.py:function")
    reward.add_argument("--reward-model", default="", metavar="MODEL", help="stage label, digest, or folder")
    function_options(parser)
    parser.add_argument("--render", action="store_true", help="format plain prompts with the reward model's template")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=5000, help="port to listen on (default %(default)s)")
    parser.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the bearer token")
    parser.add_argument("--max-batch", type=int, default=256, help="answers per batch (default %(default)s)")
    parser.add_argument(
        "--max-wait-ms",
        type=float,
        default=10.0,
        help="milliseconds to wait for further requests before a batch is scored (default %(default)s)",
    )
    store_option(parser)


def serve_reward(options: argparse.Namespace) -> None:
    """Serve a reward over HTTP."""
    serve(options, ArtifactStore(store_folder(options)))


def serve(options: argparse.Namespace, store: ArtifactStore) -> None:
    """Serve until SIGTERM or Ctrl-C; pending requests are answered first."""
    check_timeout(options.timeout_s)
    if not 0 <= options.max_wait_ms <= 1000 * LONGEST_S:
        rule = f"must be >= 0 and <= {1000 * LONGEST_S}"
        raise ConfigError("--max-wait-ms", options.max_wait_ms, rule, "give another number")
    token = read_token(options.token_env, host=options.host)
    limits = ServerLimits(max_batch=options.max_batch, max_wait_s=options.max_wait_ms / 1000)
    name = options.function or options.reward_model
    with listening(options.host, options.port) as listener, open_score(options, store) as score:
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}/get_reward"
        app = create_app(score, name=name, token=token, limits=limits)
        config = limited(app, timeout_graceful_shutdown=int(options.timeout_s) + 1)
        print_line(f"{name} at {url}  (/health, /metrics)")
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again for the signal that ended the server
            uvicorn.Server(config).run(sockets=[listener])


def read_token(token_env: str, *, host: str) -> str:
    """Read the token from the environment variable, or "". ConfigError if others could call it without a token."""
    if not token_env:
        if host not in LOCAL_HOSTS:
            rule = "other machines can reach this address, and no token is set"
            raise ConfigError(
                "--host", host, rule, "name the environment variable that holds a token: --token-env REWARD_TOKEN"
            )
        return ""
    return bearer("--token-env", token_env)["Authorization"].removeprefix("Bearer ")


@contextlib.contextmanager
def open_score(options: argparse.Namespace, store: ArtifactStore) -> Iterator[Score]:
    """Open the scorer: the function in a separate process, or the reward model, verified against its contract."""
    if options.function:
        settings = WorkerSettings(arguments=read_json_arguments(options.arguments))
        with IsolatedReward("served", options.function, timeout_s=options.timeout_s, settings=settings) as reward:
            yield function_score(reward.outcome)
        return
    ref, which = find_model(RewardModelRef, options.reward_model, options.profile, store, Home.here().make())
    print_line(which)
    with open_reward_model(store.path(ref), options) as score:
        yield score


@contextlib.contextmanager
def open_reward_model(folder: Path, options: argparse.Namespace) -> Iterator[Score]:
    """Open a scorer for the reward model in `folder`, which reads text as the score stage reads tokens."""
    contract, chat = Contract.read(folder), ChatTemplate.load(folder)
    encode = rendered(chat.answered_ids) if options.render else as_it_stands(partial(encode_text, chat.tokenizer))
    runtime = open_runtime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))
    try:
        with runtime.trainer("reward_model", ModelSpec(str(folder), head="score", lora=None, seed=0), None) as trainer:
            verify_contract(trainer, contract)
            yield reward_model_score(trainer, encode, max_length=contract.max_length)
    finally:
        runtime.close()
