"""Serve a policy to OpenAI clients (`rlhf serve`)."""

import argparse
import math
from contextlib import suppress
from pathlib import Path

from pipelines.cli.common import print_line, store_folder
from pipelines.cli.find_model import find_policy
from pipelines.cli.options import store_option
from pipelines.services.home import Home
from pipelines.services.policy_server import token_of
from pipelines.services.running import LAST_PORT
from rlhf_contrib.serve.policy_server import ServedModel, ServeOptions, check_served, policy_server, wait_for_end
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef

GPU = Path("/dev/nvidiactl")
"""Device file of an NVIDIA GPU; asking torch would take seconds."""


def serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", help="`champion`, `champion:MODEL`, stage label (sft, ppo), digest, or folder")
    parser.add_argument("--port", type=int, default=8000, help="port, or the next free one (default %(default)s)")
    parser.add_argument("--adapter", default="", help="also serve a LoRA adapter: a folder, or a policy that has one")
    parser.add_argument(
        "--token-env", default="", metavar="NAME", help="environment variable with the token; default: a token file"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=0, metavar="N", help="context length in tokens; default: the model's"
    )
    parser.add_argument(
        "--kv-cache-gib", type=float, default=1.0, help="KV cache in GiB, without a GPU (default %(default)s)"
    )
    store_option(parser)


def serve(options: argparse.Namespace) -> None:
    """Serve a policy until Ctrl-C."""
    check_numbers(options)
    home, store = Home.here().make(), ArtifactStore(store_folder(options))
    model = served_model(options, store, home)
    check_served(model)
    token = token_of(home, options.token_env)
    wanted = ServeOptions(options.port, options.max_model_len, options.kv_cache_gib, on_gpu=GPU.exists())
    print_line(f"{model.name} ({model.digest[:12]}): starting vLLM; its log is {home.logs / 'serve.log'}")
    with policy_server(home, model, wanted, token) as note:
        print_line(f"{note.name} at {note.url}  (models: {note.name}, {note.digest[:12]})")
        print_line(f"token: in {f'the variable {options.token_env}' if options.token_env else home.serve_token}")
        with suppress(KeyboardInterrupt):
            wait_for_end(note)
    print_line(f"the server has ended; its log is {home.logs / 'serve.log'}")


def check_numbers(options: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid port, length or cache size."""
    if not 1 <= options.port <= LAST_PORT:
        raise ConfigError("--port", options.port, f"must be 1 to {LAST_PORT}", "name another port")
    if options.max_model_len < 0:
        rule = "must be >= 0"
        raise ConfigError("--max-model-len", options.max_model_len, rule, "use 0 for as many as the model has")
    if not 0 < options.kv_cache_gib < math.inf:
        raise ConfigError("--kv-cache-gib", options.kv_cache_gib, "must be > 0", "give the size in GiB")


def served_model(options: argparse.Namespace, store: ArtifactStore, home: Home) -> ServedModel:
    """Find the policy with a name, and its adapter if one is named; prints which policies these are.

    An adapter is given as a folder, or as the name of a policy that includes one.
    """
    policy = options.policy
    ref, which = find_policy(policy, options.profile, store, home)
    print_line(which)
    folder = store.path(ref)
    name = policy if not Path(policy).is_dir() else Path(policy).resolve().name
    return ServedModel(name, ref.digest, folder, _adapter(options, ref, store, home) if options.adapter else None)


def _adapter(options: argparse.Namespace, policy: PolicyRef, store: ArtifactStore, home: Home) -> Path:
    named, folder = options.adapter, Path(options.adapter).expanduser()
    if (folder / "adapter_config.json").is_file():
        return folder.resolve()
    trained, which = find_policy(named, options.profile, store, home)
    print_line(f"adapter {which}")
    found = store.path(trained) / "adapter"
    if not found.is_dir():
        rule = "this policy was trained without LoRA"
        raise ConfigError("--adapter", named, rule, "name one that has a folder `adapter`")
    # With other base weights it would be another policy, which was neither trained nor evaluated.
    made = [one.payload["inputs"] for one in store.records() if one.handle.digest == trained.digest]
    began = [inputs["policy"] for inputs in made if "policy" in inputs]
    if began and policy.digest not in began:
        rule = f"was trained over other weights, {began[-1][:12]}"
        raise ConfigError("--adapter", named, rule, f"serve {began[-1][:12]} with it, or {named} without")
    return found
