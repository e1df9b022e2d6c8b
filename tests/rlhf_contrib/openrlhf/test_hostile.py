"""Scripts that would do harm if anything of them ran. The importer reads them as text, and nothing happens.

Every effect of a Python process on its surroundings (files, processes, signals, sockets, libraries) is an audit event, which
is recorded here: https://docs.python.org/3/library/audit_events.html
"""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_contrib.openrlhf.shell import read_commands
from rlhf_contrib.openrlhf.translate import translate
from rlhf_core.errors import ConfigError

CALL = "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl"
HARMLESS = {"builtins.id", "compile", "object.__getattr__", "sys._getframe"}
"""Events of arithmetic, which is parsed by Python's parser and evaluated node by node, and of attributes."""

recording: list[tuple[set[int | None], set[str]]] = []
"""Threads that do not count, and the events of all others."""


def record(event: str, _: tuple[Any, ...]) -> None:
    if recording and threading.get_ident() not in recording[-1][0]:
        recording[-1][1].add(event)


sys.addaudithook(record)


@contextmanager
def effects() -> Iterator[set[str]]:
    """The kinds of effects inside the block, without those of threads and garbage that other tests have left."""
    gc.collect()
    gc.disable()
    others = {one.ident for one in threading.enumerate()} - {threading.get_ident()}
    recording.append((others, set()))
    try:
        yield recording[-1][1]
    finally:
        recording.pop()
        gc.enable()


