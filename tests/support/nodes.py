"""Nodes on this machine, for tests: each has its own network address and its own `/tmp`, where all that a run writes lies.

They see no folder of each other's; only the code is common, as if it were installed on each.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.forks import soon

ROOT = Path(__file__).parents[2]
RAY_PORT = 6379
_HOLD = (
    "mount --bind {own} /tmp && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready && exec sleep infinity"
)


@dataclass(frozen=True)
class Node:
    """A node; `own` is its `/tmp`, as this process sees it."""

    address: str
    own: Path
    holder: int
    environment: Mapping[str, str]

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process on the node, whose output goes to `log`."""
        inside = ["nsenter", "--target", str(self.holder), "--net", "--mount", f"--wd={ROOT}", *command]
        ours = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        homes = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "RLHF_CACHE": "/tmp/cache", "RLHF_HOME": "/tmp/rlhf"}
        with log.open("ab") as out:
            return subprocess.Popen(
                inside,
                env=ours | homes | self.environment | environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start_ray(self, log: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a node of Ray, and return when it is up."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        place = [f"--node-ip-address={self.address}", "--num-cpus=4", "--object-store-memory=200000000"]
        process = self.start([*command, *place, *options], log, RAY_AUTH_MODE="disabled")
        soon(lambda: process.poll() is not None or b"Ray runtime started" in log.read_bytes(), within_s=120)
        assert process.poll() is None, log.read_text()
        return process

    def processes(self) -> list[psutil.Process]:
        """Return the processes on the node."""
        net = _network(self.holder)
        return [process for process in psutil.process_iter() if net and _network(process.pid) == net]


@contextmanager
def network(folder: Path, names: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, list[Node]]]:
    """Yield the address of this process in a network of nodes, and these; skip where that is not permitted."""
    link = f"rl{os.getpid() % 100000}"
    subnet = f"10.{88 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    _need(["ip", "link", "add", link, "type", "bridge"])
    holders: list[subprocess.Popen[str]] = []
    nodes: list[Node] = []
    try:
        _do("ip", "addr", "add", f"{subnet}.1/24", "dev", link)
        _do("ip", "link", "set", link, "up")
        for number, name in enumerate(names):
            own = folder / name
            (own / "home").mkdir(parents=True)
            hold = ["unshare", "--net", "--mount", "--propagation=private", "sh", "-c", _HOLD.format(own=own)]
            holders.append(subprocess.Popen(hold, stdout=subprocess.PIPE, text=True))
            said = holders[-1].stdout
            assert said is not None
            if said.readline() != "ready\n":
                pytest.skip("namespaces of mounts and networks are not permitted here")
            pid, address, end = holders[-1].pid, f"{subnet}.{number + 2}", f"{link}n{number}"
            _do("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _do("ip", "link", "set", end, "master", link, "up")
            for command in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _do("nsenter", "--target", str(pid), "--net", "ip", *command)
            nodes.append(Node(address, own, pid, environment))
        yield f"{subnet}.1", nodes
    finally:
        for process in [process for node in nodes for process in node.processes()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for holder in holders:
            holder.kill()
            holder.wait()
        subprocess.run(["ip", "link", "del", link], check=False)


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _need(command: list[str]) -> None:
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing or os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"needs root, networks of its own{''.join(f', {name}' for name in missing)}")


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
