"""Joining or starting Ray, and the environment of our workers."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil

from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.errors import ConfigError, explain

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
START_ATTEMPTS = 2
"""On a machine that is busy, Ray's processes may miss each other's deadlines."""
OBJECT_STORE_FRACTION = 0.1
"""Share of the machine's memory that weights on their way may take; Ray's own default is 0.3."""
SMALLEST_OBJECT_STORE = 256 << 20
HTTP2_SETTINGS = 4
HTTP2_FRAME_HEADER = 9
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0))
"""What a client sends first (RFC 9113, 3.4); the server answers with a settings frame of its own."""


def connect(cores: int) -> bool:
    """Join the Ray of `RAY_ADDRESS`, or start one on this machine. Return whether we started it (and must stop it).

    Raises ConfigError within seconds if no Ray head answers at `RAY_ADDRESS`.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Without this Ray blanks CUDA_VISIBLE_DEVICES only with a warning on every start.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    address = named_address()
    import ray

    if ray.is_initialized():
        return False
    if not address:
        _in_lasting_thread(lambda: _start(cores))
        return True
    check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_head(address) from error
    return False


def named_address() -> str:
    """Return the `RAY_ADDRESS` to join, "" to start a Ray of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def check_address(address: str) -> None:
    """Raise ConfigError, within seconds, unless something that may be a Ray head answers at `address`."""
    if address.startswith("ray://"):
        rule, remedy = "the Ray client protocol is not supported", "use the head's address, host:6379"
        raise ConfigError(explain("RAY_ADDRESS", address, rule, remedy))
    if address not in ("", "auto"):
        _probe(address)


def worker_environment(*, threads: int) -> dict[str, str]:
    """Return the environment variables of a worker process.

    Trainer and sampler take turns on the same cores, so idle OpenMP threads must sleep instead of spinning.
    """
    spec = importlib.util.find_spec("rlhf_core")
    if spec is None or spec.origin is None:
        raise ConfigError(explain("rlhf_core", None, "is not importable", "install the package"))
    root = str(Path(spec.origin).parents[1])
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return {
        "PYTHONPATH": os.pathsep.join([root, *inherited]),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(config: RuntimeConfig, *, workers: int) -> int:
    """Return `cpu_threads`, or an equal share of the cores for each of the `workers` that compute at the same time."""
    return config.cpu_threads or max(1, available_cores() // workers)


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def own_gpus() -> list[str]:
    """Return the GPUs that Ray gave to the calling worker, as `node:index`."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return [f"{node}:{gpu}" for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def _in_lasting_thread(start: Callable[[], object]) -> None:
    """Call `start` in a thread that outlives it: Linux kills Ray's processes with the *thread* that made them."""
    started: Future[object] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="ray-parent", daemon=True).start()
    started.result()


def _start(cores: int) -> None:
    import ray
    from ray._private import ray_constants

    # A Ray of our own serves this machine alone: its processes listen on 127.0.0.1. They read the variable; this
    # process may have imported ray, and read it, long ago.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    # Unix sockets live below it and may be 107 characters long, so TMPDIR does not decide.
    folder = Path("/tmp" if os.name == "posix" else tempfile.gettempdir()) / f"rlhf-ray-{os.getuid()}"
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=cores,
                object_store_memory=max(
                    SMALLEST_OBJECT_STORE, int(psutil.virtual_memory().total * OBJECT_STORE_FRACTION)
                ),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                # Our actors have an environment of their own, so workers that Ray starts ahead would never be used.
                # Ray would let its workers give way to every other process, but here they are what all else waits for.
                _system_config={
                    "prestart_worker_first_driver": False,
                    "enable_metrics_collection": False,
                    "worker_niceness": 0,
                },
            )
            return
        except Exception as error:  # Ray raises plain Exception when its processes are slow to answer
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                rule = f"Ray could not start: {error}"
                remedy = f"look into {folder}/session_latest/logs, or free memory and cores"
                raise ConfigError(explain("runtime.type", "ray", rule, remedy)) from error
            logger.warning("Ray did not start (%s); trying once more", error)


def _probe(address: str) -> None:
    """Raise ConfigError unless a gRPC server answers: Ray itself would wait for minutes, for one behind any open port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(HTTP2_FRAME_HEADER)
    except (OSError, ValueError, OverflowError) as error:
        raise _no_head(address) from error
    if len(answer) < HTTP2_FRAME_HEADER or answer[3] != HTTP2_SETTINGS:
        raise _no_head(address)


def _no_head(address: str) -> ConfigError:
    return ConfigError(f"RAY_ADDRESS = {address}: no Ray head answers; start one with `ray start --head` or unset it")
