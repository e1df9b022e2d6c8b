"""Cause faults of the engines and of Ray in the middle of PPO on the small pipeline; see `campaigns.faults.small`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import psutil

from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.small import WORKER_TIMEOUT_S, Small
from pipelines.execution.executor import Silent
from rlhf_core.errors import WorkerLostError
from rlhf_core.runtime import liveness
from rlhf_core.runtime.ray_runtime import SHUTDOWN_TIMEOUT_S, STOP_TIMEOUT_S, RayRuntime

GONE_S = 10.0
"""Seconds for Ray to detect a dead process, and for this campaign to check."""
HANGS_S = liveness.SILENCES * (2 * liveness.PROBE_TIMEOUT_S + liveness.WATCH_EVERY_S) + GONE_S
"""Seconds to detect a hanging Ray server if the other server hangs, too."""
CLOSE_S = 3 * STOP_TIMEOUT_S + SHUTDOWN_TIMEOUT_S + 2 * liveness.KILL_WAIT_S


@cache
def _small(folder: Path) -> Small:
    """One warm run for all faults of a table."""
    place = folder / "engines"
    place.mkdir()
    return Small(place)


def _runtime(small: Small) -> RayRuntime:
    runtime = small.runtime._runtime
    assert isinstance(runtime, RayRuntime)
    return runtime


def _worker(small: Small, kind: str) -> psutil.Process:
    """The process of the first trainer or engine."""
    import ray

    group = {"trainer": _runtime(small)._train.get(""), "engine": _runtime(small)._sample}[kind]
    assert group is not None
    return psutil.Process(ray.get(group.actors[0].pid.remote(), timeout=60))


def _server(small: Small, name: str) -> psutil.Process:
    """The raylet or gcs_server process of the Ray that this process started."""
    children = psutil.Process(os.getpid()).children()
    return next(child for child in children if child.name() == name and child.status() != psutil.STATUS_ZOMBIE)


def _hit(find: Callable[[Small, str], psutil.Process], name: str, number: signal.Signals, folder: Path) -> Outcome:
    small = _small(folder)
    if not small.digests:
        small.digests = small.run(Silent())
    victim = find(small, name)
    # Workers can run without the servers for a while, and this stage takes only seconds.
    pause_s = 0.0 if find is _worker else GONE_S / 2 if number == signal.SIGKILL else HANGS_S / 2
    outcome = small.recover("ppo", 2, partial(victim.send_signal, number), pause_s=pause_s)
    _, alive = psutil.wait_procs([victim], timeout=GONE_S)
    if alive and alive[0].status() != psutil.STATUS_ZOMBIE:
        victim.kill()
        said = outcome.said if outcome.result == "not handled" else f"process {victim.pid} is left over"
        return Outcome("not handled", outcome.detect_s, outcome.recover_s, said)
    return outcome


def _killed_again_and_again(folder: Path) -> Outcome:
    """Kill the trainer early in every attempt: the run must end with one error, and then resume."""
    small = _small(folder)
    if not small.digests:
        small.digests = small.run(Silent())
    small.forget("ppo")
    stop = threading.Event()
    killer = threading.Thread(target=_kill_each_trainer, args=(stop,))
    killer.start()
    began = time.monotonic()
    said = ""
    try:
        small.run(Silent())
    except WorkerLostError as error:
        said = str(error)
    finally:
        stop.set()
        killer.join()
    took = time.monotonic() - began
    if not said:
        return Outcome("not handled", None, took, "the run ended as if nothing were wrong")
    same = small.run(Silent()) == small.digests
    return Outcome("one error" if same else "not handled", None, took, said)


def _kill_each_trainer(stop: threading.Event) -> None:
    """Kill every trainer worker as soon as it exists."""
    while not stop.wait(0.1):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::TrainWorke"):
                    process.kill()


def _hangs_at_the_end(folder: Path) -> Outcome:
    """Stop the trainer and the engine, then close the runtime: it must end without leftovers."""
    small = _small(folder)
    small.run(Silent())
    victims = [_worker(small, "trainer"), _worker(small, "engine")]
    for victim in victims:
        victim.suspend()
    began = time.monotonic()
    small.runtime.close()
    took = time.monotonic() - began
    _small.cache_clear()
    _, alive = psutil.wait_procs(victims, timeout=GONE_S)
    left = [victim.pid for victim in alive if victim.status() != psutil.STATUS_ZOMBIE]
    if left:
        return Outcome("not handled", took, None, f"processes {left} are left over")
    return Outcome("recovered", took, 0.0, "the run ended, and no process is left")


def _fault(name: str, deadline: float, find: Callable[[Small, str], psutil.Process], *what: object) -> Fault:
    return Fault(name, deadline, partial(_hit, find, *what))  # type: ignore[arg-type]


FAULTS: list[Fault] = [
    _fault("trainer worker killed", GONE_S, _worker, "trainer", signal.SIGKILL),
    _fault("vLLM engine killed", GONE_S, _worker, "engine", signal.SIGKILL),
    _fault("trainer worker hangs", WORKER_TIMEOUT_S + GONE_S, _worker, "trainer", signal.SIGSTOP),
    _fault("vLLM engine hangs", WORKER_TIMEOUT_S + GONE_S, _worker, "engine", signal.SIGSTOP),
    _fault("raylet killed", GONE_S, _server, "raylet", signal.SIGKILL),
    _fault("raylet hangs", HANGS_S, _server, "raylet", signal.SIGSTOP),
    _fault("Ray head killed", GONE_S, _server, "gcs_server", signal.SIGKILL),
    _fault("Ray head hangs", HANGS_S, _server, "gcs_server", signal.SIGSTOP),
    Fault("trainer worker killed in every try", GONE_S, _killed_again_and_again),
    Fault("workers hang when the run ends", CLOSE_S, _hangs_at_the_end),
]
