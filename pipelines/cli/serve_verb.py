"""Start and stop the services, show champions, and answer gates."""

import argparse
import shlex
import sys
from pathlib import Path

from pipelines.cli.common import console, print_json, print_line, print_wrapped
from pipelines.cli.find_model import model_name
from pipelines.execution.approving import Meant, answer_gate
from pipelines.services import servers
from pipelines.services.home import Home, sign_in_link
from pipelines.services.run_notes import RUNNING, run_records
from pipelines.services.running import Services, running
from pipelines.services.user_servers import tracking_uri, user_prefect
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.secrets.redaction import shown
from rlhf_core.stage.gate_decisions import Answer, GateRequest
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG

# ---------------------------------------------------------------- services verbs


def up(options: argparse.Namespace) -> None:
    """Start the services and print their addresses."""
    home = Home.here()
    print_wrapped(f"starting the services (logs in {home.logs}) ...", "dim")
    found = servers.start_services(home, foreground=options.foreground)
    lines = [f"Prefect  {_prefect_page(home, found)}", f"MLflow   {found.mlflow_page}"]
    if not found.prefect_api:
        file = shlex.quote(str(_short(home.prefect_auth)))
        lines += ["in your shell:", f"  export PREFECT_API_URL={found.prefect_url}/api"]
        lines += [f"  export PREFECT_API_AUTH_STRING=$(cat {file})"]
    lines += ["start a run:  prefect deployment run rlhf-pipeline/full --watch", "stop:         rlhf down"]
    for line in lines:
        print_line(line)


def down(options: argparse.Namespace) -> None:
    """Stop the services. If runs are in progress, list them, and on a terminal ask first."""
    home = Home.here()
    active = [one for one in run_records(home) if one.state == RUNNING] if running(home) is not None else []
    for one in active:
        # A run of a deployment, which has no profile in its record, is a process of the services.
        effect = "continues without the services" if one.profile else "saves and stops; continue it with `rlhf resume`"
        print_line(f"in progress: {one.name}, {effect}")
    if active and not options.yes and sys.stdin.isatty():
        console.print("stop the services? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return
    console.print("stopped" if servers.stop_services(home) else "nothing was running")


def status(options: argparse.Namespace) -> int:
    """Print which services answer; return 1 if one does not."""
    home = Home.here()
    found = running(home)
    if options.json:
        well = {} if found is None else servers.service_states(home, found)
        urls = {} if found is None else {"Prefect": found.prefect_url, "MLflow": found.mlflow_page}
        services = [{"name": name, "url": url, "answers": well[name]} for name, url in urls.items()]
        print_json({"services": services, "user_prefect": shown(user_prefect(home)).removesuffix("/api")})
        return 0 if services and all(well.values()) else 1
    if found is None:
        theirs = user_prefect(home)
        where = f" (your own Prefect is at {shown(theirs).removesuffix('/api')})" if theirs else ""
        console.print(f"nothing is running{where}; `rlhf up` starts {'' if theirs else 'Prefect and '}MLflow")
        return 1
    well = servers.service_states(home, found)
    for name, url in (("Prefect", _prefect_page(home, found)), ("MLflow", found.mlflow_page)):
        said = "answers" if well[name] else "does not answer"
        print_line(f"{name:<8} {url}  {said}")
    return 0 if all(well.values()) else 1


def _prefect_page(home: Home, found: Services) -> str:
    """Prefect's address. On a terminal it signs the browser in; elsewhere not, as logs would keep the secret."""
    if found.prefect_api or not sys.stdout.isatty():
        return found.prefect_url
    return sign_in_link(found.prefect_url, home.prefect_auth_string)


def _short(path: Path) -> Path:
    """The path, relative to the working folder if it lies below it."""
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
    print_line(f"{found.name}: champion {now}")
    for move in reversed(found.moves):
        print_line(f"{move.at}  version {move.version} ({move.digest[:12]})  {move.how} by {move.by}: {move.why}")
    if found.previous:
        print_line(f"`rlhf rollback {found.name} --reason ...` makes version {found.previous} champion")


def rollback(options: argparse.Namespace) -> None:
    """Make the previous champion champion again."""
    from rlhf_core.tracking.champions import roll_back

    if not options.reason.strip():
        raise ConfigError("reason", options.reason, "is empty", "give a reason; it is kept in the registry")
    uri = tracking_uri(Home.here())
    name = model_name(uri, options.name)
    before, now = roll_back(uri, name, why=options.reason.strip())
    print_line(f"{name}: champion is version {now}, before version {before}: {options.reason.strip()}")


def _known(uri: str, name: str) -> str:
    from rlhf_core.tracking.champions import model_names

    return nearest(name, model_names(uri))


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
    print_line(f"gate {asked.gate}, {asked.condition['after']} {asked.digest[:12]}: {said}")
    print_line(next_step(request))


def next_step(request: GateRequest) -> str:
    """The command that continues the waiting run."""
    again = "the run goes on, or ends as blocked, with the same command as before"
    links = request.askers[-1].links
    return f"{again}, or with `rlhf resume {links[FLOW_RUN_TAG]}`" if FLOW_RUN_TAG in links else again
