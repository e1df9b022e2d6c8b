"""Parse the command line `rlhf` and run a command. Hyperparameters live in profiles, not in options."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
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
EXIT_PIPE = 141  # 128 + SIGPIPE: the reader of the output has ended, as `head` does

DESCRIPTION = """Train language models from human feedback as cached, resumable stages.
A profile (a TOML file) holds all settings of a pipeline; `--set KEY=VALUE`
changes one of them."""
EPILOG = """`rlhf COMMAND --help` describes a command, `rlhf --version` prints the version.
Exit status: 0 success, 1 a difference (`reproduce`) or a failure (`rehearse`,
`sweep`, `status`, `doctor`), 2 invalid input, 69 budget spent, 74 disk full or
output not written, 75 waiting for a person, 77 blocked by a gate,
130 interrupted, 141 reader of a pipe has ended."""
EXAMPLES = """examples:
  rlhf init my_desk              a folder with a profile, a reward and rows
  rlhf plan tiny/full            which stages would run, and why
  rlhf run tiny/full             run them; finished stages are reused"""
TEXTS = ("prompt", "note")
"""Options whose value is a text: an empty text is the same as leaving the option out, and `~` has no special
meaning."""
COMMANDS = {
    "start": {
        "init": ("pipelines.cli.start_verbs:init", "Make a folder with a profile, a reward, rows and a README."),
        "profiles": ("pipelines.cli.start_verbs:profiles", "List the shipped profiles."),
        "schema": ("pipelines.cli.start_verbs:schema", "Print the JSON Schema of profiles, for completion in editors."),
        "completion": ("pipelines.cli.completion:completion", "Print a script with which a shell completes commands."),
        "data": ("pipelines.cli.data_verb:data", "Show the format, columns and dropped rows of data files."),
        "try-reward": ("pipelines.cli.try_reward:try_reward", "Call a reward function on answers, as a run would."),
        "doctor": ("pipelines.cli.doctor:doctor", "Check this machine: versions, memory, disk, ports, engines."),
    },
    "run": {
        "plan": ("pipelines.cli.plan_verbs:plan", "Show which stages a run would execute or reuse, and why."),
        "explain": (
            "pipelines.cli.plan_verbs:explain_stage",
            "Explain why a stage will run or is reused; suggest a command.",
        ),
        "rehearse": (
            "pipelines.cli.rehearse_verb:rehearse_profile",
            "Try a whole profile with tiny models and few rows.",
        ),
        "run": ("pipelines.cli.run_command:run", "Run a pipeline on this machine; finished stages are reused."),
        "sweep": ("rlhf_contrib.sweep.verb:sweep", "Run a profile with several values of keys; compare results."),
        "resume": (
            "pipelines.cli.recovery_verbs:resume",
            "Run an unfinished run again; finished stages are reused.",
        ),
        "runs": ("pipelines.cli.store_lists:runs", "List the runs of this project and how to continue each."),
    },
    "results": {
        "show": ("pipelines.cli.show_verb:show", "Show the result of a stage: rows, report, metrics, tensors."),
        "diff": ("pipelines.cli.diff_verb:diff", "Compare two runs, artifacts or profiles."),
        "reproduce": (
            "pipelines.cli.diff_verb:reproduce",
            "Make an artifact again in an empty store; compare the bytes.",
        ),
        "chat": ("pipelines.cli.chat:chat", "Chat with a policy."),
        "serve": ("rlhf_contrib.serve.verb:serve", "Serve a policy with an OpenAI-compatible API on 127.0.0.1."),
        "serve-reward": (
            "rlhf_contrib.serve.reward_verb:serve_reward",
            "Serve a reward function or a reward model over HTTP.",
        ),
        "store": ("pipelines.cli.store_command:store", "List, verify, pin, copy, clean up or share the store."),
        "usage": ("pipelines.cli.accounts:usage", "Sum hours, CPU hours and GPU hours by user and project."),
    },
    "decisions": {
        "judge": ("pipelines.cli.judge_verb:judge", "Judge the comparisons that a run waits for, in a browser."),
        "approve": ("pipelines.cli.serve_verb:approve", "Approve an artifact at a gate; dependent stages may run."),
        "reject": ("pipelines.cli.serve_verb:reject", "Reject an artifact at a gate; dependent stages will not run."),
        "champion": (
            "pipelines.cli.serve_verb:champion",
            "Show the champion of a registered model and its predecessors.",
        ),
        "rollback": ("pipelines.cli.serve_verb:rollback", "Make the previous champion of a registered model champion."),
        "audit": ("pipelines.cli.accounts:show_audit", "List who pinned, decided, published, rolled back or cleaned."),
    },
    "services": {
        "up": ("pipelines.cli.serve_verb:up", "Start Prefect, MLflow and the deployments on 127.0.0.1."),
        "deploy": ("pipelines.cli.deploy_verb:deploy", "Deploy a profile: a form of four fields on Prefect's page."),
        "worker": ("pipelines.cli.deploy_verb:worker", "Run the scheduled runs of a Prefect work pool until stopped."),
        "down": ("pipelines.cli.serve_verb:down", "Stop the services that `rlhf up` started."),
        "status": ("pipelines.cli.serve_verb:status", "Show the services; exit with 1 if one does not respond."),
        "reconcile": (
            "pipelines.cli.recovery_verbs:reconcile",
            "Mark killed runs as interrupted in Prefect and MLflow.",
        ),
        "scaffold": (
            "rlhf_contrib.places.verb:scaffold",
            "Write files to run profiles elsewhere: Slurm, Kubernetes, ...",
        ),
    },
    "other tools": {
        "import-openrlhf": (
            "rlhf_contrib.openrlhf.verb:import_openrlhf",
            "Translate OpenRLHF command lines into a profile.",
        ),
    },
}
"""Heading of `rlhf --help` -> command -> its function, and its text.

