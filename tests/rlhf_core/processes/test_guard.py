"""A guarded process ends with its starter, and takes along all that it started."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rlhf_core.processes import guard
from rlhf_core.processes.child import guarded, guarded_process
from rlhf_core.processes.guard import kill_group
from rlhf_core.processes.identity import process_stat
from tests.support.process_state import assert_gone


def start(script: str) -> tuple[subprocess.Popen[str], int]:
    """Start a shell's script on a leash; return it with the descriptor that holds it."""
    own, held = os.pipe()
    process = subprocess.Popen(
        guarded(["sh", "-c", script], own),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(own,),
        start_new_session=True,
        text=True,
    )
    os.close(own)
    return process, held


def test_a_command_and_what_it_started_end_when_nobody_holds_the_leash():
    process, held = start("trap '' TERM; sleep 600 & echo $$ $!; wait")
    pids = [int(word) for word in process.stdout.readline().split()]
    assert all(process_stat(pid) is not None for pid in pids)
    os.close(held)
    assert process.wait(20) == -9
    assert_gone(pids)


def test_the_streams_and_the_status_are_the_command_s_own():
    process, held = start("read line; echo got $line; exit 7")
    # The end of the output is heard although the leash is still held.
    assert process.communicate("it\n", timeout=20) == ("got it\n", None)
    assert process.returncode == 7
    os.close(held)


def test_nothing_is_left_of_a_command_that_has_ended():
    process, held = start("sleep 600 >/dev/null & echo $!")
    child = int(process.stdout.readline())
    assert process.wait(20) == 0  # although the leash is still held
    assert_gone([child])
    os.close(held)


STARTER = """
import sys, time
from tests.rlhf_core.processes.test_guard import start
process, held = start("sleep 600 & echo $$ $!; wait")
print(process.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_a_command_ends_with_its_starter_when_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        pids = [int(word) for word in starter.stdout.readline().split()]
        starter.kill()
    assert len(pids) == 2
    assert_gone(pids)


PROGRAM = """
import subprocess, sys, time
from rlhf_core.processes import guard
from rlhf_core.processes.child import take_standard_streams
from rlhf_core.processes.guard import start_guard
start_guard()
answers, requests = take_standard_streams()
child = subprocess.Popen(["sleep", "60"])
print("noise")
answers.write(f"{child.pid} {sys.stdin.read()!r}\\n".encode())
answers.flush()
while True:  # whatever happens to our input
    time.sleep(1)
"""


def started() -> tuple[subprocess.Popen[bytes], bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return process, process.stdout.readline()


def test_the_guard_ends_the_process_and_its_children_when_nobody_holds_its_input():
    process, line = started()
    assert line.endswith(b" ''\n")  # what it prints goes elsewhere, and what it reads is empty
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=20) == -9
    assert process.stdout.read() == b""  # at its end: the child, which holds it too, is gone
    process.stdout.close()


LISTS = pytest.mark.parametrize("lists", [True, False], ids=["with lists of children", "without lists of children"])


@LISTS
def test_killing_the_group_ends_the_children_too(lists, monkeypatch):
    monkeypatch.setattr(guard, "KERNEL_LISTS_CHILDREN", lists)
    process, _ = started()
    kill_group(process)
    assert process.wait(timeout=20) == -9
    kill_group(process)  # its number may be another one's by now: nobody is killed
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    process.stdin.close()


ESCAPING = """
import os, signal, subprocess, sys, time
from rlhf_core.processes import guard
from rlhf_core.processes.child import take_standard_streams
from rlhf_core.processes.guard import start_guard
start_guard()
answers, requests = take_standard_streams()
there = subprocess.Popen(["sleep", "60"], start_new_session=True)
if os.fork() == 0:  # and one whose parent is gone
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.write(answers.fileno(), f"{there.pid} {orphan.pid}\\n".encode())
    os._exit(0)
os.wait()
requests.readline()
exec(sys.argv[1])
"""


def escaped(end: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a worker that ends by `end` once it is told to; return it with two children that left its session."""
    process = subprocess.Popen(
        [sys.executable, "-c", ESCAPING, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("end", "status"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -signal.SIGABRT), ("sys.exit(0)", 0)],
)
def test_a_worker_that_ends_takes_along_all_that_it_started_and_its_status_is_told(end, status):
    process, children = escaped(end)
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.read() == b"" and process.wait(timeout=20) == status
    assert_gone(children)


@LISTS
def test_no_session_hides_a_child_from_a_kill_or_from_the_end_of_the_input(lists, monkeypatch):
    monkeypatch.setattr(guard, "KERNEL_LISTS_CHILDREN", lists)
    for kill in (True, False):
        process, children = escaped("time.sleep(60)")
        with process:
            if kill:
                kill_group(process)
            process.stdin.close()
            assert process.wait(timeout=20) == -9
        assert_gone(children)


def test_the_worker_dies_with_its_guard():
    process, children = escaped("time.sleep(60)")
    with process:
        process.kill()
        assert process.stdout is not None and process.stdout.read() == b""  # its other holder is gone
    for child in children:  # nobody is left who could know of them
        subprocess.run(["kill", str(child)], check=True)


async def said(*command: str, **environment: str) -> str:
    """Return what a command writes."""
    async with guarded_process(command, environment=environment) as process:
        output, errors = await process.communicate()
    assert process.returncode == 0, errors
    return output.decode().strip()


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"

    async def run() -> None:
        script = f"trap '' TERM; sleep 600 & echo $! > {pids}; echo $$ >> {pids}; echo ready; wait"
        async with guarded_process(("sh", "-c", script), environment={}) as process:
            await process.stdout.readline()
            async with asyncio.timeout(0.0):
                await process.wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert_gone([int(line) for line in pids.read_text().split()])


def test_what_a_command_leaves_running_is_ended_with_its_block(tmp_path):
    child = asyncio.run(said("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"))
    assert_gone([int(child)])


def test_our_own_modules_are_not_forced_on_a_command(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONSAFEPATH"')) == ""
    monkeypatch.setenv("INHERITED", "kept")
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONPATH|$INHERITED|$MY_OWN"', MY_OWN="value")) == "|kept|value"
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONPATH"', PYTHONPATH="/theirs")) == "/theirs"


def test_the_word_python_is_our_own_interpreter():
    assert asyncio.run(said("python", "-c", "import sys; print(sys.executable)", PATH="")) == sys.executable


def test_a_program_that_is_not_there_is_named_among_its_errors():
    async def run() -> tuple[bytes, int | None]:
        async with guarded_process(("no-such-program",), environment={}) as process:
            _, errors = await process.communicate()
        return errors, process.returncode

    errors, status = asyncio.run(run())
    assert (status, errors) == (1, b"no-such-program: No such file or directory\n")
