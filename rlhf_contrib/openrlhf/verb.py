"""Translate a script of OpenRLHF commands to a profile (`rlhf import-openrlhf`)."""

import argparse

from pipelines.cli.common import console
from rlhf_contrib.openrlhf.translate import import_script


def import_openrlhf_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="shell script, or - for standard input")
    parser.add_argument("--out", default="", metavar="FILE", help="profile to write; default: standard output")
    parser.add_argument("--lenient", action="store_true", help="list unknown flags instead of failing on them")


def import_openrlhf(options: argparse.Namespace) -> None:
    """Write the profile, and print how every flag was translated."""
    import_script(options.script, out=options.out, lenient=options.lenient, console=console)
