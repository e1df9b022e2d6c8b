"""Joining and starting Ray: addresses, environments of workers, time limits and tokens."""

import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rlhf_core
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.processes.child import idle_threads
from rlhf_core.runtime import connection
from rlhf_core.runtime.cluster import (
    available_cores,
    free_port,
    threads_per_worker,
    trainer_versions,
    worker_environment,
)
from rlhf_core.runtime.connection import connect_again, in_lasting_thread, keep_token_private
from rlhf_core.runtime.local_runtime import open_runtime
from rlhf_core.runtime.placement import Placement


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


def test_an_address_without_ray_is_refused_in_one_line(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    assert refused(address, monkeypatch) == (
        f"RAY_ADDRESS = {address}: no Ray head answers; start one with `ray start --head` or unset it"
    )


def test_another_service_behind_the_port_is_not_waited_for(talkative_port, monkeypatch):
    assert "no Ray head answers" in refused(f"127.0.0.1:{talkative_port}", monkeypatch)


@pytest.mark.parametrize(("address", "message"), [("head", "no Ray head"), ("ray://head:10001", "client protocol")])
def test_an_address_that_cannot_be_joined_is_refused(address, message, monkeypatch):
    assert message in refused(address, monkeypatch)


def test_workers_find_this_package_and_soon_sleep_when_idle(monkeypatch):
    root = str(Path(rlhf_core.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/users/own", root]))
    environment = worker_environment(threads=3)
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/users/own"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert idle_threads().items() <= environment.items()


def test_a_worker_has_a_thread_for_each_core_of_its_share():
    assert threads_per_worker(RuntimeConfig(cpu_threads=0), cores=12) == 12
    assert threads_per_worker(RuntimeConfig(cpu_threads=0), cores=0) == 1
    assert threads_per_worker(RuntimeConfig(cpu_threads=5), cores=2) == 5


def test_workers_on_cpus_share_the_cores_of_this_machine():
    made = Placement(train=({},) * 2, sample=({},) * 3, group=None, pools={"judges": ({},)})
    assert made.cores_each(made.train, (*made.train, *made.pools["judges"])) == [available_cores() // 3] * 2


def test_workers_compute_with_the_kernels_that_were_chosen_here(monkeypatch):
    """On a Ray that somebody else started they would have the choice of its nodes, and round as those do."""
    chosen = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert chosen.items() <= worker_environment(threads=1).items()
    for name in chosen:
        monkeypatch.delenv(name)
    assert not chosen.keys() & worker_environment(threads=1).keys()


def heads(*answers: ConfigError | bool) -> Callable[[int], bool]:
    """Return a `connect` that raises or returns one answer a call."""
    left = iter(answers)

    def connect(cores: int) -> bool:
        answer = next(left)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    return connect


def test_a_head_that_went_is_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "RECONNECT_EVERY_S", 0.01)
    monkeypatch.setattr(connection, "connect", heads(ConfigError("no head"), ConfigError("no head"), False))
    assert connect_again(2) is False


def test_a_head_that_stays_away_is_one_error_after_the_stated_time(monkeypatch):
    monkeypatch.setattr(connection, "RECONNECT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(connection, "connect", heads(ConfigError("no head"), ConfigError("no head")))
    with pytest.raises(ConfigError, match="no head"):
        connect_again(2)


def test_a_call_into_a_ray_that_hangs_ends_at_its_deadline():
    forever = threading.Event()
    with pytest.raises(WorkerLostError, match=r"Ray = 'starting Ray': not finished within 0\.1 s"):
        in_lasting_thread(forever.wait, what="starting Ray", timeout_s=0.1)
    forever.set()


def test_an_error_of_the_call_itself_is_passed_on():
    def refuse() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        in_lasting_thread(refuse, what="starting Ray", timeout_s=60)


def test_rays_token_is_for_this_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    keep_token_private()
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert re.fullmatch("[0-9a-f]{64}", token.read_text()) and list(token.parent.iterdir()) == [token]
    token.write_text("as Ray made it")
    token.chmod(0o644)
    keep_token_private()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and token.read_text() == "as Ray made it"


def test_versions_name_only_the_engines_of_the_config():
    assert set(trainer_versions(TrainerConfig(engine="torch"))) == {"torch", "transformers"}
    assert trainer_versions(TrainerConfig(engine="torch"))["torch"] == torch.__version__
