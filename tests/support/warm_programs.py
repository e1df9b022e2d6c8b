"""Runs programs of tests as forks of a process that has imported an engine: 7 CPU seconds for DeepSpeed, 9 for vLLM.

The parent of an engine starts on first use, and ends with the tests that share it (`tests/support/sharing.py`). A fork
runs the program as `python PROGRAM ARGUMENTS` does, with a separate environment, output and process id. Off Linux every
program is a fresh process.

`python -m tests.support.warm_programs ENGINE DESCRIPTOR` is such a parent. It answers each request with the process id
of a fork, and sends the process id and status of each fork that has ended.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_core.processes.large_imports import large_imports
from rlhf_core.runtime.cluster import KERNEL_CHOICES

ROOT = Path(__file__).parents[2]
Engine = Literal["deepspeed", "vllm"]
READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *KERNEL_CHOICES)
"""Variables that libraries read when they are loaded. Programs with other values have another parent."""
LOOK_EVERY_S = 0.02
"""Seconds between two looks of a parent for forks that have ended."""


class EngineProgram(Protocol):
    """A running program: the part of `subprocess.Popen[str]` that the tests use."""

    returncode: int | None

    def communicate(self, *, timeout: float) -> tuple[str, str]: ...

    def kill(self) -> None: ...


def start_program(
    engine: Engine, words: Sequence[object], environment: Mapping[str, str], folder: Path
) -> EngineProgram:
    """Start `python *words` with the modules of `engine` imported; the `folder` is for its output."""
    if sys.platform != "linux":
        return fresh_program(words, environment, folder)
    key = (engine, tuple(environment.get(name) for name in READ_AT_IMPORT))
    if key not in _parents:
        _parents[key] = _EngineParent(engine, environment)
    folder.mkdir(parents=True)
    return _ForkedProgram(_parents[key], [str(word) for word in words], environment, folder)


def fresh_program(words: Sequence[object], environment: Mapping[str, str], folder: Path) -> EngineProgram:
    """Start `python *words` in a process that imports everything itself."""
    command = [sys.executable, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)


def end_parents() -> None:
    """End all parents, whose memory a later test may need; programs that still run continue."""
    while _parents:
        _parents.popitem()[1].end()


class _ForkedProgram:
    """An `EngineProgram` that a parent has forked."""

    def __init__(self, parent: "_EngineParent", words: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self.returncode: int | None = None
        self._parent = parent
        self._files = [folder / name for name in ("output", "errors")]
        self._pid = parent.fork(words, environment, self._files)

    def communicate(self, *, timeout: float) -> tuple[str, str]:
        self.returncode = self._parent.status(self._pid, timeout)
        output, errors = (file.read_text(encoding="utf-8") for file in self._files)
        return output, errors

    def kill(self) -> None:
        if self.returncode is None:
            self._parent.kill(self._pid)


class _EngineParent:
    """A parent, as the tests see it: it ends when this end of its connection is closed, at the latest with this process."""

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "tests.support.warm_programs", engine, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=(theirs.fileno(),))
        self._ended: dict[int, int] = {}

    def fork(self, words: list[str], environment: Mapping[str, str], files: Sequence[Path]) -> int:
        """Start a program; return its process id."""
        self._connection.send((words, dict(environment), str(Path.cwd()), [str(file) for file in files]))
        while True:
            pid, status = self._connection.recv()
            if status is None:
                return int(pid)
            self._ended[pid] = status

    def status(self, pid: int, timeout: float) -> int:
        """Exit status of a program, minus a signal. TimeoutExpired if it runs for more than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while pid not in self._ended:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired(str(pid), timeout)
            ended, status = self._connection.recv()
            self._ended[ended] = status
        return self._ended[pid]

    def kill(self, pid: int) -> None:
        """End a program if it still runs, which the parent knows."""
        self._connection.send(pid)

    def end(self) -> None:
        self._connection.close()
        self._process.wait()


_parents: dict[Any, _EngineParent] = {}
"""Engine and values of READ_AT_IMPORT -> its parent."""


# ---------------------------------------------------------------- the parent


def main(engine: str, connection: Connection) -> None:
    """Import the engine and fork programs until the connection ends. Returns in a fork, whose program is in `sys.argv`."""
    with large_imports():
        _import(engine)
    forks: set[int] = set()
    while True:
        try:
            request = connection.recv() if connection.poll(LOOK_EVERY_S if forks else None) else None
        except EOFError:
            os._exit(0)
        if isinstance(request, int):
            if request in forks:
                os.kill(request, signal.SIGKILL)
        elif request is not None:
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(*request)
                return
            forks.add(pid)
            connection.send((pid, None))
        for pid, status in [os.waitpid(fork, os.WNOHANG) for fork in forks]:
            if pid:
                forks.remove(pid)
                connection.send((pid, os.waitstatus_to_exitcode(status)))


def _import(engine: str) -> None:
    if engine == "vllm":
        from rlhf_core.config.runtime import VllmSamplerConfig
        from rlhf_core.sampling.vllm_sampler import import_vllm

        import_vllm(VllmSamplerConfig(), threads=1)
        for late in ("v1.engine.core", "v1.worker.cpu_worker", "model_executor.models.llama"):  # by the first engine
            import_module(f"vllm.{late}")
        return
    import torch

    from rlhf_core.training.engines.base import set_environment
    from rlhf_core.training.trainer import LocalTrainer  # noqa: F401

    set_environment(torch.device("cpu"))
    from rlhf_core.training.engines import deepspeed_engine  # noqa: F401

    import_module(
        "deepspeed.runtime.zero.muon.muon_optimizer"
    )  # at its first partitioned optimizer, with torch._inductor


def _become(words: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    for descriptor, file in enumerate(files, start=1):
        written = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(written, descriptor)
        os.close(written)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)  # as Python does for a program


if __name__ == "__main__":
    main(sys.argv[1], Connection(int(sys.argv[2])))
    runpy.run_path(sys.argv[0], run_name="__main__")
