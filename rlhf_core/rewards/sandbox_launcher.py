"""The process that `rlhf_core.rewards.sandbox` starts: it shuts itself in, runs one Python program and says how it ended.

Run by path with `python -I -S`, so standard library only. One line of JSON comes in, one JSON object goes out. Its
standard input stays open: when that ends, whoever asked is gone, and the program is killed.

How it is shut in (`mode`), see user_namespaces(7) and mount_setattr(2):
`user` in new user, mount, network, process and IPC namespaces; `root` likewise but for the user namespace; `none` by
resource limits alone. Whoever is root becomes nobody first or last. In a process namespace the program is number 1, and
the kernel kills all that it started when it ends, wherever they forked to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any

NOBODY = 65534
LOOKS_EVERY_S = 0.02
"""Between two looks at the memory of all processes together."""
DEVICES = ("null", "zero", "random", "urandom")

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x2000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1  # one number on every machine

libc = ctypes.CDLL(None, use_errno=True)
Spec = dict[str, Any]


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
    """Run what standard input asks for."""
    spec: Spec = json.loads(sys.stdin.buffer.readline())
    try:
        enter_namespaces(spec["mode"])
        answer = run(spec)
    except OSError as error:
        answer = {"outcome": "refused", "detail": f"{error}"}
    sys.stdout.write(json.dumps(answer))


def run(spec: Spec) -> dict[str, Any]:
    """Start the program, watch it, and return outcome, exit status, standard output and error."""
    out, err, trouble = os.pipe(), os.pipe(), os.pipe()
    given = os.memfd_create("stdin")
    os.write(given, spec["stdin"].encode())
    os.lseek(given, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        become_the_program(spec, given, out[1], err[1], trouble[1])
    for descriptor in (out[1], err[1], trouble[1], given):
        os.close(descriptor)
    problem = os.read(trouble[0], 4096).decode()  # ends when the program is executed
    if problem:
        os.waitpid(pid, 0)
        return {"outcome": "refused", "detail": problem}
    outcome, taken = watch(pid, out[0], err[0], spec)
    status = finish(pid, spec["mode"])
    for descriptor in (out[0], err[0]):
        while outcome == "finished" and (piece := os.read(descriptor, 65536)):
            taken[descriptor] += piece[: spec["output_bytes"]]
    texts = [taken[descriptor][: spec["output_bytes"]].decode(errors="replace") for descriptor in (out[0], err[0])]
    return {"outcome": outcome, "status": status, "stdout": texts[0], "stderr": texts[1]}


def watch(pid: int, out: int, err: int, spec: Spec) -> tuple[str, dict[int, bytes]]:
    """Return why the watching ended (finished, timeout, memory, output) and what was written until then."""
    deadline = time.monotonic() + spec["timeout_s"]
    taken = {out: b"", err: b""}
    ended = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        for descriptor in (out, err, ended, 0):
            selector.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            for key, _ in selector.select(LOOKS_EVERY_S):
                if key.fd == ended:
                    return "finished", taken
                if key.fd == 0:
                    finish(pid, spec["mode"])
                    sys.exit(1)
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fd)
                taken[key.fd] += piece
                if len(taken[key.fd]) > spec["output_bytes"]:
                    return "output", taken
            if spec["mode"] != "none" and resident_bytes() > spec["memory_bytes"]:
                return "memory", taken
    return "timeout", taken


def finish(pid: int, mode: str) -> int:
    """Kill the program and all that it started; return its exit status (minus the signal that ended it)."""
    os.kill(pid, signal.SIGKILL)  # also of one that ended: it is not reaped yet, so the number is still its own
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if mode == "none":  # orphans became our children, and theirs will: until there is none left
        with contextlib.suppress(ChildProcessError):
            while True:
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
                os.waitpid(-1, 0)
    return status


def resident_bytes() -> int:
    """Return the memory of all processes of the sandbox, whose /proc we see too; 0 where it could not be mounted."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            total += int((folder / "statm").read_text().split()[1])
    return total * resource.getpagesize()


# ---------------------------------------------------------------- shutting in


def enter_namespaces(mode: str) -> None:
    """Put this process (and its next child) into new namespaces; OSError where the kernel does not let us."""
    if mode == "none":
        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        return
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if mode == "root":
        check(libc.unshare(flags), "unshare")
        return
    become_nobody()
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def become_the_program(spec: Spec, given: int, out: int, err: int, trouble: int) -> None:
    """Never returns: executes the program, or writes to `trouble` why it could not."""
    try:
        os.dup2(given, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.setsid()
        work = Path(spec["work"])
        if spec["mode"] != "none":
            mount_all(work, spec)
        elif os.geteuid() == 0:
            os.chown(work, NOBODY, NOBODY)
        os.chdir(work)
        Path("main.py").write_text(spec["program"])
        Path("main.py").chmod(0o444)
        become_nobody()
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # for a launcher that is killed itself
        set_limits(spec)
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8"}
        os.execve(spec["python"], [spec["python"], "-I", "-S", "-B", "main.py"], environment)
    except BaseException as error:
        os.write(trouble, repr(error).encode()[:4096])
    finally:
        os._exit(127)


def become_nobody() -> None:
    """Give up root for good; nothing to do for anybody else."""
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # or our own /proc/self/uid_map would be root's


def mount_all(work: Path, spec: Spec) -> None:
    """Make everything read-only, hide what is no program's business, and mount an empty folder at `work`."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    shielded = MS_NOSUID | MS_NODEV
    try:
        mount("proc", "/proc", "proc", shielded | MS_NOEXEC)
    except PermissionError:  # a container that masks parts of it; the outer one would show our environment
        mount("tmpfs", "/proc", "tmpfs", shielded, "size=4k")
    attributes = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    failed = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size)
    check(failed, "mount_setattr")
    for folder in spec["hidden"]:
        mount("tmpfs", folder, "tmpfs", shielded, "size=1m,mode=1777")
    work.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", str(work), "tmpfs", MS_NOSUID, "size=64k,mode=0755")
    for name in DEVICES:
        (work / name).touch()
        mount(f"/dev/{name}", str(work / name), "", MS_BIND)
    mount(str(work), "/dev", "", MS_MOVE)  # no graphics card, no terminal, no shared memory
    mount("tmpfs", str(work), "tmpfs", shielded, f"size={spec['file_bytes']},mode=1777")


def set_limits(spec: Spec) -> None:
    """Set the limits of each process; of all together are those on memory, time and output, which `watch` keeps."""
    seconds = int(spec["timeout_s"]) + 1
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, spec["memory_bytes"], spec["memory_bytes"]),
        (resource.RLIMIT_FSIZE, spec["file_bytes"], spec["file_bytes"]),
        (resource.RLIMIT_NPROC, spec["processes"], spec["processes"]),
        (resource.RLIMIT_NOFILE, spec["open_files"], spec["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2); OSError names the target."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def check(failed: int, what: str) -> None:
    """Raise the OSError of a C call that returned -1."""
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
