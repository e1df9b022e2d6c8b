"""The units of work that the importer counts, against the lines of Python that it runs for each construct of a script.

A construct that costs much and counts little would let a hostile script run for minutes. Lines do not depend on the machine.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rlhf_contrib.openrlhf.redaction import ScriptSecrets
from rlhf_contrib.openrlhf.shell import _Shell

LINES_PER_UNIT = 1.2
"""Lines and units take about 0.1 microseconds each. The most that a construct needs is 0.95 (blanks in a default)."""

MANY = " ".join(["ab"] * 100)
FRAGMENTS = {
    "an array": f"A=({MANY})",
    "an array of quotes": "A=(" + "'a b' " * 100 + ")",
    "elements": "A=(" + "[k]=v " * 100 + ")",
    "an appended array": "A+=($i)",
    "an appended value": "A+=$i",
    "escapes": ": " + r"\a" * 200,
    "escapes in quotes": ': "' + r"\a" * 200 + '"',
    "escaped quotes": ': "' + r"\"" * 200 + '"',
    "quotations": ": " + "'a'" * 100,
    "double quotations": ": " + '"a"' * 100,
    "variables": ": " + "$i" * 100,
    "quoted variables": ': "' + "$i" * 100 + '"',
    "defaults": ": " + "${x:-y}" * 50,
    "nested defaults": ": " + "${x:-" * 20 + "y" + "}" * 20,
    "blanks in a default": ": ${x:-" + "a " * 100 + "}",
    "words": ": " + MANY,
    "words of a value": ": $MANY",
    "words of a program": f"ls {MANY}",
    "a program of a value": "ls $MANY",
    "a here-document": "cat <<EOF > x\n" + "line $i\n" * 30 + "EOF\n",
    "a here-document of escapes": "read X <<EOF\n" + r"\a" * 200 + "\nEOF\n",
    "a here-document of quotes": "read X <<EOF\n" + '"' * 200 + "\nEOF\n",
    "a here-document for names": "read A B <<'EOF'\n" + "a " * 100 + "\nEOF\n",
    "a here-string": "read -r A B <<< 'a b c'",
    "eval": "eval :",
    "eval of many": "eval '" + ": ; " * 50 + "'",
    "a script in a word": "bash -c 'ls openrlhf.cli.x y'",
    "echo": "A=$(echo $i)",
    "nested echo": "A=$(echo $(echo $(echo $i)))",
    "backticks": "A=`echo $i`",
    "another command": "A=$(date)",
    "a number": "N=$((i+1))",
    "a long number": "N=$((" + "+".join("1" * 50) + "))",
    "a number of names": "N=$((" + "+".join("i" * 50) + "))",
    "an arithmetic command": "((N=1+i))",
    "let": "let A=1 B=2 C=3",
    "a test": "[ $i -eq 3 ]",
    "a double test": "[[ $i == 1 && $i == 2 ]]",
    "a pattern": "[[ $i == a$i* ]]",
    "cut": "A=${MANY##*z}",
    "cut with another pattern": "A=${i#a$i}",
    "replace": "A=${MANY//b/c}",
    "replace at the start": "A=${i/#b/c}",
    "a branch that is not taken": "false && { " + "A=xyz; " * 50 + "}",
    "a case": "case $i in " + "x*) A=1;; " * 30 + "esac",
    "an open branch": "[ -f x ] && A=$i",
    "open branches": "if [ -f x ]; then A=1; " + "elif [ -f y ]; then A=2; " * 10 + "fi",
    "a loop": "while true; do A=1; done",
    "a loop of a range": "for k in {1..20}; do :; done",
    "a subshell": "( A=1 )",
    "a function": "f a b",
    "declarations": "export A=1 B=2",
    "assignments": "A=1 " * 50,
    "assignments of a program": "A=1 " * 50 + "ls",
    "arguments": "set -- a b c; shift",
    "braces": ": {a,b}{1..10}",
    "nested braces": ": " + "{a," * 20 + "b" + "}" * 20,
    "open braces": ": " + "{a," * 20,
    "commas in braces": ": {" + "," * 50 + "}",
    "redirections": ": " + "> x " * 50,
    "an element": "M[$i]=1",
    "a file": "source x",
    "arguments of the script": ': "$@" "$@"',
    "flags on a line of their own": "-a\n-a\n-a\n",
}


def lines(run: Callable[[], object]) -> int:
    """The lines of Python that a call runs."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def ratio(script: str) -> float:
    shell = _Shell(ScriptSecrets(script))
    return lines(lambda: shell.script(script, 1)) / shell.values._spent


@pytest.mark.parametrize("kind", FRAGMENTS)
def test_every_construct_counts_the_work_that_it_makes(kind):
    setting = f"MANY='{MANY}'\nf() {{ local a=1; : $1 $@; }}\ndeclare -A M\n"
    assert ratio(f"{setting}for i in {{1..20}}; do {FRAGMENTS[kind]}\ndone\n") < LINES_PER_UNIT
