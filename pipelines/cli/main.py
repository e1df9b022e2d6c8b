"""Parse the command line `rlhf` and run one of its commands. Hyperparameters live in profiles, not in options."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines.cli.extras import PACKAGE, check_needs, remedy
from pipelines.cli.streams import leave_output, open_standard_streams, output_fails
from rlhf_core.errors import DiskFullError, RlhfError, nearest
from rlhf_core.processes.large_imports import skip_last_collections
from rlhf_core.secrets.redaction import hide_in_logs, without_secrets
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting, leave_lost_terminal, terminations

EXIT_REFUSED = 2
EXIT_WAITING = 75
"""A run waits for a person; EX_TEMPFAIL of sysexits.h."""
EXIT_BLOCKED = 77
"""A gate failed or was rejected; EX_NOPERM of sysexits.h."""
EXIT_OVER_BUDGET = 69
"""A run has spent its budget; EX_UNAVAILABLE of sysexits.h."""
EXIT_UNWRITTEN = 74
"""A disk is full, or standard output could not be written; EX_IOERR of sysexits.h."""
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE = 141  # 128 + SIGPIPE: what read the output has ended, as `head` does

DESCRIPTION = """Train language models from human feedback as cached, resumable stages. A profile (a TOML file) holds all
settings of a pipeline; `--set KEY=VALUE` changes one of them."""
EPILOG = """`rlhf COMMAND --help` describes a command, `rlhf --version` prints the version. Exit status: 0 success,
1 a difference (`reproduce`) or a failure (`rehearse`, `sweep`, `status`, `doctor`), 2 invalid input, 69 budget spent, 74 disk full
or output not written, 75 waiting for a person, 77 blocked by a gate, 130 interrupted, 141 reader of a pipe has ended."""
EXAMPLES = """examples:
  rlhf init my_desk              a folder with a profile, a reward, rows and a README
  rlhf plan tiny/full            which stages would run, and why
  rlhf run tiny/full             run them; finished stages are reused"""
GROUPS = {
    "start": ("init", "profiles", "schema", "completion", "data", "try-reward", "doctor"),
    "run": ("plan", "explain", "rehearse", "run", "sweep", "resume", "runs"),
    "results": ("show", "diff", "reproduce", "chat", "serve", "serve-reward", "store", "usage"),
    "decisions": ("judge", "approve", "reject", "champion", "rollback", "audit"),
    "services": ("up", "deploy", "worker", "down", "status", "reconcile", "scaffold"),
    "other tools": ("import-openrlhf",),
}
"""Headings of `rlhf --help`, and the commands below each."""
COLUMN_HELP = "label of the prompt (label=TEXT), or a field of it, in JSON or as text; may be repeated"
PROFILE_HELP = "TOML file, or name of a shipped profile (tiny/full)"
TEXTS = ("prompt", "note")
"""Options whose value is a text: an empty one is what they are without it, and `~` is a sign like others."""
STORE_HELP = "artifact store, a folder or s3://bucket/folder; default: the store of the {}"

VERBS = {
    "init": "pipelines.cli.start_verbs:init",
    "profiles": "pipelines.cli.start_verbs:profiles",
    "schema": "pipelines.cli.start_verbs:schema",
    "completion": "pipelines.cli.completion:completion",
    "up": "pipelines.cli.serve_verb:up",
    "deploy": "pipelines.cli.deploy_verb:deploy",
    "worker": "pipelines.cli.deploy_verb:worker",
    "down": "pipelines.cli.serve_verb:down",
    "status": "pipelines.cli.serve_verb:status",
    "run": "pipelines.cli.run_command:run",
    "rehearse": "pipelines.cli.rehearse_verb:rehearse_profile",
    "sweep": "rlhf_contrib.sweep.verb:sweep",
    "data": "pipelines.cli.data_verb:data",
    "try-reward": "pipelines.cli.try_reward:try_reward",
    "plan": "pipelines.cli.plan_verbs:plan",
    "plan --estimate": "rlhf_contrib.planner.verb:estimate",
    "explain": "pipelines.cli.plan_verbs:explain_stage",
    "show": "pipelines.cli.show_verb:show",
    "diff": "pipelines.cli.diff_verb:diff",
    "reproduce": "pipelines.cli.diff_verb:reproduce",
    "judge": "pipelines.cli.judge_verb:judge",
    "approve": "pipelines.cli.serve_verb:approve",
    "reject": "pipelines.cli.serve_verb:reject",
    "champion": "pipelines.cli.serve_verb:champion",
    "rollback": "pipelines.cli.serve_verb:rollback",
    "reconcile": "pipelines.cli.recovery_verbs:reconcile",
    "resume": "pipelines.cli.recovery_verbs:resume",
    "runs": "pipelines.cli.store_lists:runs",
    "chat": "pipelines.cli.chat:chat",
    "serve": "rlhf_contrib.serve.verb:serve",
    "serve-reward": "rlhf_contrib.serve.reward_verb:serve_reward",
    "doctor": "pipelines.cli.doctor:doctor",
    "import-openrlhf": "rlhf_contrib.openrlhf.verb:import_openrlhf",
    "scaffold": "rlhf_contrib.places.verb:scaffold",
    "usage": "pipelines.cli.accounts:usage",
    "audit": "pipelines.cli.accounts:show_audit",
    "store": "pipelines.cli.store_verbs:store",
    "store ls": "pipelines.cli.store_lists:store_ls",
}
"""Command -> its function, which takes the parsed options. Only the module of the command is imported.

