"""Check the address of Ray, and choose the environment and threads of its workers. Works without importing Ray."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import idle_threads
from rlhf_core.runtime.liveness import greet

SEE_NO_GPU = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Variable with which Ray gives an empty CUDA_VISIBLE_DEVICES to a worker without GPUs. Otherwise the worker sees the
GPUs of its node, which may be another run's."""
KERNEL_CHOICES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that pin torch's math libraries to an instruction set; read when the libraries load."""


def named_address() -> str:
    """The `RAY_ADDRESS` to join, or "" to start our own Ray."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def check_ray_address(address: str) -> None:
    """Raise ConfigError within seconds unless a server that may be a Ray head answers at `address`."""
    if address.startswith("ray://"):
        rule, remedy = "the Ray client protocol is not supported", "use the head's address, host:6379"
        raise ConfigError("RAY_ADDRESS", address, rule, remedy)
    if address not in ("", "auto"):
        try:
            greet(address)  # Ray itself would wait for minutes on any open port
        except (OSError, ValueError) as error:
            raise no_head(address) from error


def worker_environment(*, threads: int) -> dict[str, str]:
    """Environment variables of a worker process.

    Workers of a Ray at `RAY_ADDRESS` inherit the environment of its nodes. The variables that choose the math
    kernels, and therefore how results are rounded, are passed on from this process.
    """
    spec = importlib.util.find_spec("rlhf_core")
    if spec is None or spec.origin is None:
        raise ConfigError("rlhf_core", None, "is not importable", "install this package")
    root = str(Path(spec.origin).parents[1])
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return {
        "PYTHONPATH": os.pathsep.join([root, *inherited]),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **idle_threads(),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        SEE_NO_GPU: "1",
        **{name: os.environ[name] for name in KERNEL_CHOICES if name in os.environ},
    }


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of memory that this process may use: the machine's, or the smallest limit of its control groups if that is lower."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([memory, *_limits(proc, root)])


def threads_per_worker(config: RuntimeConfig, *, cores: int) -> int:
    """`cpu_threads`, or the worker's share of the cores of its node, but at least one thread."""
    return config.cpu_threads or max(1, cores)


def trainer_versions(config: TrainerConfig) -> dict[str, str]:
    """Map name -> version of the training libraries: torch, transformers and, if it is the engine, DeepSpeed."""
    engines = ("deepspeed",) if config.engine == "deepspeed" else ()
    return {name: version(name) for name in ("torch", "transformers", *engines)}


def free_port() -> int:
    """Find a TCP port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def no_head(address: str) -> ConfigError:
    """The error for an `address` where no Ray head answers."""
    return ConfigError(f"RAY_ADDRESS = {address}: no Ray head answers; start one with `ray start --head` or unset it")


def _limits(proc: Path, root: Path) -> Iterator[float]:
    """Yield the memory limits of the control groups in `proc`, and of those around them."""
    for line in proc.read_text(encoding="utf-8").splitlines() if proc.is_file() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if folder.is_relative_to(top) and file.is_file():
                limit = file.read_text(encoding="ascii").strip()
                if limit != "max":
                    yield float(limit)
