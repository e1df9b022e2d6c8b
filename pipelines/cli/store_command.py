"""The commands of a store and their options (`rlhf store VERB`); the module of a command is imported when it runs."""

import argparse

from pipelines.cli.common import json_option, store_option


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


def store(options: argparse.Namespace) -> int:
    """Run `rlhf store VERB`."""
    if options.store_verb == "ls":
        from pipelines.cli.store_lists import store_ls

        store_ls(options)
        return 0
    from pipelines.cli.store_verbs import look_after_store  # 0.6 s, and a list takes 0.3 s without

    return look_after_store(options)
