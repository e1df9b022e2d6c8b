"""The command `rlhf`: verbs only. Hyper-parameters live in profiles; `--set key=value` changes one for a run."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType

from rlhf_core.errors import RlhfError
from rlhf_core.processes.large_imports import skip_last_collections
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting, leave_lost_terminal, terminations

EXIT_REFUSED = 2
EXIT_WAITING = 75
"""For a run that waits for people: EX_TEMPFAIL of sysexits.h, try again later."""
EXIT_BLOCKED = 77
"""For a run in which a gate does not hold: EX_NOPERM of sysexits.h."""
EXIT_OVER_BUDGET = 69
"""For a run that has spent its budget: EX_UNAVAILABLE of sysexits.h."""
EXIT_INTERRUPTED = 130

VERBS = {
    "up": "pipelines.cli.serve_verb:up",
    "down": "pipelines.cli.serve_verb:down",
    "status": "pipelines.cli.serve_verb:status",
    "run": "pipelines.cli.run_command:run",
    "sweep": "pipelines.cli.sweep_verb:sweep",
    "plan": "pipelines.cli.plan_verbs:plan",
    "explain": "pipelines.cli.plan_verbs:explain",
    "diff": "pipelines.cli.diff_verb:diff",
    "reproduce": "pipelines.cli.plan_verbs:reproduce",
    "approve": "pipelines.cli.serve_verb:approve",
    "reject": "pipelines.cli.serve_verb:reject",
    "champion": "pipelines.cli.serve_verb:champion",
    "rollback": "pipelines.cli.serve_verb:rollback",
    "reconcile": "pipelines.cli.recovery_verbs:reconcile",
    "resume": "pipelines.cli.recovery_verbs:resume",
    "runs": "pipelines.cli.store_lists:runs",
    "chat": "pipelines.cli.chat:chat",
    "serve": "pipelines.cli.serve_verb:serve",
    "serve-reward": "pipelines.cli.serve_reward:serve_reward",
    "doctor": "pipelines.cli.doctor:doctor",
    "import-openrlhf": "pipelines.cli.import_openrlhf:import_openrlhf",
    "store": "pipelines.cli.store_verbs:store",
    "store ls": "pipelines.cli.store_lists:store_ls",
}
"""Verb -> the function that does it, which is given the options. Only the module of the verb is imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return 0, 2 after a one-line error message, 130 after an interruption, or how a run has halted.

    That is 75 if people are waited for, 77 if a gate blocks, 69 if the budget is spent.
    """
    options = _parser().parse_args(arguments)
    show_warnings()
    skip_last_collections()
    before = {number: signal.signal(number, _interrupt) for number in terminations()}
    try:
        return int(_verb(options)(options) or 0)
    except RlhfError as error:
        sys.stderr.write(f"{without_secrets(str(error))}\n")
        return EXIT_REFUSED
    except StageWaiting as waiting:
        sys.stderr.write(f"{without_secrets(str(waiting))}; then the same command goes on\n")
        return EXIT_WAITING
    except (RunBlocked, RunOverBudget) as halted:
        sys.stderr.write(f"{without_secrets(str(halted))}\n")
        return EXIT_BLOCKED if isinstance(halted, RunBlocked) else EXIT_OVER_BUDGET
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped; what was done is kept: {_resume(options)}\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_warnings() -> None:
    """Show the warnings that `PYTHONWARNINGS=error` or `python -W error` would raise, here and in further processes.

    Libraries warn while they are imported, which would end each run before it begins.
    """
    given = os.environ["PYTHONWARNINGS"] if "PYTHONWARNINGS" in os.environ else ""
    if "error" in f"{given},{','.join(sys.warnoptions)}":
        os.environ["PYTHONWARNINGS"] = given.replace("error", "default")
        sys.warnoptions[:] = [option.replace("error", "default") for option in sys.warnoptions]
        warnings.simplefilter("default")


def _parser() -> argparse.ArgumentParser:
    # argparse, not cyclopts: `_verb` already imports a verb's module only when it runs, and `rlhf resume` rebuilds the
    # options of a run as a Namespace from its flow parameters. Completion alone is not worth a dependency.
    parser = argparse.ArgumentParser(prog="rlhf", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", help="start Prefect, MLflow and the deployments on 127.0.0.1")
    up.add_argument("--foreground", action="store_true", help="stay and supervise until Ctrl-C")
    verbs.add_parser("down", help="stop what `rlhf up` started")
    verbs.add_parser("status", help="say what is running and where")

    run = verbs.add_parser("run", help="run a pipeline here and now; what is done is not done again")
    _profile_options(run)
    run.add_argument(
        "--wait", action="store_true", help="stay while people judge or decide, and go on when they are done"
    )
    _sweep_verb(verbs.add_parser("sweep", help="run a profile with several values of its options, and compare"))
    plan = verbs.add_parser("plan", help="say what `run` would do, and why, without doing it")
    _profile_options(plan)
    explain = verbs.add_parser("explain", help="say everything about the decision for one stage")
    explain.add_argument("stage", help="label of a stage, as `rlhf plan` shows it")
    _profile_options(explain, positional=False)

    _diff_verb(verbs.add_parser("diff", help="say what differs between two runs, artifacts or profiles"))
    _reproduce_verb(
        verbs.add_parser("reproduce", help="make an artifact again in an empty store, and compare the bytes")
    )
    for name, does in (("approve", "let go on"), ("reject", "hold back for good")):
        _gate_verb(verbs.add_parser(name, help=f"{does} what depends on an artifact that a gate asks about"))
    champion = verbs.add_parser("champion", help="which policy of the registry is champion, and which ones were")
    rollback = verbs.add_parser("rollback", help="make the previous champion of the registry champion again")
    for verb in (champion, rollback):
        verb.add_argument("name", nargs="?", default="", help="the model's name in the registry; default: the only one")
    rollback.add_argument("--reason", required=True, help="why; kept in the registry")

    reconcile = verbs.add_parser(
        "reconcile", help="give what a kill left at work in Prefect, MLflow and the store its true state"
    )
    _store_options(reconcile)
    resume = verbs.add_parser("resume", help="run again what did not come to its end; what is done is not done again")
    resume.add_argument("run", nargs="?", default="", help="name or id of a flow run; default: the newest unfinished")

    _store_options(verbs.add_parser("runs", help="what the store holds: stages that were made, newest first"))
    chat = verbs.add_parser("chat", help="talk to a policy")
    chat.add_argument("policy", help="label of a stage (sft, ppo), digest, a folder, champion, or the URL of a server")
    chat.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the server's token")
    chat.add_argument("--once", metavar="TEXT", help="answer this and stop")
    chat.add_argument("--max-tokens", type=int, default=64)
    chat.add_argument("--temperature", type=float, default=0.7)
    _store_options(chat)
    _serve_verb(verbs.add_parser("serve", help="a policy as an OpenAI-compatible server on 127.0.0.1"))
    _serve_reward_verb(verbs.add_parser("serve-reward", help="a reward function or reward model over HTTP"))
    verbs.add_parser("doctor", help="check this machine: versions, memory, disk, ports, engines")

    translator = verbs.add_parser("import-openrlhf", help="translate OpenRLHF command lines to a profile")
    translator.add_argument("script", help="a shell script, or - for standard input")
    translator.add_argument(
        "--out", default="", metavar="FILE", help="write the profile there; default: standard output"
    )
    translator.add_argument("--lenient", action="store_true", help="list unknown flags instead of refusing them")

    _store_verbs(verbs.add_parser("store", help="look after the artifact store"))
    return parser


def _gate_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the profile, or the name or id of the run that waits")
    parser.add_argument("gate", help="name of the gate, as the run that waits says it")
    parser.add_argument("--reason", required=True, help="why; kept with the decision")
    parser.add_argument("--artifact", default="", metavar="DIGEST", help="which one, if the gate asks about several")
    parser.add_argument("--question", default="", metavar="ID", help="which question, as the run that waits says it")
    parser.add_argument(
        "--store", default="", metavar="FOLDER", help="the store; default: that of the profile or state folder"
    )


def _sweep_verb(parser: argparse.ArgumentParser) -> None:
    _profile_options(parser)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=VALUE,...", help="values of a key; several: their product"
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw N points from --range and --grid instead")
    parser.add_argument(
        "--range",
        action="append",
        default=[],
        metavar="KEY=LOW..HIGH",
        help="where --random and --optuna draw; or KEY=log:LOW..HIGH",
    )
    parser.add_argument("--optuna", type=int, metavar="N", help="let Optuna choose N points, each from those before")
    parser.add_argument(
        "--sweep-seed", type=int, help="of --random and --optuna: the same seed draws the same points (default 0)"
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="[STAGE:]METRIC",
        help="what decides, such as ppo/gold or reward_model:held_out/accuracy",
    )
    parser.add_argument("--direction", choices=("max", "min"), default="max", help="which end of the metric is better")
    parser.add_argument("--approve", action="store_true", help="run the best to its end once a person has approved it")


def _diff_verb(parser: argparse.ArgumentParser) -> None:
    what = "a profile, the label or digest of an artifact, a folder, or the name or id of a run in MLflow"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="if B is a profile: changes of it",
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="so many prompts that were answered otherwise"
    )
    _store_options(parser)


def _reproduce_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="digest of an artifact, or label of a stage")
    parser.add_argument("--into", default="", metavar="FOLDER", help="the empty store; default: in the state folder")
    parser.add_argument("--keep-going", action="store_true", help="go on after a stage whose bytes differ")
    parser.add_argument(
        "--store", default="", metavar="FOLDER", help="the store that has it; default: that of the state folder"
    )
    parser.add_argument(
        "--profile", default="", help="the profile whose runtime, and store if there is no --store, is used"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="changes of it"
    )


def _serve_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", help="champion, champion:MODEL, label of a stage (sft, ppo), digest, or a folder")
    parser.add_argument("--port", type=int, default=8000, help="this one, or the next that is free")
    parser.add_argument("--adapter", default="", help="also serve the LoRA adapter in this folder, or of this policy")
    parser.add_argument(
        "--token-env", default="", metavar="NAME", help="variable with the token; default: a file is made"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=0, metavar="N", help="tokens of a conversation; default: all"
    )
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="memory of the cache, without a GPU")
    _store_options(parser)


def _serve_reward_verb(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--function", default="", help="module:function or file.py:function")
    what.add_argument("--reward-model", default="", metavar="MODEL", help="label of a stage, digest, or a folder")
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="keyword arguments of the function")
    parser.add_argument("--render", action="store_true", help="render plain prompts by the reward model's template")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the bearer token")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="deadline of one batch of the function")
    parser.add_argument("--max-batch", type=int, default=256, help="answers that are scored at a time")
    parser.add_argument("--max-wait-ms", type=float, default=10.0, help="so long a request waits for others")
    _store_options(parser)


def _store_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="store_verb", required=True, metavar="VERB")
    verbs.add_parser("ls", help="every artifact with its size, and what is damaged")
    verbs.add_parser("verify", help="hash every file; damage goes into quarantine")
    pin = verbs.add_parser("pin", help="keep an artifact from gc")
    pin.add_argument("target", help="digest, key or store:// uri")
    pin.add_argument("--note", default="")
    verbs.add_parser("unpin", help="let gc have it again").add_argument("target", help="digest, key or store:// uri")
    collect = verbs.add_parser("gc", help="remove what no recent run and no pin reaches")
    collect.add_argument("--dry-run", action="store_true", help="only list it")
    collect.add_argument("--keep-days", type=float, default=30.0)
    share = verbs.add_parser("share", help="let the members of a Unix group use the store")
    share.add_argument("--group", required=True, help="the group; you must belong to it")
    for verb in verbs.choices.values():
        _store_options(verb)


def _store_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--store", default="", metavar="FOLDER", help="the store; default: that of the state folder")
    which.add_argument("--profile", default="", help="the store that this profile uses")


def _profile_options(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    if positional:
        parser.add_argument("profile", help="a TOML file, or the name of a shipped one: tiny/full")
    else:
        parser.add_argument("--profile", default="tiny/full", help="a TOML file, or the name of a shipped one")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--until", default="", metavar="STAGE", help="stop after this stage")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="run it even if it is done")
    parser.add_argument("--strict-code", action="store_true", help="every change of code counts")
    parser.add_argument("--strict-env", action="store_true", help="other versions of Python and of packages count")


def _verb(options: argparse.Namespace) -> Callable[[argparse.Namespace], int | None]:
    """Return the function of a verb, whose module is imported now, so that `rlhf --help` is fast."""
    name = options.verb if options.verb != "store" or options.store_verb != "ls" else "store ls"
    module, function = VERBS[name].split(":")
    found: Callable[[argparse.Namespace], int | None] = getattr(importlib.import_module(module), function)
    return found


def _interrupt(signum: int, frame: FrameType | None) -> None:
    leave_lost_terminal()
    raise KeyboardInterrupt


def _resume(options: argparse.Namespace) -> str:
    return "resume with the same command" if options.verb in ("run", "resume") else "nothing is lost"


if __name__ == "__main__":
    sys.exit(main())