This table and the next line are the only places where the core names `rlhf_contrib`.
"""
WHEN_PLANNED = "rlhf_contrib.planner.verb:warn_of_memory"
"""What a run that has planned calls, if the topic is installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, one of the constants above. Errors are printed in one line."""
    open_standard_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        leave_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        if not output_fails():
            if error.errno == errno.EIO:
                raise
            place = error.filename or "a file"
            sys.stderr.write(f"{place}: {error.strerror}; free space, and run the same command again\n")
            return EXIT_UNWRITTEN
        leave_output()
        sys.stderr.write(f"standard output: {error.strerror}; write to another place, and run the command again\n")
        return EXIT_UNWRITTEN


def _run(arguments: Sequence[str] | None) -> int:
    """Run one command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 0
    hide_in_logs()
    show_warnings()
    skip_last_collections()
    before = {number: signal.signal(number, _interrupt) for number in terminations()}
    try:
        check_needs(options.verb)
        return int(_verb(options)(options) or 0)
    except RlhfError as error:
        sys.stderr.write(f"{without_secrets(str(error))}\n")
        return EXIT_UNWRITTEN if isinstance(error, DiskFullError) else EXIT_REFUSED
    except ModuleNotFoundError as error:
        install = remedy(error.name or "")
        if not install:
            raise
        sys.stderr.write(f"rlhf {options.verb}: needs {error.name}, which is not installed; {install}\n")
        return EXIT_REFUSED
    except StageWaiting as waiting:
        sys.stderr.write(f"{without_secrets(str(waiting))}; run the same command again to continue\n")
        return EXIT_WAITING
    except (RunBlocked, RunOverBudget) as halted:
        sys.stderr.write(f"{without_secrets(str(halted))}\n")
        return EXIT_BLOCKED if isinstance(halted, RunBlocked) else EXIT_OVER_BUDGET
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; finished work is kept{_resume(options)}\n")
        return EXIT_INTERRUPTED
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


class _Once(argparse.Action):
    """Store the value of an option, and refuse a second one, which would replace the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, _Parser)
        if option is not None and self.dest in parser.given:
            raise argparse.ArgumentError(self, "is there twice, and takes one value; remove one of them")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command, option or choice for a misspelled one."""

    given: set[str]
    """Options that the words parsed so far have given a value."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("action", None, _Once)  # for all arguments that name no other action

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:  # type: ignore[override]
        if not names[0].startswith("-") and "choices" not in settings:
            settings = {"metavar": names[0].upper(), **settings}
        return super().add_argument(*names, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        self.given = set()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # refused here, where the usage is that of the command
            options = [name for name in self._option_string_actions if name.startswith("--")]
            misspelled = unknown[0].startswith("-") and nearest(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {misspelled}" if misspelled else ""))
        return found, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse an empty word, as of a variable that is not set, where no word would mean what is usual.

        In `--out=~/x` shells leave the home folder to the program.
        """
        is_usual = action.default == "" and action.dest not in TEXTS
        if arg_strings == [""] and (is_usual or (action.required and action.option_strings)):
            way = "give it a value" if action.required else "leave it out, or give it a value"
            raise argparse.ArgumentError(action, f"is empty; {way}")
        if action.option_strings and action.dest not in TEXTS:
            arg_strings = [str(Path(word).expanduser()) if word.startswith("~/") else word for word in arg_strings]
        return super()._get_values(action, arg_strings)  # type: ignore[misc]

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            remedy = nearest(str(value), [str(choice) for choice in action.choices])
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {remedy}")


