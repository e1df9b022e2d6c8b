"""Serve a policy to OpenAI clients (`rlhf serve`)."""

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipelines.cli.common import console, print_json, print_line, store_folder
from pipelines.execution.approving import Meant, answer_gate
from pipelines.execution.plan import DIGITS
from pipelines.flows.inputs import find_artifact
from pipelines.flows.profile import load_profile, profile_digest
from pipelines.services import servers
from pipelines.services.home import Home, sign_in_link
from pipelines.services.policy_server import (
    ServedModel,
    ServeOptions,
    check_served,
    policy_server,
    token_of,
    wait_for_end,
)
from pipelines.services.run_notes import RUNNING, RunRecord, run_records, runs_with, whereabouts
from pipelines.services.running import LAST_PORT, Services, running
from pipelines.services.user_servers import tracking_uri, user_prefect
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.secrets.redaction import shown
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.gate_decisions import Answer, GateRequest
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG
from rlhf_core.types import CHAMPION, PolicyRef, RewardModelRef

M = TypeVar("M", PolicyRef, RewardModelRef)

# ---------------------------------------------------------------- services verbs


def up(options: argparse.Namespace) -> None:
    """Start the services and print their addresses."""
    home = Home.here()
    console.print(f"starting the services (logs in {home.logs}) ...", style="dim", highlight=False)
    found = servers.up(home, foreground=options.foreground)
    lines = [f"Prefect  {_prefect_page(home, found)}", f"MLflow   {found.mlflow_page}"]
    if not found.prefect_api:
        file = shlex.quote(str(_short(home.prefect_auth)))
        lines += ["in your shell:", f"  export PREFECT_API_URL={found.prefect_url}/api"]
        lines += [f"  export PREFECT_API_AUTH_STRING=$(cat {file})"]
    lines += ["start a run:  prefect deployment run rlhf-pipeline/full --watch", "stop:         rlhf down"]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def down(options: argparse.Namespace) -> None:
    """Stop the services. If runs are in progress, list them, and on a terminal ask first."""
    home = Home.here()
    active = [one for one in run_records(home) if one.state == RUNNING] if running(home) is not None else []
    for one in active:
        # A run of a deployment, which has no profile in its record, is a process of the services.
        effect = "continues without the services" if one.profile else "saves and stops; continue it with `rlhf resume`"
        print_line(console, f"in progress: {one.name}, {effect}")
    if active and not options.yes and sys.stdin.isatty():
        console.print("stop the services? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return
    console.print("stopped" if servers.down(home) else "nothing was running")


def status(options: argparse.Namespace) -> int:
    """Print which services answer; return 1 if one does not."""
    home = Home.here()
    found = running(home)
    if options.json:
        well = {} if found is None else servers.states(home, found)
        urls = {} if found is None else {"Prefect": found.prefect_url, "MLflow": found.mlflow_page}
        services = [{"name": name, "url": url, "answers": well[name]} for name, url in urls.items()]
        print_json({"services": services, "user_prefect": shown(user_prefect(home)).removesuffix("/api")})
        return 0 if services and all(well.values()) else 1
    if found is None:
        theirs = user_prefect(home)
        where = f" (your own Prefect is at {shown(theirs).removesuffix('/api')})" if theirs else ""
        console.print(f"nothing is running{where}; `rlhf up` starts {'' if theirs else 'Prefect and '}MLflow")
        return 1
    well = servers.states(home, found)
    for name, url in (("Prefect", _prefect_page(home, found)), ("MLflow", found.mlflow_page)):
        said = "answers" if well[name] else "does not answer"
        console.print(f"{name:<8} {url}  {said}", highlight=False, soft_wrap=True)
    return 0 if all(well.values()) else 1


def _prefect_page(home: Home, found: Services) -> str:
    """Return Prefect's address. On a terminal it signs the browser in; elsewhere not, as logs would keep the secret."""
    if found.prefect_api or not sys.stdout.isatty():
        return found.prefect_url
    return sign_in_link(found.prefect_url, home.prefect_auth_string)


def _short(path: Path) -> Path:
    """Return the path relative to the working folder if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# ---------------------------------------------------------------- champion verbs


def champion(options: argparse.Namespace) -> None:
    """Print which version is champion, and which ones were, newest first."""
    from rlhf_core.tracking.champions import read_champions  # with MLflow's parts

    uri = tracking_uri(Home.here())
    found = read_champions(uri, model_name(uri, options.name))
    if found is None:
        raise ConfigError("champion", options.name, "the registry has no such model", _known(uri, options.name))
    now = f"version {found.current} ({found.digests[found.current][:12]})" if found.current else "none"
    _print(f"{found.name}: champion {now}")
    for move in reversed(found.moves):
        _print(f"{move.at}  version {move.version} ({move.digest[:12]})  {move.how} by {move.by}: {move.why}")
    if found.previous:
        _print(f"`rlhf rollback {found.name} --reason ...` makes version {found.previous} champion")


def rollback(options: argparse.Namespace) -> None:
    """Make the previous champion champion again."""
    from rlhf_core.tracking.champions import roll_back

    if not options.reason.strip():
        raise ConfigError("reason", options.reason, "is empty", "give a reason; it is kept in the registry")
    uri = tracking_uri(Home.here())
    name = model_name(uri, options.name)
    before, now = roll_back(uri, name, why=options.reason.strip())
    _print(f"{name}: champion is version {now}, before version {before}: {options.reason.strip()}")


def model_name(uri: str, given: str) -> str:
    """Return the given name, or that of the only model that has a champion."""
    from rlhf_core.tracking.champions import model_names

    if given:
        return given
    names = model_names(uri)
    if len(names) != 1:
        rule = f"several models have champions: {', '.join(names)}" if names else "no model has a champion yet"
        remedy = "name one of them" if names else "publish a policy whose gate holds"
        raise ConfigError("champion", given, rule, remedy)
    return names[0]


def _known(uri: str, name: str) -> str:
    from rlhf_core.tracking.champions import model_names

    return nearest(name, model_names(uri))


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# ---------------------------------------------------------------- Serve a policy to OpenAI clients (`rlhf serve`)

GPU = Path("/dev/nvidiactl")
"""Exists where an NVIDIA GPU can be used; a query by torch takes seconds."""


def serve(options: argparse.Namespace) -> None:
    """Serve a policy until Ctrl-C."""
    check_numbers(options)
    home, store = Home.here().make(), ArtifactStore(store_folder(options))
    model = served_model(options, store, home)
    check_served(model)
    token = token_of(home, options.token_env)
    wanted = ServeOptions(options.port, options.max_model_len, options.kv_cache_gib, on_gpu=GPU.exists())
    print_line(console, f"{model.name} ({model.digest[:12]}): starting vLLM; its log is {home.logs / 'serve.log'}")
    with policy_server(home, model, wanted, token) as note:
        print_line(console, f"{note.name} at {note.url}  (models: {note.name}, {note.digest[:12]})")
        print_line(
            console, f"token: in {f'the variable {options.token_env}' if options.token_env else home.serve_token}"
        )
        with suppress(KeyboardInterrupt):
            wait_for_end(note)
    print_line(console, f"the server has ended; its log is {home.logs / 'serve.log'}")


def check_numbers(options: argparse.Namespace) -> None:
    """Raise ConfigError for a port, a length or a size of the cache that cannot be."""
    if not 1 <= options.port <= LAST_PORT:
        raise ConfigError("--port", options.port, f"must be 1 to {LAST_PORT}", "name another port")
    if options.max_model_len < 0:
        rule = "must be >= 0"
        raise ConfigError("--max-model-len", options.max_model_len, rule, "use 0 for as many as the model has")
    if not 0 < options.kv_cache_gib < math.inf:
        raise ConfigError("--kv-cache-gib", options.kv_cache_gib, "must be > 0", "give the size in GiB")


def served_model(options: argparse.Namespace, store: ArtifactStore, home: Home) -> ServedModel:
    """Return the policy that a name means, and its adapter, if one is named; print which policies these are.

    An adapter is a folder, or the name of a policy that has one beside its weights.
    """
    policy = options.policy
    ref, which = find_policy(policy, options.profile, store, home)
    print_line(console, which)
    folder = store.path(ref)
    name = policy if not Path(policy).is_dir() else Path(policy).resolve().name
    return ServedModel(name, ref.digest, folder, _adapter(options, ref, store, home) if options.adapter else None)


def find_policy(name: str, profile: str, store: ArtifactStore, home: Home) -> tuple[PolicyRef, str]:
    """Return the policy that `champion`, `champion:MODEL` or a name means, and a line that names it (`find_model`)."""
    digest = champion_digest(name, store, home)
    if not digest:
        return find_model(PolicyRef, name, profile, store, home)
    return find_artifact(store, PolicyRef, digest, given=name), f"{name}: {digest[:DIGITS]}"


def find_model(kind: type[M], name: str, profile: str, store: ArtifactStore, home: Home) -> tuple[M, str]:
    """Return the policy or reward model that a label, a digest or a folder means, and a line that names it.

    A label means the model of the newest run that has one, or of the newest run of `profile`. Raises ConfigError if
    that profile has made none.
    """
    digest = origin = ""
    is_label = not ("." in name or re.fullmatch("[0-9a-f]{8,}", name) or Path(name).is_dir())
    runs = runs_with(home, store.root, name) if is_label else []
    made = store.latest(name) if is_label else None
    if profile and is_label:
        config = load_profile(profile)
        runs = [one for one in runs if (one.profile or one.digest) in (whereabouts(profile), profile_digest(config))]
        made = store.latest(name, config.name)
        if not runs and made is None:
            rule = f"no run of {profile} has it"
            raise ConfigError("model", name, rule, f"`rlhf run {profile}` makes it; `rlhf runs` lists the runs")
    if runs:
        digest, origin = runs[0].policies[name], _origin(name, runs)
    elif made is not None:  # by a run that another folder, or an earlier version, has recorded
        digest, origin = made.handle.digest, f", made {made.made}"
    ref = find_artifact(store, kind, digest or name, given=name)
    return ref, f"{name}: {ref.digest[:DIGITS]}{origin}"


def _origin(name: str, runs: Sequence[RunRecord]) -> str:
    """Return the run, profile and time of the first of the runs, and whose policies of this name differ from its own."""
    run = runs[0]
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.began))
    others = {one.profile for one in runs if one.policies[name] != run.policies[name]} - {run.profile, ""}
    more = f"; --profile chooses another: {', '.join(sorted(others))}" if others else ""
    return f", of the run {run.name} of {run.profile or 'a deployment'}, {at} UTC{more}"


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
        raise ConfigError("policy", policy, rule, "publish a policy whose gate holds, or name a policy")
    return digest


def _adapter(options: argparse.Namespace, policy: PolicyRef, store: ArtifactStore, home: Home) -> Path:
    named, folder = options.adapter, Path(options.adapter).expanduser()
    if (folder / "adapter_config.json").is_file():
        return folder.resolve()
    trained, which = find_policy(named, options.profile, store, home)
    print_line(console, f"adapter {which}")
    found = store.path(trained) / "adapter"
    if not found.is_dir():
        rule = "this policy was trained without LoRA"
        raise ConfigError("--adapter", named, rule, "name one that has a folder `adapter`")
    # Over other weights it would be another policy, which was neither trained nor evaluated.
    made = [one.payload["inputs"] for one in store.records() if one.handle.digest == trained.digest]
    began = [inputs["policy"] for inputs in made if "policy" in inputs]
    if began and policy.digest not in began:
        rule = f"was trained over other weights, {began[-1][:12]}"
        raise ConfigError("--adapter", named, rule, f"serve {began[-1][:12]} with it, or {named} without")
    return found


# ---------------------------------------------------------------- answer a gate's question (`rlhf approve`, `rlhf reject`)


def approve(options: argparse.Namespace) -> None:
    """Approve the artifact: the stages after it run with the next run of the same command."""
    _answer(options, "approve")


def reject(options: argparse.Namespace) -> None:
    """Reject the artifact: the stages after it will not run."""
    _answer(options, "reject")


def _answer(options: argparse.Namespace, answer: Answer) -> None:
    meant = Meant(options.run, options.gate, artifact=options.artifact, question=options.question)
    request, said = answer_gate(meant, answer, reason=options.reason, store=options.store)
    asked = request.question
    line = f"gate {asked.gate}, {asked.condition['after']} {asked.digest[:12]}: {said}"
    print_line(console, line)
    console.print(next_step(request), highlight=False, soft_wrap=True)


def next_step(request: GateRequest) -> str:
    """Return the command that continues the waiting run."""
    again = "the run goes on, or ends as blocked, with the same command as before"
    links = request.askers[-1].links
    return f"{again}, or with `rlhf resume {links[FLOW_RUN_TAG]}`" if FLOW_RUN_TAG in links else again
