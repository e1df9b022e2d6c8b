"""Run the sides of a comparison: each is a separate warm process that measures one step whenever it is its turn.

The job of a side is a JSON file. The side first responds after a warm-up step, then to every word `step` with the
seconds of one step, and to `stop` with the peak resident memory of its process. Only the standard library is used here,
because the other side's interpreter lacks our packages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def tree_at(revision: str) -> Iterator[Path]:
    """A worktree of a git revision, removed at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder) / "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            yield Path(tree)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


class Root:
    """A process that has imported the modules of one interpreter's sides, and forks a side on request.

    Imports take longer than the measurements; the memory of a side is still measured separately.
    """

    def __init__(self, command: Sequence[str], log: Path, tree: Path | None = None) -> None:
        """`tree` is a worktree of another revision, whose modules the process imports."""
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stream, text=True, cwd=tree)

    def fork(self, job: Path, answers: Path, words: Path) -> None:
        """Fork a side that runs the job and opens the two pipes."""
        assert self._process.stdin
        print(json.dumps([str(job), str(answers), str(words)]), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End the process; its sides must have ended before."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def root(work: Callable[[dict[str, Any], Turn], None]) -> None:
    """Run as the process behind a `Root`: every line requests a fork, which runs `work` and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the sides are not waited for, because their pipes show their end
    for line in sys.stdin:
        if os.fork() == 0:
            job, answers, words = map(Path, json.loads(line))
            code = 1
            try:
                work(json.loads(job.read_text(encoding="utf-8")), Turn(answers, words, job.with_suffix(".log")))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)


class Side:
    """One side, seen from the comparing process. It starts immediately; call `wait` before its first step."""

    def __init__(self, name: str, root: Root, job: Mapping[str, Any], folder: Path) -> None:
        self.name = name
        file = folder / f"{name.replace(' ', '_')}.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        self._log = file.with_suffix(".log")
        answers, words = file.with_suffix(".answers"), file.with_suffix(".words")
        for pipe in (answers, words):
            os.mkfifo(pipe)
        root.fork(file, answers, words)
        self._answers = answers.open(encoding="utf-8")
        self._words = words.open("w", encoding="utf-8")

    def wait(self) -> dict[str, float]:
        """Wait for the warm-up; returns `loss` and `grad_norm`, which show that two sides do the same work."""
        return self._read()

    def step(self) -> dict[str, float]:
        """Measure `wall` and `cpu` seconds of one step, and any other figures of the side."""
        return self._ask("step")

    def stop(self) -> dict[str, float]:
        """Stop the side; returns its `peak_gib` and any other final figures."""
        last = self._ask("stop")
        self._words.close()
        self._answers.close()
        return last

    def _ask(self, word: str) -> dict[str, float]:
        with suppress(BrokenPipeError):  # the side died: reading raises an error that names its log
            print(word, file=self._words, flush=True)
        return self._read()

    def _read(self) -> dict[str, float]:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self.name} died:\n{self._log.read_text(encoding='utf-8')[-4000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer


class Turn:
    """The same, seen from inside a side: it waits for its turn and responds."""

    def __init__(self, answers: Path, words: Path, log: Path) -> None:
        # Output of libraries goes to the log.
        stream = log.open("w", encoding="utf-8")
        for standard in (sys.stdout, sys.stderr):
            os.dup2(stream.fileno(), standard.fileno())
        self._answers = answers.open("w", encoding="utf-8")
        self._words = words.open(encoding="utf-8")

    def answer(self, **values: float) -> None:
        """Send one response."""
        print(json.dumps(values), file=self._answers, flush=True)

    def comes(self) -> bool:
        """Wait for the next word; returns whether it requests a step."""
        return self._words.readline().strip() == "step"

    def serve(self, step: Callable[[], Mapping[str, float]], **last: Callable[[], float]) -> None:
        """Run a warm-up step, then one per request; at the end, send the measurements in `last` and the peak memory."""
        self.answer(**step())
        while self.comes():
            clock = Clock()
            counted = step()
            self.answer(**clock.read(), **counted)
        peak = peak_gib()
        self.answer(peak_gib=peak, **{name: measure() for name, measure in last.items()})


class Clock:
    """Seconds since its creation: wall time, and CPU time of all threads of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """The `wall` and `cpu` seconds."""
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


def share_of_even(ids: Sequence[int]) -> float:
    """The fraction of even token ids in an answer: the reward of `grpo_step`, the same for all of its sides."""
    return sum(number % 2 == 0 for number in ids) / max(1, len(ids))


def peak_gib() -> float:
    """The peak resident memory of this process, in GiB (Linux)."""
    # Not ru_maxrss: a child inherits its parent's value.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak_kib) / 2**20
