"""What a program in the sandbox can and cannot do. No mock: the kernel is what is tested."""

import ast
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_contrib.sandbox import local as sandbox
from rlhf_contrib.sandbox.local import (
    Assertions,
    Execution,
    InputOutput,
    Isolation,
    Limits,
    SandboxVerdict,
    find_isolation,
    run_program,
    run_tests,
)
from rlhf_core.errors import ConfigError

QUICK = Limits(timeout_s=1.5)


OURS = f"/tmp/rlhf-sandbox-test-{os.getpid()}-"


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch) -> Iterator[None]:
    """Skip where the kernel does not let us; afterwards no process and no folder may be left."""
    monkeypatch.setattr(sandbox, "FOLDER", OURS)
    try:
        find_isolation(False)
    except ConfigError as error:
        pytest.skip(str(error))
    yield
    assert sandboxed() == []
    assert list(Path("/tmp").glob(f"{Path(OURS).name}*")) == []


def sandboxed() -> list[int]:
    """Numbers of all programs in a sandbox of this test, and of its launchers."""
    found = []
    for process in psutil.process_iter():
        try:
            launcher = str(sandbox.LAUNCHER) in process.cmdline() and os.getpid() in [
                one.pid for one in process.parents()
            ]
            if launcher or process.environ().get("HOME", "").startswith(OURS):
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.ZombieProcess, psutil.NoSuchProcess):
            continue
    return found


def run(program: str, stdin: str = "", limits: Limits = QUICK) -> Execution:
    return run_program(program, stdin, limits=limits)


def test_a_program_reads_its_input_and_writes_its_output():
    ran = run("import sys\nprint(input()[::-1])\nsys.stderr.write('note')", "abc\n")
    assert ran == Execution("finished", 0, "cba\n", "note")


@pytest.mark.parametrize(
    ("program", "limits", "outcome", "written"),
    [
        ("1 / 0", QUICK, "error", "ZeroDivisionError"),
        ("while True: pass", QUICK, "timeout", ""),
        (
            "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)",
            Limits(0.5),
            "stalled",
            "",
        ),  # it closed its output
        # 4 * 0.5 CPU s, each process within its limit
        (
            "import os, time\nos.fork()\nos.fork()\nwhile time.process_time() < 0.5: pass\ntime.sleep(9)",
            Limits(1.5),
            "timeout",
            "",
        ),
        ("x = []\nwhile True: x.append(bytearray(10**7))", Limits(5, memory_mb=128), "memory", ""),
        # 4 * 100 MB, each process within its limit
        (
            "import os, time\nfor _ in range(2): os.fork()\nx = bytearray(10**8)\ntime.sleep(30)",
            Limits(10, 200),
            "memory",
            "",
        ),
        ("f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(2**20))", Limits(5, file_mb=4), "error", "OSError"),
        ("while True: print('x' * 1000)", Limits(5, output_kb=64), "output", ""),
    ],
)
def test_a_program_ends_at_its_limits(program, limits, outcome, written):
    start = time.monotonic()
    ran = run(program, limits=limits)
    assert ran.outcome == outcome and written in ran.stderr and len(ran.stdout) in (0, 64 * 1024)
    assert time.monotonic() - start < limits.timeout_s * sandbox.WALL_TIMES * sandbox.TRIES + sandbox.GRACE_S


def test_the_limit_is_on_cpu_time_and_a_program_that_only_waits_has_no_result():
    limits = Limits(timeout_s=1.0)
    assert run("import time\ntime.sleep(2.5)\nprint(1)", limits=limits).stdout == "1\n"  # as on a busy machine
    waits = "import time\ndef f(x): time.sleep(99)"
    tests = [Assertions("assert f(1) == 1"), Assertions("assert f(2) == 2")]
    verdict = run_tests(waits, tests, limits=Limits(timeout_s=0.2))
    assert (verdict.outcome, verdict.share, verdict.complete) == ("stalled", 0.0, False)
    wrong_then_waits = "import time\ndef f(x):\n  if x == 2: time.sleep(99)"
    verdict = run_tests(wrong_then_waits, tests, limits=Limits(timeout_s=0.2))
    assert (verdict.outcome, verdict.complete) == ("failed", False)


def test_a_fork_bomb_is_stopped_and_leaves_nothing():
    ran = run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
    assert ran.outcome in ("timeout", "memory")


