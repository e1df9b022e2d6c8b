"""Serve a policy to OpenAI clients (`rlhf serve`)."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from pathlib import Path

from pipelines.cli.champion_verbs import model_name
from pipelines.cli.common import console, store_folder
from pipelines.flows.inputs import find_artifact
from pipelines.services.home import Home
from pipelines.services.policy_server import (
    ServedModel,
    ServeOptions,
    check_served,
    policy_server,
    token_of,
    wait_for_end,
)
from pipelines.services.ports import LAST_PORT
from pipelines.services.registry import tracking_uri
from rlhf_core.errors import ConfigError, explain
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import CHAMPION, PolicyRef

GPU = Path("/dev/nvidiactl")
"""There where a GPU of NVIDIA can be used; asking torch takes seconds."""


def serve(options: argparse.Namespace) -> None:
    """Serve a policy until Ctrl-C."""
    check_numbers(options)
    home, store = Home.here().make(), ArtifactStore(store_folder(options))
    model = served_model(options.policy, options.adapter, store, home)
    check_served(model)
    token = token_of(home, options.token_env)
    wanted = ServeOptions(options.port, options.max_model_len, options.kv_cache_gib, on_gpu=GPU.exists())
    _say(f"{model.name} ({model.digest[:12]}): starting vLLM; its log is {home.logs / 'serve.log'}")
    with policy_server(home, model, wanted, token) as note:
        _say(f"{note.name} at {note.url}  (models: {note.name}, {note.digest[:12]})")
        _say(f"token: in {f'the variable {options.token_env}' if options.token_env else home.serve_token}")
        with suppress(KeyboardInterrupt):
            wait_for_end(note)
    _say(f"the server has ended; its log is {home.logs / 'serve.log'}")


def check_numbers(options: argparse.Namespace) -> None:
    """Raise ConfigError for a port, a length or a size of the cache that cannot be."""
    if not 1 <= options.port <= LAST_PORT:
        raise ConfigError(explain("--port", options.port, f"must be 1 to {LAST_PORT}", "name another port"))
    if options.max_model_len < 0:
        rule = "must be >= 0"
        raise ConfigError(explain("--max-model-len", options.max_model_len, rule, "use 0 for as many as the model has"))
    if not 0 < options.kv_cache_gib < math.inf:
        raise ConfigError(explain("--kv-cache-gib", options.kv_cache_gib, "must be > 0", "give the size in GiB"))


def served_model(policy: str, adapter: str, store: ArtifactStore, home: Home) -> ServedModel:
    """Return the policy that a name means: `champion`, `champion:MODEL`, a label, a digest or a folder.

    `adapter` is a folder with a LoRA adapter, or the name of a policy that has one beside its weights.
    """
    ref = find_artifact(store, PolicyRef, champion_digest(policy, store, home) or policy)
    folder = store.path(ref)
    name = policy if not Path(policy).is_dir() else Path(policy).resolve().name
    return ServedModel(name, ref.digest, folder, _adapter(adapter, ref, store) if adapter else None)


def champion_digest(policy: str, store: ArtifactStore, home: Home) -> str:
    """Return the digest of the champion that `champion` or `champion:MODEL` means; "" for other names."""
    word, _, wanted = policy.partition(":")
    if word != CHAMPION:
        return ""
    from rlhf_core.tracking.champions import champion_digests  # with MLflow's parts

    uri = tracking_uri(home)
    name = model_name(uri, wanted)
    digest, _ = champion_digests(uri, name)
    if not digest:
        rule = f"{name} has no champion"
        raise ConfigError(explain("policy", policy, rule, "publish a policy whose gate holds, or name a policy"))
    return digest


def _adapter(named: str, policy: PolicyRef, store: ArtifactStore) -> Path:
    folder = Path(named).expanduser()
    if (folder / "adapter_config.json").is_file():
        return folder.resolve()
    trained = find_artifact(store, PolicyRef, named)
    found = store.path(trained) / "adapter"
    if not found.is_dir():
        rule = "this policy was trained without LoRA"
        raise ConfigError(explain("--adapter", named, rule, "name one that has a folder `adapter`"))
    # Over other weights it would be another policy, which nobody trained or evaluated.
    made = [one.payload["inputs"] for one in store.records() if one.handle.digest == trained.digest]
    began = [inputs["policy"] for inputs in made if "policy" in inputs]
    if began and policy.digest not in began:
        rule = f"was trained over other weights, {began[-1][:12]}"
        raise ConfigError(explain("--adapter", named, rule, f"serve {began[-1][:12]} with it, or {named} without"))
    return found


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
