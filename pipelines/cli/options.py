"""The options of each command: `rlhf COMMAND --help` imports this module alone, and nothing that computes.

The options of `NAME` are added by `NAME_options`, where NAME is the function of the command in `pipelines.cli.main.COMMANDS`.
"""

import argparse

PROFILE_HELP = "TOML file, or name of a shipped profile (tiny/full)"
STORE_HELP = "artifact store, a folder or s3://bucket/folder; default: the store of the {}"
COLUMN_HELP = "label of the prompt (label=TEXT), or a field of it, in JSON or as text; may be repeated"

# ---------------------------------------------------------------- options of several commands


def store_option(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--store", default="", metavar="PLACE", help=STORE_HELP.format("state folder"))
    which.add_argument("--profile", default="", help="use the store of this profile")


def profile_options(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    if positional:
        parser.add_argument("profile", help=PROFILE_HELP)
    else:
        parser.add_argument("--profile", default="tiny/full", help=f"{PROFILE_HELP}; default: %(default)s")
    set_option(parser, "change a key of the profile, such as ppo.steps=20; may be repeated")
    parser.add_argument("--until", default="", metavar="STAGE", help="stop after this stage")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="run this stage even if finished")
    parser.add_argument("--strict-code", action="store_true", help="run a stage again after any change of its code")
    parser.add_argument(
        "--strict-env", action="store_true", help="run a stage again if Python or a package has another version"
    )


def set_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else (docs/command_line.md)")


# ---------------------------------------------------------------- options of one command


def init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="folder to make; its name is that of the runs, too")


def completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads it")


def data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="file, folder or pattern, as `path` of a source")
    parser.add_argument("--profile", default="", help="describe the sources of this profile")
    set_option(parser, "change a key of --profile")
    json_option(parser)


def try_reward_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="file.py:function or module:function")
    parser.add_argument("answers", nargs="+", metavar="ANSWER", help="answer to score; all of them in one call")
    parser.add_argument("--prompt", default="", help="prompt that they answer")
    parser.add_argument("--column", dest="columns", action="append", default=[], metavar="KEY=VALUE", help=COLUMN_HELP)
    function_options(parser)


def function_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="keyword arguments of the function")
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="seconds for one batch of the function (default %(default)s)"
    )


def plan_options(parser: argparse.ArgumentParser) -> None:
    profile_options(parser)
    parser.add_argument(
        "--estimate", action="store_true", help="predict memory and time of each stage; refuse what does not fit"
    )
    parser.add_argument(
        "--on", default="", metavar="HARDWARE", help="with --estimate: h100 (default with GPUs), rtx4090, ..., cpu"
    )
    parser.add_argument(
        "--host-gib", type=float, default=0.0, help="with --estimate: host memory of a node of GPUs, in GiB"
    )
    parser.add_argument("--terms", action="store_true", help="with --estimate: print what each memory is made of")
    json_option(parser)


def explain_stage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", help="label of the stage, as in `rlhf plan`")
    parser.add_argument("--all", action="store_true", help="print the whole key and the record, too")
    profile_options(parser, positional=False)
    json_option(parser)


def rehearse_profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", help=PROFILE_HELP)
    set_option(parser, "change a key of the profile; may be repeated")
    json_option(parser)


def run_options(parser: argparse.ArgumentParser) -> None:
    profile_options(parser)
    parser.add_argument("--wait", action="store_true", help="wait for annotations and approvals, then continue")


def reconcile_options(parser: argparse.ArgumentParser) -> None:
    store_option(parser)


def resume_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="", help="name or beginning of the id; default: newest unfinished run"
    )


def runs_options(parser: argparse.ArgumentParser) -> None:
    store_option(parser)
    json_option(parser)


def show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="stage label (the newest result, or that of --profile), digest, or folder")
    parser.add_argument(
        "file", nargs="?", default="", metavar="FILE", help="file of it, or `metrics`; default: the best"
    )
    parser.add_argument(
        "--rows", type=int, default=3, metavar="N", help="rows of a table to show (default %(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    store_option(parser)


def diff_options(parser: argparse.ArgumentParser) -> None:
    text = "profile, label or digest of an artifact, folder, or name or id of an MLflow run"
    parser.add_argument("a", metavar="A", help=text)
    parser.add_argument("b", metavar="B", help="as A")
    set_option(parser, "change a key of profile B")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="number of prompts with different answers to show"
    )
    store_option(parser)
    json_option(parser)


def reproduce_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="digest of an artifact, or label of a stage")
    parser.add_argument("--into", default="", metavar="FOLDER", help="empty store; default: in the state folder")
    parser.add_argument("--store", default="", metavar="FOLDER", help=STORE_HELP.format("profile"))
    parser.add_argument("--profile", required=True, help="profile whose run made the artifact")
    set_option(parser, "change a key of --profile")


def chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", help="stage label (sft, ppo), digest, folder, `champion`, or URL of a server")
    parser.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the server's token")
    parser.add_argument("--once", metavar="TEXT", help="answer TEXT and exit")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum tokens per answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature (default %(default)s)")
    store_option(parser)


def store_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="store_verb", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text)

    json_option(command("ls", "List every artifact, newest first, with its stage, size and damage."))
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
        store_option(verb)


def usage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", default="user,project", help="user, project, stage, label or day (default %(default)s)")
    show_audit_options(parser)


def show_audit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="30d", help="30d, 12h, 2w or a date (default %(default)s)")
    store_option(parser)
    json_option(parser)


def judge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("annotator", nargs="?", default="", help="name of the annotator; default: who has to judge")
    parser.add_argument("--experiment", default="annotation", help="MLflow experiment of the queues (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of the page; default: a free one")


def up_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground and supervise until Ctrl-C")


def down_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask if runs are in progress")


def status_options(parser: argparse.ArgumentParser) -> None:
    json_option(parser)


def champion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="name of the registered model; default: the only one")


def rollback_options(parser: argparse.ArgumentParser) -> None:
    champion_options(parser)
    parser.add_argument("--reason", required=True, help="reason, kept in the registry")


def approve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="profile, or name or id of the waiting run")
    parser.add_argument("gate", help="name of the gate, as printed by the waiting run")
    parser.add_argument("--reason", required=True, help="reason, kept with the decision")
    parser.add_argument("--artifact", default="", metavar="DIGEST", help="which artifact, if several wait at the gate")
    parser.add_argument("--question", default="", metavar="ID", help="which question, as printed by the waiting run")
    parser.add_argument("--store", default="", metavar="FOLDER", help=STORE_HELP.format("profile or state folder"))


def reject_options(parser: argparse.ArgumentParser) -> None:
    approve_options(parser)


def deploy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", help=PROFILE_HELP)
    set_option(parser, "change a key of the profile before it is kept; may be repeated")
    parser.add_argument("--name", default="", help="name of the deployment; default: the profile's `name`")
    parser.add_argument("--cron", default="", help="schedule in UTC ('0 2 * * *'), or none; default: as it is")
    parser.add_argument("--pool", default="", help="work pool whose workers run it; default: the services of `rlhf up`")


def worker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", required=True, help="name of the work pool; it is made if there is none")
    parser.add_argument(
        "--runs-at-once", type=int, default=1, metavar="N", help="concurrent runs (default %(default)s)"
    )