The function takes the parsed options. If the command has options, a function of `pipelines.cli.options` with `_options`
after its name adds them to a parser; of a topic, a function of the same module. Only the module of the command is
imported, and for its `--help` only the module of the options. The core names `rlhf_contrib` only here and in the next
two lines.
"""
ESTIMATE = "rlhf_contrib.planner.verb:estimate"
"""The function of `rlhf plan --estimate`."""
WHEN_PLANNED = "rlhf_contrib.planner.verb:warn_of_memory"
"""Function that a run calls once it has planned, if the topic is installed."""
VERBS = {name: place for group in COMMANDS.values() for name, (place, _) in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, one of the `EXIT` constants. Errors are printed in one line."""
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
    hide_in_logs()
    show_warnings()
    skip_last_collections()
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if not word.startswith("-")), "")
    before = {number: signal.signal(number, _interrupt) for number in terminations()}
    try:
        parser = _parser(only=verb)
        options = parser.parse_args(words)
        if options.verb is None:
            parser.print_help()
            return 0
        check_needs(verb)
        return int(_verb(options)(options) or 0)
    except RlhfError as error:
        sys.stderr.write(f"{without_secrets(str(error))}\n")
        return EXIT_UNWRITTEN if isinstance(error, DiskFullError) else EXIT_REFUSED
    except ModuleNotFoundError as error:
        install = remedy(error.name or "")
        if not install:
            raise
        sys.stderr.write(f"rlhf {verb}: needs {error.name}, which is not installed; {install}\n")
        return EXIT_REFUSED
    except StageWaiting as waiting:
        sys.stderr.write(f"{without_secrets(str(waiting))}; run the same command again to continue\n")
        return EXIT_WAITING
    except (RunBlocked, RunOverBudget) as halted:
        sys.stderr.write(f"{without_secrets(str(halted))}\n")
        return EXIT_BLOCKED if isinstance(halted, RunBlocked) else EXIT_OVER_BUDGET
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; finished work is kept{_resume(verb)}\n")
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
        if unknown:  # refused here, where the printed usage belongs to the command
            options = [name for name in self._option_string_actions if name.startswith("--")]
            misspelled = unknown[0].startswith("-") and nearest(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {misspelled}" if misspelled else ""))
        return found, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse an empty value, such as an unset shell variable, where leaving the option out selects the default.

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


def _parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands. If `only` is given, other commands have no options and are not imported."""
    # argparse, not cyclopts: a command's module is imported only when it runs.
    parser = _Parser(
        prog="rlhf", usage="rlhf COMMAND ...", formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action=_Version, nargs=0, help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", prog="rlhf", metavar="COMMAND", help=argparse.SUPPRESS)
    paragraphs, width = [], max(map(len, VERBS)) + 2
    ours = importlib.import_module("pipelines.cli.options")  # the modules of commands are slow to import
    for title, group in COMMANDS.items():
        lines = [f"{title}:"]
        for name, (place, text) in group.items():
            lines.append(f"  {name:<{width}}{text}")
            verb = verbs.add_parser(name, description=text)
            if only in (None, name):
                module, function = place.split(":")
                owner = importlib.import_module(module) if module.startswith("rlhf_contrib.") else ours
                getattr(owner, f"{function}_options", _no_options)(verb)
        paragraphs.append("\n".join(lines))
    parser.description = "\n\n".join([DESCRIPTION, *paragraphs, EXAMPLES, EPILOG])
    return parser


def _no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the parser of a command without options."""


def _function_at(place: str) -> Callable[..., Any]:
    """Import a module and return its function; the late import keeps `rlhf --help` fast."""
    module, function = place.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _verb(options: argparse.Namespace) -> Callable[[argparse.Namespace], int | None]:
    """The function of a command."""
    return _function_at(ESTIMATE if options.verb == "plan" and options.estimate else VERBS[options.verb])


def when_planned(*arguments: Any) -> None:
    """Call `WHEN_PLANNED` with the configuration, the planned stages and the store of a run."""
    topic = WHEN_PLANNED.rpartition(".")[0]
    if all(map(importlib.util.find_spec, (topic.partition(".")[0], topic))):
        _function_at(WHEN_PLANNED)(*arguments)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    leave_lost_terminal()
    raise KeyboardInterrupt


def _resume(verb: str) -> str:
    return "; run the same command again to continue" if verb in ("run", "resume") else ""


if __name__ == "__main__":
    sys.exit(main())
