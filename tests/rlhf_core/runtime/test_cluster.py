from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_core
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.processes.child import idle_threads
from rlhf_core.runtime.cluster import available_cores, free_port, threads_per_worker, worker_environment
from rlhf_core.runtime.factory import open_runtime


@pytest.fixture
def talkative_port() -> Iterator[int]:
    """A port behind which somebody greets who is not Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()[1]


def refused(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as error:
        open_runtime(RuntimeConfig()).prewarm(trainer=True, sampler=False)
    return str(error.value)


def test_an_address_without_ray_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert refused(address, monkeypatch) == (
        f"RAY_ADDRESS = {address}: no Ray head answers; start one with `ray start --head` or unset it"
    )


def test_another_service_behind_the_port_is_not_waited_for(
    talkative_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no Ray head answers" in refused(f"127.0.0.1:{talkative_port}", monkeypatch)


@pytest.mark.parametrize(("address", "message"), [("head", "no Ray head"), ("ray://head:10001", "client protocol")])
def test_an_address_that_cannot_be_joined_is_refused(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refused(address, monkeypatch)


def test_workers_find_this_package_and_soon_sleep_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(rlhf_core.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/users/own", root]))
    environment = worker_environment(threads=3)
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/users/own"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert idle_threads().items() <= environment.items()


def test_workers_that_compute_at_once_share_the_cores() -> None:
    assert threads_per_worker(RuntimeConfig(cpu_threads=0), workers=1) == available_cores()
    assert threads_per_worker(RuntimeConfig(cpu_threads=0), workers=10_000) == 1
    assert threads_per_worker(RuntimeConfig(cpu_threads=5), workers=2) == 5


def test_workers_compute_with_the_kernels_that_were_chosen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Ray that somebody else started they would have the choice of its nodes, and round as those do."""
    chosen = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert chosen.items() <= worker_environment(threads=1).items()
    for name in chosen:
        monkeypatch.delenv(name)
    assert not chosen.keys() & worker_environment(threads=1).keys()
