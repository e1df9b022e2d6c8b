"""Runs a program of these tests as several gloo ranks, and in this process as one."""

import importlib.util
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlhf_core.training.state import LAUNCHER

ROOT = Path(__file__).parents[3]


@cache
def load(program: Path) -> ModuleType:
    """Return the program as a module, the same each time: pickle finds its classes there."""
    loading = importlib.util.spec_from_file_location(program.stem, program)
    assert loading is not None and loading.loader is not None
    module = importlib.util.module_from_spec(loading)
    sys.modules[loading.name] = module
    loading.loader.exec_module(module)
    return module


def start_ranks(*arguments: object, ranks: int, threads: str = "1", **environment: str) -> list[subprocess.Popen[str]]:
    """Start `python *arguments` as ranks of one group; with 0 ranks, as one process without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LOCAL_RANK")}
    inherited |= {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launchers = [group | {"RANK": str(rank)} for rank in range(ranks)] or [{}]
    command = [sys.executable, *map(str, arguments)]
    return [
        subprocess.Popen(
            command, env=inherited | launcher | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for launcher in launchers
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Return the output and the errors of each process; AssertionError if one failed."""
    try:
        written = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(error[-3000:] for _, error in written)
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return written


def run_ranks(program: Path, cases: dict[str, Any], out: Path, *, ranks: int = 2) -> dict[str, list[Any]]:
    """Run `python program <cases.pt> <out>` as ranks of one group; return what each rank made of each case."""
    torch.save(cases, out / "cases.pt")
    finish(start_ranks(program, out / "cases.pt", out, ranks=ranks))
    return {one: [torch.load(out / f"{one}_{rank}.pt", weights_only=False) for rank in range(ranks)] for one in cases}