class _Version(argparse.Action):
    """Print the version of the package; `importlib.metadata` is imported only for it, which keeps `--help` fast."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"rlhf {importlib.import_module('importlib.metadata').version(PACKAGE)}\n")
        parser.exit()


def _start_verbs(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    init = command("init", "Make a folder with a profile, a reward function, twenty rows and a README.")
    init.add_argument("name", metavar="NAME", help="folder to make; its name is that of the runs, too")
    command("profiles", "List the shipped profiles.")
    command("schema", "Print the JSON Schema of a profile, from which editors complete its keys.")
    complete = command("completion", "Print a script by which a shell completes commands, options and profiles.")
    complete.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads it")


def _parser() -> argparse.ArgumentParser:
    # argparse, not cyclopts: `_verb` already imports a verb's module only when it runs, and `rlhf resume` rebuilds the
    # options of a run as a Namespace from its flow parameters.
    parser = _Parser(
        prog="rlhf", usage="rlhf COMMAND ...", formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action=_Version, nargs=0, help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", prog="rlhf", metavar="COMMAND", help=argparse.SUPPRESS)
    texts: dict[str, str] = {}

    def command(name: str, text: str) -> argparse.ArgumentParser:
        texts[name] = text
        return verbs.add_parser(name, description=text)

    _start_verbs(command)
    status = _service_verbs(command)
    _scaffold_verb(command("scaffold", "Write the files with which a place runs profiles: Slurm, Kubernetes, ..."))
    _run_verb(command("run", "Run a pipeline on this machine; finished stages are reused."))
    text = "Run the whole graph of a profile with tiny models and few rows; list problems."
    _rehearse_verb(command("rehearse", text))
    _sweep_verb(command("sweep", "Run a profile with several values of its keys and compare the results."))
    data = command("data", "Show what data files hold: format, columns, dropped rows with reasons, two rows, tables.")
    _data_verb(data)
    _try_reward_verb(command("try-reward", "Call a reward function on answers, as a run would."))
    _plan_verb(command("plan", "Show which stages a run would execute or reuse, and why, without running them."))
    explain = command("explain", "Explain why a stage will run or is reused, and what to do next.")
    _explain_verb(explain)
    _show_verb(command("show", "Show what a stage made: preview, rows, report, metrics, tensors."))
    diff = command("diff", "Compare two runs, artifacts or profiles.")
    _diff_verb(diff)
    _reproduce_verb(command("reproduce", "Rebuild an artifact in an empty store and compare it byte for byte."))
    _judge_verb(command("judge", "Judge the comparisons that a run waits for, with keys, in a browser."))
    _gate_verb(command("approve", "Approve an artifact at a gate; the stages that depend on it may run."))
    _gate_verb(command("reject", "Reject an artifact at a gate; the stages that depend on it will not run."))
    _registry_verbs(command)
    _store_options(command("reconcile", "Mark killed runs as interrupted in Prefect, MLflow and the store."))
    _resume_verb(command("resume", "Run an unfinished run again; finished stages are reused."))
    runs = command("runs", "List the runs of this project, newest first, with the command that goes on with each.")
    _store_options(runs)
    _chat_verb(command("chat", "Chat with a policy."))
    _serve_verb(command("serve", "Serve a policy with an OpenAI-compatible API on 127.0.0.1."))
    _serve_reward_verb(command("serve-reward", "Serve a reward function or a reward model over HTTP."))
    command("doctor", "Check this machine: versions, memory, disk, ports, engines.")
    _import_verb(command("import-openrlhf", "Translate OpenRLHF command lines into a profile."))
    _store_verbs(command("store", "List, verify, pin, copy, clean up or share the artifact store."))
    accounts = (
        command("usage", "Sum the hours, CPU hours and GPU hours of results by user and project."),
        command("audit", "List who pinned, decided, published, rolled back or collected garbage, newest first."),
    )
    _account_verbs(*accounts)
    for verb in (data, explain, diff, runs, status, *accounts):
        _json_option(verb)
    parser.description = "\n\n".join([DESCRIPTION, *_grouped(texts), EXAMPLES, EPILOG])
    return parser


def _service_verbs(command: Callable[[str, str], argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the verbs of services and deployments; return that of `status`, which can print JSON."""
    up = command("up", "Start Prefect, MLflow and the deployments on 127.0.0.1.")
    up.add_argument("--foreground", action="store_true", help="stay in the foreground and supervise until Ctrl-C")
    _deploy_verb(command("deploy", "Make a deployment of a profile: a form of four fields on Prefect's page."))
    _worker_verb(command("worker", "Run what is scheduled in a work pool of Prefect, until it is stopped."))
    down = command("down", "Stop the services that `rlhf up` started.")
    down.add_argument("--yes", action="store_true", help="do not ask if runs are in progress")
    return command("status", "Show the services and their addresses; exit with 1 if one does not respond.")


