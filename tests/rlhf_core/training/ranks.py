"""Runs a program of these tests as several gloo ranks, and in this process as one."""

import importlib.util
import os
import socket
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlhf_core.training.state import LAUNCHER
from tests.support.warm_programs import EngineProgram, fresh_program, start_program

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


def start_ranks(
    *words: object, ranks: int, folder: Path, threads: str = "1", warm: bool = True, **environment: str
) -> list[EngineProgram]:
    """Start `python *words` as ranks of one group; with 0 ranks, as one process without a launcher.

    `folder` is for their output. Without `warm`, each is a fresh process, which imports DeepSpeed itself.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LOCAL_RANK")}
    inherited |= {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)} | environment
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launchers = [group | {"RANK": str(rank)} for rank in range(ranks)] or [{}]
    start = partial(start_program, "deepspeed") if warm else fresh_program
    return [start(words, inherited | one, folder / f"of_{ranks}_{rank}") for rank, one in enumerate(launchers)]


def finish(programs: list[EngineProgram]) -> list[tuple[str, str]]:
    """Return the output and the errors of each program; AssertionError if one failed."""
    try:
        written = [program.communicate(timeout=400) for program in programs]
    finally:
        for program in programs:
            program.kill()
    errors = "\n".join(error[-3000:] for _, error in written)
    assert [program.returncode for program in programs] == [0] * len(programs), errors
    return written


def run_ranks(program: Path, cases: dict[str, Any], out: Path, *words: str, ranks: int = 2) -> dict[str, list[Any]]:
    """Run `python program <cases.pt> <out> *words` as ranks of one group; return what each rank made of each case."""
    torch.save(cases, out / "cases.pt")
    finish(start_ranks(program, out / "cases.pt", out, *words, ranks=ranks, folder=out / "said" / next(iter(cases))))
    return {one: [torch.load(out / f"{one}_{rank}.pt", weights_only=False) for rank in range(ranks)] for one in cases}
