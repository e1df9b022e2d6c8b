from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from pipelines.services.running import LAST_PORT, ServiceError, bound_port, is_free, port_of


def test_no_port_after_the_last_one_is_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", LAST_PORT))
        taken.listen()
        with pytest.raises(ServiceError, match=f"port = {LAST_PORT}: "):
            bound_port(LAST_PORT)


@pytest.mark.parametrize("port", [-1, LAST_PORT + 1])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ServiceError, match=f"port = {port}: must be from 0 to 65535"):
        bound_port(port)


def test_a_port_is_given_once_whatever_the_temporary_folder_and_again_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    with bound_port(43210) as first:
        port = port_of(first)
        assert not is_free(port)
        code = f"from pipelines.services.running import *; print(port_of(bound_port({port})))"
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # as another Slurm job has it
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(other.stdout) > port
    assert is_free(port)
    with bound_port(port) as again:
        assert port_of(again) == port
