"""The standard streams of a command that was started without them, or whose output cannot be written."""

import io
import os
import sys


def open_standard_streams() -> None:
    """Connect missing standard streams (`>&-`) of a command to the null device.

    Python has None for them, and the next file to be opened, such as a database, would get their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            stream = io.TextIOWrapper(io.FileIO(number, "w" if number else "r", closefd=False), encoding="utf-8")
            setattr(sys, name, stream)


def output_fails() -> bool:
    """Whether standard output cannot be written, tested by writing a byte."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def leave_output() -> None:
    """Send the rest of standard output nowhere, which the interpreter would fail to write when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
