"""Forks of a warm parent: each equals a fresh process, also if the parent is killed, stopped, or refuses to fork."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlhf_core.processes import warm
from rlhf_core.processes.host import PipedProcess
from rlhf_core.processes.warm_parent import REQUEST_BYTES, _move
from tests.support.process_state import assert_gone

MODULE = "tests.support.seen_by_worker"


def start(*arguments: str, module: str = MODULE, **variables: str) -> PipedProcess:
    path = os.pathsep.join([*sys.path, os.curdir])
    return warm.start_warm(module, arguments, environment=os.environ | {"PYTHONPATH": path} | variables)


def end(process: PipedProcess) -> bytes:
    """Close the input of a process and wait for its end; return its output."""
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.close()
        output = process.stdout.read()
    process.wait()
    return output


def run(*arguments: str) -> int | None:
    process = start(*arguments)
    end(process)
    return process.returncode


def parent() -> psutil.Process:
    return psutil.Process(warm._current[0][1]._process.pid)


def connections() -> Counter[str]:
    """Open pipes, sockets and process descriptors; not files, because a thread of the test process reads /proc."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[str(descriptor.readlink())] += 1
    return Counter({name: count for name, count in found.items() if not name.startswith("/")})


@contextlib.contextmanager
def changed_process(change: str) -> Iterator[None]:
    """Change what a new process inherits, by calls that only a second call can undo."""
    umask, limits, cores = os.umask(0o022), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    os.umask(0o027 if change == "umask" else umask)
    if change == "limit":
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    if change == "signal":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if change == "core":
        os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    "change", ["none", "variable", "less", "time zone", "folder", "path", "umask", "limit", "signal", "core"]
)
def test_a_fork_sees_of_its_process_what_a_fresh_one_sees(change, tmp_path, monkeypatch):
    monkeypatch.setenv("EARLIER", "1")
    run()
    if change in ("variable", "time zone"):
        monkeypatch.setenv("LATER" if change == "variable" else "TZ", "Asia/Tokyo")
    if change == "less":
        monkeypatch.delenv("EARLIER")
    if change == "folder":
        monkeypatch.chdir(tmp_path)
    if change == "path":
        monkeypatch.syspath_prepend(tmp_path)
    with changed_process(change):
        forked = start()
        seen = end(forked)
        monkeypatch.setattr(sys, "platform", "darwin")
        fresh = start()
        expected = end(fresh)
    assert isinstance(forked, warm.WarmFork) and isinstance(fresh, subprocess.Popen)
    assert json.loads(seen) == json.loads(expected)


def test_no_fork_finds_the_variables_of_others(monkeypatch):
    warm.end_warm_parent()
    monkeypatch.setenv("EARLIER_TOKEN", "hidden")
    run()
    monkeypatch.delenv("EARLIER_TOKEN")
    process = start("wait")
    assert isinstance(process, warm.WarmFork)
    process.stdout.readline()
    kept = [Path(f"/proc/{pid}/environ").read_text() for pid in (process.pid, parent().pid)]
    end(process)
    assert "EARLIER_TOKEN" not in "".join(kept) and "PYTHONPATH=" in kept[0]


def test_a_fork_takes_its_status_and_its_streams_from_the_module():
    for status in (0, 3, -11):
        process = start(str(status))
        assert end(process)[:1] == b"{" and (process.returncode, process.poll()) == (status, status)


@pytest.mark.parametrize("free", [False, True])
def test_descriptors_move_to_numbers_that_others_of_them_have_or_that_are_free(free, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    one, other, *unused = [os.open(tmp_path / name, os.O_RDONLY) for name in "abab"]
    for number in unused:
        os.close(number)
    numbers = unused if free else [other, one]
    _move([one, other], numbers)
    assert [os.read(number, 1) for number in numbers] == [b"a", b"b"]
    for number in numbers:
        os.close(number)


def test_many_starts_at_once_have_one_parent_and_leave_nothing():
    run()
    first, before = parent(), connections()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, map(str, range(16)))) == list(range(16))
    assert parent() == first and first.children() == []  # all are reaped
    assert not connections() - before


# ---------------------------------------------------------------- a parent that fails