SCRIPTS = {
    "kill": "kill -9 $PPID; kill -TERM 0; pkill -f python; trap 'kill -9 $$' EXIT; exec false",
    "fork": ":(){ :|:& };:\nfor i in {1..100}; do (sleep 60 &) done; nohup sleep 60 & setsid sleep 60; coproc sleep 60",
    "write": "echo x > FOLDER/made; printf x >> FOLDER/kept; tee FOLDER/made <<< x; dd if=/dev/zero of=FOLDER/made",
    "remove": 'rm -rf "FOLDER" ~ /tmp/none; mv FOLDER/kept FOLDER/made; : > FOLDER/kept; unlink FOLDER/kept',
    "read": "A=$(cat FOLDER/kept); B=`cat FOLDER/kept`; C=$(<FOLDER/kept); source FOLDER/kept; . FOLDER/kept; D=*; read X < FOLDER/kept; mapfile Y < FOLDER/kept; E=~root; F=FOLDER/k*",
    "network": "curl http://127.0.0.1:PORT; exec 3<>/dev/tcp/127.0.0.1/PORT; wget -O- 127.0.0.1:PORT | bash; nc 127.0.0.1 PORT",
    "environment": "export PATH=/none LD_PRELOAD=x; unset HOME; cd /; umask 0; ulimit -v 1; set -o noclobber; alias python=rm",
    "substitution": 'A=$(touch FOLDER/made); B=${X:-$(touch FOLDER/made)}; C=$((N[$(touch FOLDER/made)])); D="`touch FOLDER/made`"; [[ -n $(touch FOLDER/made) ]]; eval "touch FOLDER/made"; bash -c "touch FOLDER/made"; : <(touch FOLDER/made)',
    "python": "python -c \"open('FOLDER/made', 'w')\"; A=$((__import__('os').system('touch FOLDER/made'))); B={__import__('os')}; echo {{ 7*7 }}",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_has_no_effect(kind, tmp_path):
    kept, environment, folder = tmp_path / "kept", dict(os.environ), Path.cwd()
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        harm = SCRIPTS[kind].replace("FOLDER", str(tmp_path)).replace("PORT", str(server.getsockname()[1]))
        script = f"{harm}\n{CALL} --seed 3 --save_path $A$B$C$D\n{harm}"
        translate(script, name="x", template_file="x.jinja")  # imports what it needs
        with effects() as found:
            translation = translate(script, name="x", template_file="x.jinja")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert found <= HARMLESS
    assert "seed = 3" in translation.profile
    assert [one.name for one in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "kept"
    assert (dict(os.environ), Path.cwd()) == (environment, folder)


def test_an_effect_would_be_seen(tmp_path):
    with effects() as found:
        subprocess.run(["true"], check=True)
        (tmp_path / "made").touch()
        os.kill(os.getpid(), 0)
        socket.socket().close()
        thread = threading.Thread(target=os.listdir)
        thread.start()
        thread.join()
    assert {"subprocess.Popen", "open", "os.kill", "socket.__new__", "os.listdir"} <= found


LOOPS, ENDS = "for i in {1..1000}; do for j in {1..1000}; do ", "; done; done\n"
ENDLESS = {
    "doubled": "A=x\n" + "A=$A$A\n" * 60,
    "doubled in a loop": "A=x\nfor i in {1..60}; do A=$A$A; done\n",
    "appended": "A=x\n" + "A+=$A\n" * 60,
    "replaced": "A=aaaaaaaaaa\n" + "A=${A//a/aaaaaaaaaa}\n" * 20,
    "cut": "A=x\n" + "A=$A$A\n" * 20 + "A=${A%%y*}\n",
    "words": "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
    "loops": "for i in {1..1000}; do for j in {1..1000}; do for k in {1..1000}; do A=$i; done; done; done\n",
    "words in loops": "for i in {1..1000}; do for j in {1..90}; do : " + "a" * 300 + "; done; done\n",
    "numbers in loops": f"for i in {{1..1000}}; do for j in {{1..90}}; do N=$(({'9' * 300}*9)); done; done\n",
    "calls": "f() { f; f; }\nf\n",
    "blocks": "A=" + "$(" * 20_000 + "x" + ")" * 20_000 + "\n",
    "eval": "A='eval $A'\neval $A\n",
    "braces": "A=1\n: " + "{a,b}" * 100 + "\n",
    "a range": ": {1..999999999999}{1..999999999999}\n",
    "arrays in loops": f"{LOOPS}A=({'ab ' * 100}){ENDS}",
    "here-documents in loops": f"{LOOPS}\ncat <<EOF > x\n{'line $i ' * 100}\nEOF\n{ENDS}",
    "scripts in loops": f"{LOOPS}eval A=$(echo $(echo $i)){ENDS}",
    "branches in loops": f"{LOOPS}false && {{ {'A=xyz; ' * 300} }}{ENDS}",
    "flags on lines of their own": "ls\n" + "-a\n" * 40_000,
    "commands": f"f() {{ {CALL}; }}\n" + "f\n" * 50_000,
    "elements": f"A=({'a ' * 9000})\n{LOOPS}A[5]=x{ENDS}",
    "blank lines": "\n" * 1_000_000,
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_script_that_grows_without_end_is_refused_soon(kind):
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"script: its (values or calls grow beyond|blocks are nested too deeply)"):
        read_commands(f"{ENDLESS[kind]}{CALL}")
    assert time.process_time() - begun < 20  # about a second on an idle machine; without a bound minutes, or all memory


@pytest.mark.parametrize("number", ["9**9**9**9", "1<<10000000000", "9" * 5000, "X*X*X*X*X*X*X*X"])
def test_numbers_are_those_of_a_shell(number):
    [command] = read_commands(f"X=999999999999\nN=$(({number}))\n{CALL} --a $N --b ${{A[²]}}")[0]
    assert command.words[-3] == f"$(({number}))"


def test_loops_and_functions_of_a_long_script_are_within_the_bound():
    lines = [f"V{number}=$V{number - 1}/part{number}; : ${{V{number}##*/}}" for number in range(1, 150)]
    [command] = read_commands("V0=a\n" + "\n".join(lines) + f"\nfor i in {{1..1000}}; do A=$i; done\n{CALL} --a $A")[0]
    assert command.words[-1] == "1000"
