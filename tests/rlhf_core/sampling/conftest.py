"""Runs vLLM in two processes, once for all tests of these files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_programs import ROOT, start_program

Seen = dict[str, Any]
PROGRAM = Path(__file__).with_name("vllm_program.py")


def vllm_environment() -> dict[str, str]:
    """Variables of a program that runs vLLM with one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory) -> Path:
    """The folder in which vLLM keeps files for its next start; empty, as on a new machine."""
    folder: Path = tmp_path_factory.mktemp("vllm_cache")
    return folder


@pytest.fixture(scope="session")
def vllm_processes(policies: tuple[Path, Path], vllm_cache: Path, tmp_path_factory) -> tuple[Seen, Seen]:
    """The results of the full program and of the one that only generates, which run at the same time."""
    folder = tmp_path_factory.mktemp("vllm")
    arguments = [(*policies, folder / "full.json"), (policies[0], folder / "again.json")]
    environment = vllm_environment() | {"VLLM_CACHE_ROOT": str(vllm_cache)}
    running = [start_program("vllm", [PROGRAM, *words], environment, folder / words[-1].stem) for words in arguments]
    for program in running:
        _, errors = program.communicate(timeout=400)
        assert program.returncode == 0, errors[-4000:]
    full, again = (json.loads(words[-1].read_text()) for words in arguments)
    return full, again