def test_a_killed_parent_is_replaced_and_its_workers_continue():
    run()
    first, process = parent(), start("wait")
    first.kill()
    first.wait(10)
    assert process.returncode is None
    assert run("3") == 3 and parent() != first
    end(process)
    assert process.returncode == -signal.SIGKILL  # it ended by itself, but nobody knows how


def test_a_stopped_parent_is_replaced():
    run()
    first = parent()
    warm._current[0][1]._connection.settimeout(0.1)
    first.suspend()
    assert run("3") == 3 and parent() != first
    assert_gone([first.pid])


def test_after_an_interrupt_no_start_gets_the_reply_to_an_earlier_one():
    run()
    first = parent()
    first.suspend()
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        start("4")
    signal.signal(signal.SIGALRM, previous)
    with contextlib.suppress(psutil.NoSuchProcess):
        first.resume()
    assert run("3") == 3


# ---------------------------------------------------------------- fresh processes instead

WORKER = """
import colorsys, sys, threading, time
if "THREAD" in {words!r}:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
if __name__ == "__main__":
    print(colorsys.__file__, "sitecustomize" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "file", "text", "kind", "status"),
    [
        ("", "other.py", "", warm.WarmFork, 0),
        ("THREAD", "other.py", "", subprocess.Popen, 0),
        ("", "sitecustomize.py", "", subprocess.Popen, 0),
        ("", "colorsys.py", "", subprocess.Popen, 0),
        ("", "colorsys.py", "1 / 0", subprocess.Popen, 1),
    ],
)
def test_a_parent_with_threads_or_a_module_of_the_user_never_forks(
    words, file, text, kind, status, tmp_path, monkeypatch
):
    (tmp_path / "crew").mkdir()
    (tmp_path / "crew" / "worker.py").write_text(WORKER.format(words=words))
    (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        process = start(module="crew.worker")
        output = end(process).decode()
        assert (type(process), process.returncode) == (kind, status)
        assert (str(tmp_path) in output) == (file == "colorsys.py" and not text)
        assert ("True" in output) == (file == "sitecustomize.py")
    assert parent().is_running()


def test_on_another_system_each_process_is_fresh(monkeypatch):
    warm.end_warm_parent()
    monkeypatch.setattr(sys, "platform", "darwin")
    process = start("3")
    end(process)
    assert isinstance(process, subprocess.Popen) and process.returncode == 3 and not warm._current


def test_an_environment_that_fits_into_no_message_needs_a_fresh_process():
    run()
    first, large = parent(), {name: name * (REQUEST_BYTES // 2) for name in "AB"}
    process = start("0", **large)
    assert isinstance(process, subprocess.Popen)
    assert json.loads(end(process))["environment"].items() >= large.items()
    assert run("3") == 3 and parent() == first


# ---------------------------------------------------------------- the process that starts it

DRIVER = f"""
import os, signal, sys, time
from rlhf_core.processes import warm

def start(ending):
    process = warm.start_warm({MODULE!r}, [ending], environment=os.environ)
    process.stdout.readline()
    return process

stays, killed = start("wait"), start("wait")
done, tell = os.pipe()
if os.fork() == 0:
    sys.exit()  # with all that Python does at the end of a process
os.wait()
warm._FINDING.acquire()  # as another thread may do
fork = os.fork()
warm._FINDING.release() if fork else None
if not fork:  # it holds the connection to the parent, but does not use it
    stays.stdin.close()
    os.kill(killed.pid, signal.SIGKILL)
    own = start("3")
    print(own.wait(), killed.wait(), own._parent is stays._parent, own._parent._process.pid, flush=True)
    os.write(tell, b".")
    time.sleep(600)
os.read(done, 1)
print(killed.wait(), start("0")._parent is stays._parent, stays._parent._process.pid, stays.pid, flush=True)
time.sleep(600)
"""


def test_the_parent_and_its_workers_end_with_a_driver_that_is_killed():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    *of_fork, its_parent = driver.stdout.readline().split()
    *of_driver, parent_pid, worker = driver.stdout.readline().split()
    assert (of_fork, of_driver) == (["3", "-9", "False"], ["-9", "True"])
    driver.kill()
    driver.wait()
    assert_gone([int(parent_pid), int(worker)])  # although the fork holds the other end of the connection
    os.killpg(driver.pid, signal.SIGKILL)  # the fork
    driver.stdout.close()
    assert_gone([int(its_parent)])
