"""Translate a script of OpenRLHF commands to a profile (`rlhf import-openrlhf`)."""

import argparse

from pipelines.cli.common import console
from rlhf_contrib.openrlhf.translate import import_script


def import_openrlhf(options: argparse.Namespace) -> None:
    """Write the profile, and print how every flag was translated."""
    import_script(options.script, out=options.out, lenient=options.lenient, console=console)
