"""Identify this machine and its network, and check whether a process id still belongs to the same process."""

import getpass
import ipaddress
import os
import socket
from functools import lru_cache
from pathlib import Path

import psutil


@lru_cache(maxsize=1)
def here() -> tuple[str, str, str]:
    """Host name, boot id and process namespace: process ids are comparable only if all three agree."""
    boot_file = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot_file.read_text(encoding="utf-8").strip() if boot_file.exists() else ""
    namespace_file = Path("/proc/self/ns/pid")
    namespace = str(namespace_file.readlink()) if namespace_file.is_symlink() else ""
    return socket.gethostname(), boot_id, namespace


@lru_cache(maxsize=1)
def network() -> str:
    """An id of this process's network: 127.0.0.1 is the same place only for processes with the same id."""
    host, boot_id, _ = here()
    namespace_file = Path("/proc/self/ns/net")
    namespace = str(namespace_file.readlink()) if namespace_file.is_symlink() else ""
    return f"{boot_id or host} {namespace}"


def user_name() -> str:
    """The user who runs this process, as runs and decisions name them: `RLHF_USER`, else the login name."""
    given = os.environ["RLHF_USER"].strip() if "RLHF_USER" in os.environ else ""
    if given:
        return given
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return f"user {os.getuid()}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads only to this machine.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "192.0.2.1")]
    [True, True, False]
    """
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def interface_towards(host: str) -> str:
    """The network interface by which this machine reaches `host`, or "" if it is unknown.

    >>> interface_towards("127.0.0.1")
    'lo'
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    there = psutil.net_if_addrs().items()
    return next((name for name, places in there if any(own == place.address.partition("%")[0] for place in places)), "")


def process_state(pid: int, started: int) -> str:
    """The state of the process with id `pid` and start time `started`: `alive`, `stopped` or `gone`."""
    if not Path("/proc/self/stat").exists():
        return _process_state_by_signal(pid)
    found = process_stat(pid)
    if found is None or found[1] != started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "alive"


def process_stat(pid: int) -> tuple[str, int] | None:
    """Read state letter and start time from /proc (see proc_pid_stat(5), fields 3 and 22)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name may contain spaces and brackets
    return fields[0], int(fields[19])


def is_running(pid: int) -> bool:
    """Whether any process of this machine has the id `pid`."""
    if Path("/proc/self/stat").exists():
        return process_stat(pid) is not None
    return _process_state_by_signal(pid) == "alive"


def _process_state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "alive"
    return "alive"