def _run_verb(run: argparse.ArgumentParser) -> None:
    _profile_options(run)
    run.add_argument("--wait", action="store_true", help="wait for annotations and approvals, then continue")


def _resume_verb(resume: argparse.ArgumentParser) -> None:
    resume.add_argument(
        "run", nargs="?", default="", help="name or beginning of the id; default: newest unfinished run"
    )


def _deploy_verb(deploy: argparse.ArgumentParser) -> None:
    deploy.add_argument("profile", help=PROFILE_HELP)
    _set_option(deploy, "change a key of the profile before it is kept; may be repeated")
    deploy.add_argument("--name", default="", help="name of the deployment; default: the profile's `name`")
    deploy.add_argument("--cron", default="", help="schedule in UTC ('0 2 * * *'), or none; default: as it is")
    deploy.add_argument("--pool", default="", help="work pool whose workers run it; default: the services of `rlhf up`")


def _worker_verb(worker: argparse.ArgumentParser) -> None:
    worker.add_argument("--pool", required=True, help="name of the work pool; it is made if there is none")
    worker.add_argument(
        "--runs-at-once", type=int, default=1, metavar="N", help="concurrent runs (default %(default)s)"
    )


def _scaffold_verb(scaffold: argparse.ArgumentParser) -> None:
    places = ("container", "kubernetes", "server", "slurm")
    scaffold.add_argument("place", choices=places, help="where profiles are to run")
    scaffold.add_argument("--out", required=True, metavar="DIR", help="folder for the files")


def _rehearse_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", help=PROFILE_HELP)
    _set_option(parser, "change a key of the profile; may be repeated")
    _json_option(parser)


def _data_verb(data: argparse.ArgumentParser) -> None:
    data.add_argument("files", nargs="*", metavar="FILE", help="file, folder or pattern, as `path` of a source")
    data.add_argument("--profile", default="", help="describe the sources of this profile")
    _set_option(data, "change a key of --profile")


def _try_reward_verb(trial: argparse.ArgumentParser) -> None:
    trial.add_argument("function", metavar="FUNCTION", help="file.py:function or module:function")
    trial.add_argument("answers", nargs="+", metavar="ANSWER", help="answer to score; all of them in one call")
    trial.add_argument("--prompt", default="", help="prompt that they answer")
    trial.add_argument("--column", dest="columns", action="append", default=[], metavar="KEY=VALUE", help=COLUMN_HELP)
    _function_options(trial)


def _function_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="keyword arguments of the function")
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="seconds for one batch of the function (default %(default)s)"
    )


def _plan_verb(plan: argparse.ArgumentParser) -> None:
    _profile_options(plan)
    plan.add_argument(
        "--estimate", action="store_true", help="predict memory and time of each stage; refuse what does not fit"
    )
    plan.add_argument(
        "--on", default="", metavar="HARDWARE", help="h100 (default with GPUs), a100, rtx4090, ..., or cpu"
    )
    plan.add_argument(
        "--host-gib", type=float, default=0.0, help="with --estimate: host memory of a node of GPUs, in GiB"
    )
    plan.add_argument("--terms", action="store_true", help="with --estimate: print what each memory is made of")
    _json_option(plan)


