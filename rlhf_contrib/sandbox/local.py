"""Run untrusted Python programs with limits, without network, and clean up after them.

Each run is a separate process tree (see `launcher`) with new network, process and mount namespaces, the rights of
nobody if started as root, no files of this machine except the interpreter and its libraries, an empty in-memory folder
as the only writable place, a cleared environment, the standard library only, and limits on time, memory, processes,
files and output. It does not protect against vulnerabilities of the kernel.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_contrib.sandbox.rewriting import test_input
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.types import encodable

WALL_TIMES = 5
"""Limit on wall time as a multiple of the CPU limit: busy machines delay programs, and one that waits must end."""
TRIES = 2  # of a program that reached the limit on wall time
GRACE_S = 10.0
"""Seconds for starting and ending a sandbox, in addition to the program's time limit."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
"""Paths that an interpreter loads from, besides its installation folder."""
FOLDER = "/tmp/rlhf-sandbox-"
"""Prefix of work folders in /tmp, because the user `nobody` may be unable to read TMPDIR."""
LAUNCHER = Path(__file__).with_name("launcher.py")
TWO_PROCESSES = Path(__file__).with_name("two_processes.py").read_text(encoding="utf-8")
MEGABYTE = 2**20  # bytes

Mode = Literal["user", "root", "none"]
Outcome = Literal["passed", "failed", "error", "timeout", "stalled", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of one run. `timeout_s` is CPU time of all processes; `memory_mb` limits each one, and all together."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    open_files: int = 64
    output_kb: int = 256


@dataclass(frozen=True)
class Execution:
    """How a run ended: `finished` with exit status 0, `error` with another status, or the limit that ended it.

    `stalled` is not a result: the program took five times its CPU limit in wall time, because it waits or the machine
    is busy.
    """

    outcome: Literal["finished", "error", "timeout", "stalled", "memory", "output"]
    status: int
    stdout: str
    stderr: str


HALF_PAIR = Execution("error", 1, "", "SyntaxError: the program holds half of a surrogate pair")


class RunProgram(Protocol):
    """Runs a Python program with this standard input; returns how it ended, or raises if that cannot be determined."""

    def __call__(self, program: str, stdin: str, *, limits: Limits) -> Execution: ...


@dataclass(frozen=True)
class InputOutput:
    """A test that feeds standard input and compares standard output, ignoring white space at line ends."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Assertions:
    """A test in Python that uses the program's names. It runs in a separate process, which the program cannot reach."""

    code: str


@dataclass(frozen=True)
class SandboxVerdict:
    """The fraction of tests that passed; `outcome` and `detail` describe the first failure.

    Not `complete` if a test gave no result (`stalled`).
    """

    outcome: Outcome
    share: float
    detail: str
    complete: bool = True


@dataclass(frozen=True)
class Isolation:
    """Isolation mode available on this machine, and the interpreter to use."""

    mode: Mode
    python: str


def run_program(program: str, stdin: str = "", *, limits: Limits, allow_network: bool = False) -> Execution:
    """Run a Python program in a new sandbox and report how it ended.

    Raises ConfigError if this machine cannot isolate it from the network and `allow_network` is not set, and
    RewardError if the sandbox itself fails.
    """
    isolation = find_isolation(allow_network)
    if encodable(program) != program:
        return HALF_PAIR
    for _ in range(TRIES):
        answer = _launch(isolation, program, encodable(stdin), limits)
        if answer["outcome"] != "stalled":
            break
    if answer["outcome"] == "refused":
        raise RewardError("sandbox", isolation.mode, answer["detail"], "find out why the program was not started")
    outcome = answer["outcome"]
    if outcome == "finished" and answer["status"] != 0:
        outcome = _why(answer["status"], answer["stderr"])
    return Execution(outcome, answer["status"], answer["stdout"], answer["stderr"])


def run_tests(
    program: str, tests: Sequence[InputOutput | Assertions], *, limits: Limits, run: RunProgram = run_program
) -> SandboxVerdict:
    """Run `tests` against `program` and report the fraction that pass; after a limit is hit, the rest have failed.

    `run` executes the programs: this machine's sandbox, or a server (`fusion`).
    """
    passed, outcome, first_failure = 0, "passed", SandboxVerdict("passed", 1.0, "")
    for test in tests:
        outcome, detail = _run_test(program, test, limits=limits, run=run)
        if outcome == "passed":
            passed += 1
        elif first_failure.outcome == "passed":
            first_failure = SandboxVerdict(outcome, 0.0, detail)
        if outcome in ("timeout", "stalled", "memory", "output"):
            break
    return SandboxVerdict(first_failure.outcome, passed / len(tests), first_failure.detail, outcome != "stalled")


def checks_nothing(test: Assertions, *, limits: Limits, run: RunProgram = run_program) -> bool:
    """Whether a test passes for any return value of the program, as `assert f` and `assert f(1) == 2 or True` do."""
    return _run_assertions("run_without_program()", test, limits=limits, run=run)[1]


@lru_cache(maxsize=2)
def find_isolation(allow_network: bool) -> Isolation:
    """Find the tightest isolation that works here, probed once; ConfigError if the network could not be blocked."""
    modes: list[Mode] = ["user", "root"] if os.geteuid() == 0 else ["user"]
    refusals = []
    for mode in [*modes, "none"] if allow_network else modes:
        for python in _interpreters():
            isolation = Isolation(mode, python)  # type: ignore[arg-type]  # a list display widens the literal
            answer = _launch(isolation, "print(6 * 7)", "", Limits())
            if answer.get("stdout") == "42\n":
                return isolation
            refusals.append(f"{mode}, {python}: {answer.get('detail') or answer.get('stderr', '')[-200:]}")
    raise ConfigError(
        "sandbox.allow_network",
        allow_network,
        f"programs cannot be isolated on this machine ({'; '.join(refusals)})",
        "allow user namespaces, make a Python interpreter readable for all users, or set allow_network = true and trust the programs",
    )


# ---------------------------------------------------------------- private


def _run_test(program: str, test: InputOutput | Assertions, *, limits: Limits, run: RunProgram) -> tuple[Outcome, str]:
    match test:
        case InputOutput(stdin=stdin, stdout=expected):
            ran = run(program, stdin, limits=limits)
            right = _lines(ran.stdout) == _lines(expected)
        case Assertions():
            ran, right = _run_assertions(f"run({program!r})", test, limits=limits, run=run)
    if ran.outcome == "finished":
        return ("passed", "") if right else ("failed", ran.stdout[-500:])
    failed = isinstance(test, Assertions) and "\nAssertionError" in ran.stderr
    return ("failed" if failed else ran.outcome), ran.stderr[-500:]


def _run_assertions(call: str, test: Assertions, *, limits: Limits, run: RunProgram) -> tuple[Execution, bool]:
    """Run a test with a function of `two_processes`. A secret word known only to the test's process reports a pass."""
    word = secrets.token_hex(8)
    ran = run(f"{TWO_PROCESSES}\n{call}\n", test_input(test.code, word), limits=limits)
    return ran, ran.stdout.endswith(f"\n{word}")


def _launch(isolation: Isolation, program: str, stdin: str, limits: Limits) -> dict[str, Any]:
    with _work_folder() as work:
        spec = {
            "mode": isolation.mode,
            "python": isolation.python,
            "program": program,
            "stdin": stdin,
            "work": str(work),
            "visible": [path for path in (*LIBRARIES, *_parts(isolation.python)) if os.path.lexists(path)],
            "timeout_s": limits.timeout_s,
            "wall_s": limits.timeout_s * WALL_TIMES,
            "memory_bytes": limits.memory_mb * MEGABYTE,
            "processes": limits.processes + 1,  # the test's
            "file_bytes": limits.file_mb * MEGABYTE,
            "open_files": limits.open_files,
            "output_bytes": limits.output_kb * 1024,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        try:
            return _converse(process, spec, deadline_s=limits.timeout_s * WALL_TIMES + GRACE_S)
        finally:
            _end(process)


def _converse(process: subprocess.Popen[bytes], spec: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
    """Read the launcher's answer. Its input stays open until then, because end of file means that the caller ended."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    deadline, answer = time.monotonic() + deadline_s, b""
    with contextlib.suppress(BrokenPipeError):  # then there is no answer either
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        process.stdin.flush()
    poll = select.poll()  # not select(): numbers of open files may pass 1024
    poll.register(process.stdout, select.POLLIN | select.POLLHUP)
    problem = f"no answer within {deadline_s:g} s"
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            problem = "its launcher ended without an answer"
            break
        answer += piece
    if answer.endswith(b"}"):
        found: dict[str, Any] = json.loads(answer)
        return found
    _end(process)
    detail = process.stderr.read().decode(errors="replace")[-500:] or problem
    return {"outcome": "refused", "detail": detail}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher. Closing its input makes it end its program; it is killed if it does not respond."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=Path(FOLDER).name, dir=Path(FOLDER).parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _interpreters() -> list[str]:
    """This interpreter (not the virtual environment's), then the system's, in case `nobody` cannot read the first."""
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [own, Path("/usr/local/bin/python3"), Path("/usr/bin/python3")]
    return list(dict.fromkeys(str(path.resolve()) for path in candidates if path.exists()))


def _parts(python: str) -> tuple[str, str]:
    """The interpreter, and the folder of its standard library."""
    return python, str(Path(python).parents[1] / "lib")


def _why(status: int, stderr: str) -> Literal["error", "timeout", "memory"]:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):  # the limit on processor time; nothing else kills from outside
        return "timeout"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
