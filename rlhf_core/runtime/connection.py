"""Join or start Ray, and check in a worker that it computes on the GPUs that Ray reserved for it."""

import contextlib
import gc
import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc  # type: ignore[import-untyped]

from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.processes.private_folder import private_folder
from rlhf_core.runtime.cluster import available_memory, check_ray_address, named_address, no_head
from rlhf_core.runtime.liveness import PROBE_TIMEOUT_S, CallHangs, within
from rlhf_core.runtime.ray_settings import VARIABLES, ray

logger = logging.getLogger(__name__)
T = TypeVar("T")

START_ATTEMPTS = 3
"""Attempts to start Ray. On a busy machine Ray's processes may miss each other's deadlines, which cannot be changed."""
OBJECT_STORE_FRACTION = 0.1
"""Share of the machine's memory for weights in transit; Ray's own default is 0.3."""
SMALLEST_OBJECT_STORE = 256 << 20  # bytes; a bucket of weights is 2^28
NEW_OBJECTS = 50_000
"""New objects after which Python looks for cycles among them. With its default, 700 or 2,000, a step of 8,000 answers makes
it visit all objects of the process, most of them of torch and other libraries, which takes longer than to receive them.
"""
CONNECT_TIMEOUT_S = 300.0
"""Time limit for starting or joining Ray, which starts about six processes, perhaps on a very busy machine."""
RECONNECT_TIMEOUT_S, RECONNECT_EVERY_S = 120.0, 2.0
"""Seconds to wait for a lost head at `RAY_ADDRESS`."""


def connect(cores: int) -> bool:
    """Join the Ray of `RAY_ADDRESS`, or start one on this machine. Return whether we started it (and must stop it).

    Raises ConfigError within seconds if no Ray head answers at `RAY_ADDRESS`, WorkerLostError if Ray does not come up
    within CONNECT_TIMEOUT_S.
    """
    os.environ.update(VARIABLES)  # for the processes that Ray starts; this process had them when it imported Ray
    gc.set_threshold(NEW_OBJECTS)
    address = named_address()
    if ray.is_initialized():
        return False
    if not address:
        in_lasting_thread(lambda: _start(cores), what="starting Ray", timeout_s=CONNECT_TIMEOUT_S)
        return True
    check_ray_address(address)
    in_lasting_thread(lambda: _join(address), what=f"joining {address}", timeout_s=CONNECT_TIMEOUT_S)
    return False


def connect_again(cores: int) -> bool:
    """Reconnect like `connect` after Ray was lost: a head at `RAY_ADDRESS` has RECONNECT_TIMEOUT_S to come back."""
    return until_possible(lambda: connect(cores), timeout_s=RECONNECT_TIMEOUT_S)


