"""Runs a program of these tests as several gloo ranks, and in this process as one."""

from __future__ import annotations

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


def run_ranks(program: Path, cases: dict[str, Any], out: Path, *, ranks: int, threads: str) -> None:
    """Run `python program <cases.pt> <out>` as ranks of one group; AssertionError with what they said if one fails."""
    torch.save(cases, out / "cases.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LOCAL_RANK")}
    inherited |= {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    inherited |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(program), str(out / "cases.pt"), str(out)]
    processes = [
        subprocess.Popen(command, env=inherited | {"RANK": str(rank)}, text=True, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(error[-3000:] for error in errors)