def _explain_verb(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("stage", help="label of the stage, as in `rlhf plan`")
    explain.add_argument("--all", action="store_true", help="print the whole key and the record, too")
    _profile_options(explain, positional=False)


def _show_verb(show: argparse.ArgumentParser) -> None:
    show.add_argument("artifact", help="stage label (the newest result, or that of --profile), digest, or folder")
    show.add_argument("file", nargs="?", default="", metavar="FILE", help="file of it, or `metrics`; default: the best")
    show.add_argument("--rows", type=int, default=3, metavar="N", help="rows of a table to show (default %(default)s)")
    show.add_argument("--open", action="store_true", help="open the page in a browser")
    _store_options(show)


def _registry_verbs(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    champion = command("champion", "Show the champion of a registered model and the previous champions.")
    rollback = command("rollback", "Make the previous champion of a registered model its champion again.")
    for verb in (champion, rollback):
        verb.add_argument("name", nargs="?", default="", help="name of the registered model; default: the only one")
    rollback.add_argument("--reason", required=True, help="reason, kept in the registry")


def _account_verbs(usage: argparse.ArgumentParser, audit: argparse.ArgumentParser) -> None:
    usage.add_argument("--by", default="user,project", help="user, project, stage, label or day (default %(default)s)")
    for verb in (usage, audit):
        verb.add_argument("--since", default="30d", help="30d, 12h, 2w or a date (default %(default)s)")
        _store_options(verb)


def _import_verb(translator: argparse.ArgumentParser) -> None:
    translator.add_argument("script", help="shell script, or - for standard input")
    translator.add_argument("--out", default="", metavar="FILE", help="profile to write; default: standard output")
    translator.add_argument("--lenient", action="store_true", help="list unknown flags instead of failing on them")


def _chat_verb(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("policy", help="stage label (sft, ppo), digest, folder, `champion`, or URL of a server")
    chat.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the server's token")
    chat.add_argument("--once", metavar="TEXT", help="answer TEXT and exit")
    chat.add_argument("--max-tokens", type=int, default=64, help="maximum tokens per answer (default %(default)s)")
    chat.add_argument("--temperature", type=float, default=0.7, help="sampling temperature (default %(default)s)")
    _store_options(chat)


def _grouped(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a paragraph for each group of commands; argparse lists all commands as one."""
    width = max(map(len, texts)) + 2
    for title, names in GROUPS.items():
        yield "\n".join([f"{title}:", *(f"  {name:<{width}}{texts[name]}" for name in names)])


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else (docs/command_line.md)")


def _judge_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("annotator", nargs="?", default="", help="name of the annotator; default: who has to judge")
    parser.add_argument("--experiment", default="annotation", help="MLflow experiment of the queues (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of the page; default: a free one")


def _gate_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="profile, or name or id of the waiting run")
    parser.add_argument("gate", help="name of the gate, as printed by the waiting run")
    parser.add_argument("--reason", required=True, help="reason, kept with the decision")
    parser.add_argument("--artifact", default="", metavar="DIGEST", help="which artifact, if several wait at the gate")
    parser.add_argument("--question", default="", metavar="ID", help="which question, as printed by the waiting run")
    parser.add_argument("--store", default="", metavar="FOLDER", help=STORE_HELP.format("profile or state folder"))


def _sweep_verb(parser: argparse.ArgumentParser) -> None:
    _profile_options(parser)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=VALUE,...", help="values of a key; repeat for a product"
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw N random points from --range and --grid")
    parser.add_argument(
        "--range",
        action="append",
        default=[],
        metavar="KEY=LOW..HIGH",
        help="interval of a key for --random and --optuna; KEY=log:LOW..HIGH for a logarithmic scale",
    )
    parser.add_argument("--optuna", type=int, metavar="N", help="search N points with Optuna")
    parser.add_argument("--sweep-seed", type=int, help="seed of --random and --optuna (default 0)")
    parser.add_argument(
        "--metric",
        default="",
        metavar="[STAGE:]METRIC",
        help="metric to compare, such as ppo/gold or reward_model:held_out/accuracy",
    )
    parser.add_argument("--direction", choices=("max", "min"), default="max", help="whether high or low is better")
    parser.add_argument("--approve", action="store_true", help="run the best point to its end after an approval")


def _diff_verb(parser: argparse.ArgumentParser) -> None:
    text = "profile, label or digest of an artifact, folder, or name or id of an MLflow run"
    parser.add_argument("a", metavar="A", help=text)
    parser.add_argument("b", metavar="B", help="as A")
    _set_option(parser, "change a key of profile B")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="number of prompts with different answers to show"
    )
    _store_options(parser)


def _reproduce_verb(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="digest of an artifact, or label of a stage")
    parser.add_argument("--into", default="", metavar="FOLDER", help="empty store; default: in the state folder")
    parser.add_argument("--store", default="", metavar="FOLDER", help=STORE_HELP.format("profile"))
    parser.add_argument("--profile", required=True, help="profile whose run made the artifact")
    _set_option(parser, "change a key of --profile")


def _serve_verb(parser: argparse.ArgumentParser) -> None:
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
    _store_options(parser)


def _serve_reward_verb(parser: argparse.ArgumentParser) -> None:
    reward = parser.add_mutually_exclusive_group(required=True)
    reward.add_argument("--function", default="", help="module:function or file.py:function")
    reward.add_argument("--reward-model", default="", metavar="MODEL", help="stage label, digest, or folder")
    _function_options(parser)
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
    _store_options(parser)


def _store_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="store_verb", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text)

    _json_option(command("ls", "List every artifact, newest first, with its stage, size and damage."))
    verify = command("verify", "Read and hash every file of every artifact.")
    verify.add_argument("--set-aside", action="store_true", help="let the next run make damaged artifacts again")
    restore = command("restore", "Use an artifact again that verify has set aside.")
    restore.add_argument("key", help="key of the stage, from `rlhf store ls`")
    pin = command("pin", "Protect an artifact from gc.")
    pin.add_argument("--note", default="", help="reason, kept with the pin")
    for verb in (pin, command("unpin", "Allow gc to remove an artifact again.")):
        verb.add_argument("target", help="digest, key or store:// URI")
    collect = command("gc", "Remove artifacts that neither a recent run nor a pin needs.")
    collect.add_argument("--dry-run", action="store_true", help="list them without removing them")
    collect.add_argument(
        "--keep-days", type=float, help="keep what runs used in the last days; default: of the profile's project, or 30"
    )
    for name, way, other in (("push", "to", "TO"), ("pull", "from", "FROM")):
        copied = command(name, f"Copy an artifact with its record {way} another store.")
        copied.add_argument("target", metavar="ARTIFACT", help="stage label or digest")
        copied.add_argument("other", metavar=other, help="the other store: a folder, or a bucket (s3://bucket/folder)")
    share = command("share", "Share the store with the members of a Unix group.")
    share.add_argument("--group", required=True, help="group; you must be a member of it")
    for verb in verbs.choices.values():
        _store_options(verb)


def _store_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--store", default="", metavar="PLACE", help=STORE_HELP.format("state folder"))
    which.add_argument("--profile", default="", help="use the store of this profile")


def _profile_options(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    if positional:
        parser.add_argument("profile", help=PROFILE_HELP)
    else:
        parser.add_argument("--profile", default="tiny/full", help=f"{PROFILE_HELP}; default: %(default)s")
    _set_option(parser, "change a key of the profile, such as ppo.steps=20; may be repeated")
    parser.add_argument("--until", default="", metavar="STAGE", help="stop after this stage")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="run this stage even if finished")
    parser.add_argument("--strict-code", action="store_true", help="run a stage again after any change of its code")
    parser.add_argument(
        "--strict-env", action="store_true", help="run a stage again if Python or a package has another version"
    )


def _set_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)


def _verb(options: argparse.Namespace) -> Callable[[argparse.Namespace], int | None]:
    """Import the module of a command and return its function; the late import keeps `rlhf --help` fast."""
    match vars(options):
        case {"verb": "store", "store_verb": "ls"}:
            name = "store ls"
        case {"verb": "plan", "estimate": True}:
            name = "plan --estimate"
        case _:
            name = options.verb
    module, function = VERBS[name].split(":")
    found: Callable[[argparse.Namespace], int | None] = getattr(importlib.import_module(module), function)
    return found


def when_planned(*arguments: Any) -> None:
    """Call `WHEN_PLANNED` with the configuration, the planned stages and the store of a run."""
    module, function = WHEN_PLANNED.split(":")
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        getattr(importlib.import_module(module), function)(*arguments)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    leave_lost_terminal()
    raise KeyboardInterrupt


def _resume(options: argparse.Namespace) -> str:
    return "; run the same command again to continue" if options.verb in ("run", "resume") else ""


if __name__ == "__main__":
    sys.exit(main())