def until_possible(call: Callable[[], T], *, timeout_s: float) -> T:
    """Call `call()`, repeated every RECONNECT_EVERY_S while it raises ConfigError, for at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RECONNECT_EVERY_S)


def servers() -> dict[str, str]:
    """Map name -> host:port of the two Ray servers that this process talks to: the head and a raylet."""
    node = ray._private.worker.global_worker.node
    return {"the Ray head": node.gcs_address, "the raylet": f"{node.node_ip_address}:{node.node_manager_port}"}


def in_lasting_thread(start: Callable[[], object], *, what: str, timeout_s: float) -> None:
    """Call `start` in a thread that lasts as long as this process; WorkerLostError if it takes longer than `timeout_s`."""
    try:
        within(timeout_s, start, lasting=True)
    except CallHangs as error:
        rule = f"not finished within {timeout_s:g} s"
        raise WorkerLostError("Ray", what, rule, "check Ray and its machines") from error


def asks_for_token(address: str) -> bool:
    """Whether the Ray head at `address` refuses callers without a token; False if none is named or answers."""
    if ":" not in address:  # `auto`
        return False
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def keep_token_private() -> None:
    """Make Ray's token readable by this user only: a process that has it can run commands as this user, on any port of Ray.

    Ray creates the file readable by everybody, which matters if others may enter the home folder. Raises ConfigError if
    the file cannot be made private.
    """
    of_the_user = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if of_the_user or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        if not path.exists():
            _make_token(path)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        rule = f"cannot be hidden from other users ({error.strerror})"
        remedy = "make it a file that you own, or set RAY_AUTH_TOKEN_PATH to one"
        raise ConfigError("Ray's token", str(path), rule, remedy) from error


def _make_token(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".token-")  # mode 0600
    os.close(descriptor)
    made = Path(name)
    made.write_text(secrets.token_hex(32), encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # another process was faster
        path.hardlink_to(made)
    made.unlink()


def _join(address: str) -> None:
    # A head requires the user's token as soon as one exists (each Ray that we start creates it), but Ray sends it to a
    # named address only when told to. It must not always be sent: a process that sends tokens also requires them, and
    # then the workers of a head without tokens could not call this process.
    if asks_for_token(address):
        ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available(
            warn_if_disabled=False
        )
    try:
        with _without_error_listener():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise no_head(address) from error


def ray_folder() -> Path:
    """The folder of a Ray started here: Ray opens it to everybody (0777), so it is in a folder that only we may enter.

    Unix sockets are created below it and their paths are limited to 107 characters, so TMPDIR is ignored.
    """
    return private_folder(Path("/tmp") / f"rlhf-ray-{os.getuid()}") / "ray"


def _start(cores: int) -> None:
    folder = ray_folder()
    keep_token_private()
    for attempt in range(START_ATTEMPTS):
        try:
            with _this_machine_alone(), _out_of_the_terminal(), _without_unused_processes(), _without_error_listener():
                ray.init(
                    address="local",
                    num_cpus=cores,
                    object_store_memory=max(SMALLEST_OBJECT_STORE, int(available_memory() * OBJECT_STORE_FRACTION)),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                    # Our actors have separate environments, so workers that Ray starts ahead would never be used.
                    # By default Ray's workers give way to other processes, but here everything else waits for them.
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
                remedy = f"see the logs in {folder}/session_latest/logs, or free memory and cores"
                raise ConfigError("runtime.type", "ray", rule, remedy) from error
            logger.warning("Ray did not start (%s); trying again", error)


@contextmanager
def _out_of_the_terminal() -> Iterator[None]:
    """Let processes started inside survive a closed terminal: they end with this process, after it has saved."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Make a Ray started inside leave out two processes, which take 1.5 CPU seconds and 115 MB.

    An autoscaler has nothing to do on one machine, and the log monitor sends lines to drivers that show them; ours do not.
    `ray start` has options for both, `ray.init` has none.
    """
    parameter = ray._private.parameter
    before = parameter.RayParams
    parameter.RayParams = partial(before, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = before


@contextmanager
def _without_error_listener() -> Iterator[None]:
    """Make a driver that connects inside run without the thread that prints errors of the cluster; ours are raised.

    `ray.shutdown` closes the subscription while that thread polls it. After the loss of a head this ended the whole
    process with SIGSEGV.
    """
    worker = ray._private.worker
    before = worker.listen_error_messages
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = before


@contextmanager
def _this_machine_alone() -> Iterator[None]:
    """Make a Ray started inside listen on 127.0.0.1. Undone at the end, as a later `ray start` must not inherit it."""
    ray_constants = ray._private.ray_constants
    name, enabled = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.pop(name, None)
    os.environ[name] = "0"  # for Ray's processes; this process may have read it long ago, when it imported ray
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


# ---------------------------------------------------------------- the GPUs of a worker

NODE_CHARACTERS = 8
"""Number of characters shown of a Ray node id, which has 56."""


def own_gpus() -> list[str]:
    """The GPUs that Ray gave to the calling worker, as `node:index`."""
    node = ray.get_runtime_context().get_node_id()
    return [f"{node}:{gpu}" for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def check_gpus(key: str, value: float, reserved: Sequence[str], *, built_for: str = "") -> None:
    """Raise ConfigError if `reserved` GPUs (as `node:index`) would idle while this worker computes on the CPU.

    `built_for` is the platform of the worker's engine if the engine does not use torch's. Every worker of `key` calls
    this before it loads a model.
    """
    import torch  # is for workers; the driver imports this module too

    if not reserved:
        return
    blind = "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
    if built_for == "cpu":
        blind = "vLLM was built for CPUs"
    if blind:
        rule = f"Ray reserved GPU {', '.join(_short(gpu) for gpu in reserved)}, but {blind}"
        raise ConfigError(key, value, rule, "install the GPU build of torch (and vLLM) and the driver, or set it to 0")


def _short(gpu: str) -> str:
    node, _, index = gpu.rpartition(":")
    return f"{node[:NODE_CHARACTERS]}:{index}"
