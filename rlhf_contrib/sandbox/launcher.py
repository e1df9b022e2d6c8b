"""The process that `rlhf_contrib.sandbox.local` starts: isolates itself, runs a Python program and reports its end.

It is run by path with `python -I -S`, so it uses only the standard library. It reads one line of JSON and writes one
JSON object. Its standard input stays open; end of file means that the caller has ended, and the program is killed.

Isolation depends on `mode`, see user_namespaces(7) and mount_setattr(2): `user` uses new user, mount, network, process
and IPC namespaces; `root` uses the same ones without the user namespace; `none` sets only resource limits. If started
as root, the process switches to user nobody. In a process namespace the program has pid 1, so the kernel kills all of
its descendants when it ends, however they forked. Its root is an in-memory folder with the interpreter and its
libraries. System calls that a program does not need are denied, see seccomp(2): calls that keep memory which no process
has mapped, create namespaces or mounts, or inspect other processes.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOBODY = 65534  # the user without rights, by convention
LOOKS_EVERY_S = 0.02
"""Seconds between two checks of the total memory of all processes."""
START = """import builtins as b, sys as s, _sitebuiltins as q
b.exit, b.quit, s.argv = q.Quitter("exit", ""), q.Quitter("quit", ""), ["main.py"]
del b, s, q
__file__ = "main.py"
exec(compile(open(__file__, "rb").read(), __file__, "exec"))"""
"""Runs the program with `exit` and `quit`, which Python defines in `site`; that module exposes installed packages."""
DEVICES = ("null", "zero", "random", "urandom")

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1  # one number on every machine

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_KILL, SECCOMP_ERRNO, SECCOMP_ALLOW = 22, 2, 0x80000000, 0x50000, 0x7FFF0000
MNT_DETACH = 2  # sys/mount.h
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its seccomp architecture, and its column in `SYSTEM_CALLS`."""
SYSTEM_CALLS = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "clone3": (435, 435),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "vmsplice": (278, 75),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""Denied system calls: numbers on x86_64 and on aarch64. C libraries fall back to `clone` if `clone3` is missing."""
CLONE, PRCTL, SOCKET, FCNTL, SETSOCKOPT = (56, 220), (157, 167), (41, 198), (72, 25), (54, 208)
F_SETPIPE_SZ, PIPE_BYTES = 1031, 0x10000
BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both by force
ADDRESS_FAMILIES = (1, 2, 10, 16)
"""Sockets between processes, of IPv4 and IPv6 (unreachable in a network namespace), and of netlink. Others, such as
AF_VSOCK, could lead out of a virtual machine.
"""
X32 = 0x40000000
"""Numbers from here on belong to the x32 table of x86_64."""

libc = ctypes.CDLL(None, use_errno=True)
with socket.socket(socket.AF_UNIX) as probe:
    SOCKET_BYTES = sum(probe.getsockopt(socket.SOL_SOCKET, size) for size in (socket.SO_SNDBUF, socket.SO_RCVBUF))
Spec = dict[str, Any]


class Instruction(ctypes.Structure):
    """`struct sock_filter`: one instruction of a Berkeley Packet Filter program."""

    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Instruction))]


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def main() -> None:
    """Run the request on standard input."""
    spec: Spec = json.loads(sys.stdin.buffer.readline())
    try:
        enter_namespaces(spec["mode"])
        answer = run(spec)
    except OSError as error:
        answer = {"outcome": "refused", "detail": f"{error}"}
    sys.stdout.write(json.dumps(answer))


def run(spec: Spec) -> dict[str, Any]:
    """Start the program, watch it, and report its outcome, exit status, standard output and standard error."""
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
    """Watch the program; returns why watching ended (finished, timeout, stalled, memory, output) and the output."""
    deadline = time.monotonic() + spec["wall_s"]
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
            if spec["mode"] != "none" and used_bytes() > spec["memory_bytes"]:
                return "memory", taken
            if used_seconds(spec["mode"]) > spec["timeout_s"]:
                return "timeout", taken
    return "stalled", taken


def finish(pid: int, mode: str) -> int:
    """Kill the program and all processes that it started; returns its exit status (minus the signal that ended it)."""
    os.kill(pid, signal.SIGKILL)  # also if it has ended: it is not reaped yet, so the pid is not reused
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if mode == "none":  # orphans become our children; repeat until none is left
        with contextlib.suppress(ChildProcessError):
            while True:
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
                    os.kill(int(child), signal.SIGKILL)
                os.waitpid(-1, 0)
    return status


def used_bytes() -> int:
    """Memory of all processes of the sandbox, whose /proc is visible here; 0 if /proc could not be mounted.

    Shared memory counts once and in full, because a process may hold pages that another one filled before it ended. The
    capacity of pipe and socket buffers counts, too, including sockets in transit between processes.
    """
    own, shared, sockets = 0, dict[str, int](), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            place, (_, resident, of_files_or_shared, *_) = sizes(folder)
            own += resident - of_files_or_shared
            for line in (place / "maps").read_text(encoding="utf-8").splitlines():
                span, rights, offset, *which = line.split()[:5]
                if rights[3] == "s":
                    start, end = (int(bound, 16) for bound in span.split("-"))
                    shared[str(which)] = max(shared.get(str(which), 0), int(offset, 16) + end - start)
            links = (str(link.readlink()) for link in (place / "fd").iterdir())
            shared |= {link: PIPE_BYTES for link in links if link.startswith("pipe:")}
            sockets = int((place / "net/sockstat").read_text(encoding="utf-8").split()[2])  # of their network namespace
    return own * resource.getpagesize() + sum(shared.values()) + sockets * SOCKET_BYTES


def used_seconds(mode: str) -> float:
    """CPU time of the program and all processes that it started, except of children that were not waited for."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*") if mode != "none" else descendants("self"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime of proc_pid_stat(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: str) -> Iterator[Path]:
    """Yield the /proc folders of all descendants of a process."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in listed.read_text(encoding="utf-8").split():
                yield Path("/proc") / child
                yield from descendants(child)


def sizes(process: Path) -> tuple[Path, list[int]]:
    """Page counts and /proc folder of a process; if its first thread has ended, the folder of another thread."""
    for folder in (process, *(process / "task").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            pages = [int(part) for part in (folder / "statm").read_text(encoding="utf-8").split()]
            if pages[1]:
                return folder, pages
    return process, [0, 0, 0]


# ---------------------------------------------------------------- shutting in


def enter_namespaces(mode: str) -> None:
    """Move this process (and its next child) into new namespaces; OSError if the kernel does not permit it."""
    if mode == "none":
        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        return
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if mode == "root":
        check(libc.unshare(flags), "unshare")
        return
    drop_rights()
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")


def become_the_program(spec: Spec, given: int, out: int, err: int, trouble: int) -> None:
    """Execute the program, or write the reason for a failure to `trouble`. Never returns."""
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
        Path("main.py").write_text(spec["program"], encoding="utf-8")
        Path("main.py").chmod(0o444)
        drop_rights()
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # for a launcher that is killed itself
        set_limits(spec)
        deny_system_calls()
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8"}
        os.execve(spec["python"], [spec["python"], "-I", "-S", "-B", "-c", START, "main.py"], environment)
    except BaseException as error:
        os.write(trouble, repr(error).encode()[:4096])
    finally:
        os._exit(127)


def drop_rights() -> None:
    """Give up root permanently; no-op for other users."""
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # otherwise /proc/self/uid_map would belong to root


def mount_all(work: Path, spec: Spec) -> None:
    """Change the root to a read-only, in-memory folder with the paths in `visible`, and an empty folder at `work`."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    shielded = MS_NOSUID | MS_NODEV
    mount("tmpfs", str(work), "tmpfs", MS_NOSUID, "size=256k,mode=0755")  # the new root, around the program's folder
    for path in spec["visible"]:
        show(Path(path), work)
    (work / "proc").mkdir()
    with contextlib.suppress(PermissionError):  # a container masks parts of it, and then there is none
        mount("proc", str(work / "proc"), "proc", shielded | MS_NOEXEC)
    (work / "dev").mkdir()
    for name in DEVICES:  # no graphics card, no terminal, no shared memory
        (work / "dev" / name).touch()
        mount(f"/dev/{name}", str(work / "dev" / name), "", MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (work / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    place = work / work.relative_to("/")
    place.mkdir(parents=True)
    attributes = MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    failed = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, str(work).encode(), AT_RECURSIVE, ctypes.byref(attributes), size)
    check(failed, "mount_setattr")
    mount("tmpfs", str(place), "tmpfs", shielded, f"size={spec['file_bytes']},nr_inodes=4096,mode=1777")
    os.chdir(work)
    check(libc.syscall(SYSTEM_CALLS["pivot_root"][machine()[1]], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount2")  # the old root, which is mounted over the new one
    os.chdir("/")


def show(path: Path, root: Path) -> None:
    """Make a file or folder of this machine visible under the new root; links stay links."""
    place = root / path.relative_to("/")
    if place.exists() or place.is_symlink():
        return  # it lies in a folder that is already visible
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        place.symlink_to(path.readlink())
        return
    if path.is_dir():
        place.mkdir()
    else:
        place.touch()
    mount(str(path), str(place), "", MS_BIND | MS_REC)


def machine() -> tuple[int, int]:
    """The seccomp architecture of this machine and its column of system call numbers; OSError if unknown."""
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(errno.ENOSYS, f"the system calls of {name} are unknown")
    return MACHINES[name]


def deny_system_calls() -> None:
    """Make the kernel deny `SYSTEM_CALLS` and the creation of namespaces with EPERM from now on.

    clone3 fails with ENOSYS, because its flags are in memory that no filter can read.
    """
    architecture, column = machine()
    load, equal, at_least, any_of, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture_at, first, second, third = 0, 4, 16, 24, 32
    namespaces = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
    refused, unsupported = SECCOMP_ERRNO | errno.EPERM, SECCOMP_ERRNO | errno.EAFNOSUPPORT
    steps = [
        (load, 0, 0, architecture_at),
        (equal, 1, 0, architecture),
        (answer, 0, 0, SECCOMP_KILL),
        (load, 0, 0, number),
        (at_least, 0, 1, X32),
        (answer, 0, 0, refused),
    ]
    for name, numbers in SYSTEM_CALLS.items():
        error = errno.ENOSYS if name == "clone3" else errno.EPERM
        steps += [(equal, 0, 1, numbers[column]), (answer, 0, 0, SECCOMP_ERRNO | error)]
    for call, argument, test, values, found, otherwise in (
        (CLONE, first, any_of, (namespaces,), refused, SECCOMP_ALLOW),
        (PRCTL, first, equal, (PR_SET_PDEATHSIG,), refused, SECCOMP_ALLOW),  # it must not outlive its launcher
        (SOCKET, first, equal, ADDRESS_FAMILIES, SECCOMP_ALLOW, unsupported),
        (FCNTL, second, equal, (F_SETPIPE_SZ,), refused, SECCOMP_ALLOW),
        (SETSOCKOPT, third, equal, BUFFER_SIZES, refused, SECCOMP_ALLOW),
    ):
        steps += [(equal, 0, len(values) + 3, call[column]), (load, 0, 0, argument)]
        steps += [(test, len(values) - at, int(at == len(values)), value) for at, value in enumerate(values, start=1)]
        steps += [(answer, 0, 0, found), (answer, 0, 0, otherwise)]
    steps.append((answer, 0, 0, SECCOMP_ALLOW))
    table = (Instruction * len(steps))(*(Instruction(*step) for step in steps))
    program = Filter(len(steps), table)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def set_limits(spec: Spec) -> None:
    """Set the limits of each process. Limits on the total of memory, CPU time and output are enforced by `watch`."""
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
    """Call mount(2); OSError names the target."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def check(failed: int, what: str) -> None:
    """Raise the OSError of a C call that returned -1."""
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