def test_an_orphan_that_forked_twice_into_its_own_session_dies_with_the_program():
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
print("done")
"""
    assert run(program).stdout == "done\n"


def test_there_is_no_network_not_even_to_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 1)\nexcept OSError as e: print(e.errno)"
        assert run(program).stdout.strip() in ("101", "111")  # unreachable; refused, had it a loopback of its own
    abstract = "\0rlhf-sandbox-test"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(abstract)
        listening.listen()
        program = f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({abstract!r}); print('in')\nexcept OSError: print('out')"
        assert run(program).stdout == "out\n"


def test_nothing_outside_its_folder_can_be_written(tmp_path):
    tmp_path.chmod(0o777)
    targets = [str(tmp_path / "x"), "/usr/x", "/etc/x", "/dev/shm/x", "/var/tmp/rlhf-x", "/dev/x"]
    program = f"""
for path in {targets!r}:
    try: open(path, "w").write("x")
    except OSError: pass
open("mine", "w").write("x")
print(open("mine").read())
"""
    assert run(program).stdout == "x\n"
    assert not [path for path in targets if Path(path).exists()]


def test_it_knows_nothing_of_our_environment_our_processes_or_our_rights(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    program = f"""
import glob, os
print(any(b"s3cret" in open(p, "rb").read() for p in glob.glob("/proc/[0-9]*/environ")), "SECRET_TOKEN" in os.environ)
print(sorted(os.listdir("/dev")), os.getuid() == 0, os.path.exists("/proc/{os.getpid()}/stat"))
try: os.setuid(0)
except OSError: print("no root")
"""
    lines = run(program).stdout.splitlines()
    assert lines == [
        "False False",
        "['null', 'random', 'stderr', 'stdin', 'stdout', 'urandom', 'zero'] False False",
        "no root",
    ]


SLEEPER = """
import sys
from rlhf_contrib.sandbox import local
from rlhf_contrib.sandbox.local import *
local.FOLDER = sys.argv[1]
find_isolation(False)
print("up", flush=True)
run_program("import time; time.sleep(60)", limits=Limits(timeout_s=60))
"""


@pytest.fixture
def asker() -> Iterator[psutil.Popen]:
    """Another process of ours that waits for a program, once that program runs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with psutil.Popen(
        [sys.executable, "-c", SLEEPER, OURS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout.readline() == "up\n"
        wait_for(lambda: any(one.cmdline()[-1:] == ["main.py"] for one in process.children(recursive=True)))
        yield process
        if process.poll() is None:
            process.kill()


def test_a_program_dies_with_the_process_that_asked_for_it(asker):
    programs = asker.children(recursive=True)
    assert len(programs) == 2  # the launcher and what it launched
    asker.kill()
    wait_for(lambda: not any(alive(process) for process in programs))
    next(Path("/tmp").glob(f"{Path(OURS).name}*")).rmdir()  # empty: what was in it was in memory


def test_a_program_dies_with_its_launcher(asker):
    launcher, program = sorted(asker.children(recursive=True), key=lambda one: one.cmdline()[-1] == "main.py")
    launcher.kill()
    wait_for(lambda: not alive(program))
    said = asker.communicate()[1]
    assert "RewardError" in said and "its launcher ended without an answer" in said


def test_the_share_of_tests_and_the_first_failure_are_told():
    tests = [Assertions("assert f(1) == 2"), Assertions("assert f(1) == 3"), Assertions("f(None)")]
    verdict = run_tests("def f(x): return x + 1", tests, limits=QUICK)
    assert verdict.outcome == "failed" and verdict.share == 1 / 3 and "AssertionError" in verdict.detail
    assert run_tests("print(int(input()) * 2)", [InputOutput("2", "4 \n\n")], limits=QUICK).outcome == "passed"


HARMS = {
    "numbers of another type of the name": "class Fraction:\n    def __str__(self): return '1e20000000'\ndef f(x): return Fraction()",
    "a number of many digits": "def f(x): return 10**5000",
    "a decimal number of many digits": "import decimal\ndef f(x): return decimal.Decimal('1e999999999')",
    "no text": "x = '\ud800'",
}


@pytest.mark.parametrize("program", HARMS.values(), ids=HARMS)
def test_what_a_program_computes_fails_its_own_test_and_nothing_else(program):
    start = time.monotonic()
    assert run_tests(program, [Assertions("assert f(2) == 4")], limits=QUICK).share == 0.0
    assert time.monotonic() - start < 20


def test_a_right_program_with_names_and_last_words_of_its_own_passes():
    program = "import atexit\natexit.register(print, 'bye')\nstr = list = dict = type = 'mine'\ndef f(x): return x * x"
    assert run_tests(program, [Assertions("assert f(2) == 4")], limits=QUICK).outcome == "passed"


CHEATS = {
    "agrees with everything": "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()",
    "reads the test and says its last word": (
        "import sys, os\ntest = sys.stdin.read()\nword = test.rpartition('\\\\n')[2].partition(\"'\")[0]\n"
        "sys.stdout.write('\\n' + word + '[]'); sys.stdout.flush(); os._exit(0)"
    ),
    "replaces exec": "import builtins\nexec = builtins.exec = lambda *_: None\ndef f(x): return 0",
    "replaces what compares": "import builtins\nbuiltins.abs = lambda _: 0.0\nbuiltins.round = lambda *_: 4\ndef f(x): return 0",
    "answers with the shape of an answer": 'print(\'[["int", "0x4"]]\')\nimport os\nos._exit(0)',
    "exits before the test": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "computes something else": "def f(x): return x",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_program_that_cheats_passes_no_test_against_a_literal(cheat):
    tests = [Assertions(f"assert {test}") for test in ("f(2) == 4", "abs(f(2) - 4) < 1e-9", "round(f(2), 3) == 4")]
    assert run_tests("def f(x): return x * x", tests, limits=QUICK).outcome == "passed"
    assert run_tests(cheat, tests, limits=QUICK).share == 0.0


def test_the_process_of_a_test_cannot_be_read_by_the_program():
    program = """
import os
def opened():
    found = []
    for pid in {1, os.getppid()} - {os.getpid()}:
        for name in ("mem", "maps", "fd", "fd/0", "fd/1", "environ", "syscall"):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                found.append(name)
            except OSError:
                pass
    return found, os.read(0, 99), open("main.py").read().count("".join(["EXPECTED", "_VALUE"]))
"""
    test = Assertions("EXPECTED_VALUE = ([], b'', 0)\nassert opened() == EXPECTED_VALUE")
    assert run_tests(program, [test], limits=QUICK) == SandboxVerdict("passed", 1.0, "")


def test_memory_that_no_process_has_filled_itself_is_counted_and_what_hides_it_is_denied():
    denied = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 2**30, 0o1600), libc.unshare(0x10000000), libc.ptrace(0, 0, 0, 0), ctypes.get_errno())
try: os.memfd_create("x")
except PermissionError: print("no memfd")
print(libc.prctl(1, 0), libc.vmsplice(0, 0, 0, 0), libc.prctl(15, b"name"))
import socket
for family in (socket.AF_UNIX, socket.AF_INET, 40):
    try: socket.socket(family, socket.SOCK_STREAM).close(); print("a socket")
    except OSError as error: print(error.errno == 97)
"""
    assert run(denied).stdout == "-1 -1 -1 1\nno memfd\n-1 -1 0\na socket\na socket\nTrue\n"
    held_by_a_thread_whose_process_seems_gone = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
for _ in range(4):
    if os.fork() == 0:
        def hold():
            kept = bytearray(120 * 2**20)
            time.sleep(60)
        threading.Thread(target=hold).start()
        time.sleep(0.5)
        libc.syscall(60, 0)
time.sleep(60)
"""
    assert (
        run(held_by_a_thread_whose_process_seems_gone, limits=Limits(timeout_s=20, memory_mb=300)).outcome == "memory"
    )
    filled_by_those_who_ended = """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        shared = mmap.mmap(-1, 150 * 2**20)
        if os.fork() == 0:
            for place in range(0, len(shared), 4096): shared[place] = 1
            os._exit(0)
        os.wait()
        time.sleep(60)
time.sleep(60)
"""
    assert run(filled_by_those_who_ended, limits=Limits(timeout_s=20)).outcome == "memory"


@pytest.mark.parametrize(
    ("pair", "grown"),
    [
        ("socket.socketpair()", "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)"),
        ("socket.socketpair(type=socket.SOCK_DGRAM)", "b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)"),
        ("os.pipe()", "fcntl.fcntl(a, fcntl.F_SETPIPE_SZ, 2**20)"),
    ],
)
def test_the_buffers_of_sockets_and_pipes_are_counted_and_keep_their_sizes(pair, grown):
    program = f"""
import fcntl, os, socket, time
kept = a, b = {pair}
try: {grown}
except PermissionError: print("as it was")
for _ in range(6):
    if os.fork() == 0:
        kept = [{pair} for _ in range(28)]
        time.sleep(60)
time.sleep(0.2)
"""
    assert run(program, limits=Limits(timeout_s=20)).stdout == "as it was\n"
    if "socket" in pair:  # 6 * 28 * 2 of them hold up to 2 * 208 KiB each, beside 7 processes of 5 MiB
        waiting = program.replace("sleep(0.2)", "sleep(60)")
        assert run(waiting, limits=Limits(timeout_s=20, memory_mb=120)).outcome == "memory"


def test_nothing_of_this_machine_is_shown_but_the_interpreter(tmp_path):
    program = f"""
import os, sys
print(sorted(os.listdir("/")), os.path.exists({str(Path(__file__))!r}), os.path.exists({str(tmp_path)!r}))
print(os.listdir("/tmp") == [os.path.basename(os.getcwd())], os.path.exists("/etc/passwd"), os.path.exists("/bin/sh"))
import ctypes, decimal, hashlib, json, multiprocessing, sqlite3, ssl, subprocess, threading, zoneinfo
thread = threading.Thread(target=print, args=("a thread",)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('a child')"], capture_output=True, text=True).stdout, end="")
"""
    assert run("print(open('/dev/stdin').read())", "given").stdout == "given\n"
    shown, nothing, thread, child = run(program, limits=Limits(timeout_s=10)).stdout.splitlines()
    folders = set(ast.literal_eval(shown.partition("]")[0] + "]"))
    assert folders <= {"dev", "etc", "lib", "lib64", "proc", "tmp", "usr", "opt", "root", "home"} and shown.endswith(
        "False False"
    )
    assert (nothing, thread, child) == ("True False False", "a thread", "a child")


def test_after_a_limit_the_rest_of_the_tests_is_not_run():
    start = time.monotonic()
    verdict = run_tests("while True: pass", [InputOutput("", "")] * 20, limits=Limits(timeout_s=0.5))
    assert (verdict.outcome, verdict.share) == ("timeout", 0.0) and time.monotonic() - start < 10


def test_without_isolation_it_is_refused_unless_the_network_is_allowed(monkeypatch):
    real = sandbox._launch

    def no_namespaces(isolation: Isolation, *rest: object) -> dict[str, object]:
        refused = {"outcome": "refused", "detail": "unshare: Operation not permitted"}
        return real(isolation, *rest) if isolation.mode == "none" else refused

    monkeypatch.setattr(sandbox, "_launch", no_namespaces)
    find_isolation.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"allow_network.*Operation not permitted"):
            run("print(1)")
        assert run_program("print(1)", limits=QUICK, allow_network=True).stdout == "1\n"
        bomb = "import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass"
        assert run_program(bomb, limits=QUICK, allow_network=True).outcome == "timeout"
    finally:
        find_isolation.cache_clear()


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: object, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit"])
def test_a_program_may_end_itself_after_its_output_and_not_before_its_tests(end):
    test = InputOutput("1\n", "2\n")
    assert run_tests(f"print(int(input()) + 1)\n{end}", [test], limits=QUICK).outcome == "passed"
    assert run_tests(f"{end}\nprint(int(input()) + 1)", [test], limits=QUICK).outcome == "failed"
    assert run_tests(f"def f(x):\n    return x\n{end}", [Assertions("assert f(1) == 1")], limits=QUICK).share == 0.0


@pytest.mark.parametrize("main", ["sys.exit(0)", "print(f(int(input())))", "raise SystemExit(f(1))", "unittest.main()"])
def test_a_test_of_a_function_does_not_run_the_main_part_of_a_program(main):
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport sys, unittest\n@dataclass\n"
        f"class A:\n    x: int\ndef f(x):\n    return A(x).x + 1\nif __name__ == '__main__':\n    {main}"
    )
    assert run_tests(program, [Assertions("assert f(1) == 2")], limits=QUICK).outcome == "passed"
    assert run_tests(program, [Assertions("assert f(1) == f(0) + 1")], limits=QUICK).outcome == "passed"
    assert run_tests(program, [Assertions("assert f(1) == 3")], limits=QUICK).share == 0.0


def test_a_program_starts_with_names_of_its_own_only():
    shown = "print(sorted(n for n in globals() if n[:2] != '__'), __name__, __file__)\nimport sys\nprint(sys.argv)"
    assert run_program(shown, limits=QUICK).stdout == "[] __main__ main.py\n['main.py']\n"
    assert run_program("from __future__ import annotations\nexit(3)", limits=QUICK).status == 3
