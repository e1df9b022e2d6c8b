import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from pipelines.services import servers, supervisor
from pipelines.services.running import ServiceError, Services
from pipelines.services.servers import Child
from rlhf_core.tracking import mlflow_client


def test_a_new_supervisor_waits_until_the_services_of_a_killed_one_are_gone(home, monkeypatch):
    supervisor.await_end_of_last(home)  # nothing was up before: no wait
    with socket.socket() as still_there:
        still_there.bind(("127.0.0.1", 0))
        still_there.listen()
        port = still_there.getsockname()[1]
        Services(mlflow_client.owner_tags() | {"owner.pid_started": "1"}, port, 1, ready=True).write(home)
        closing = threading.Timer(0.5, still_there.close)
        closing.start()
        supervisor.await_end_of_last(home)
        assert not closing.is_alive()
    monkeypatch.setattr(supervisor, "LAST_TIMEOUT_S", 0.2)
    with socket.socket() as stays:
        stays.bind(("127.0.0.1", 0))
        stays.listen()
        Services(mlflow_client.owner_tags(), stays.getsockname()[1], 1, ready=True).write(home)
        supervisor.await_end_of_last(home)  # a stranger's: we take another port in the end


def service(folder: Path, name: str, program: str) -> Child:
    """A service that works as soon as its program has made a file."""
    file = folder / name
    code = f"import pathlib, time\n{program.format(file=str(file))}\ntime.sleep(600)"
    return Child(name, [sys.executable, "-c", code], os.environ, file.exists, folder / f"{name}.log")


def test_a_service_that_is_late_stays_with_those_that_are_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(servers, "LOOK_EVERY_S", 0.1)
    quick = service(tmp_path, "quick", "pathlib.Path({file!r}).touch()")
    slow = service(tmp_path, "slow", "time.sleep(3); pathlib.Path({file!r}).touch()")
    keepers: list[threading.Thread] = []
    stop = threading.Event()
    try:
        supervisor._start([quick, slow], keepers, stop)
        assert "slow: late, still starting; read " in caplog.text and "restarted" not in caplog.text
        assert quick.well() and slow.well() and not quick.dead() and not slow.dead() and len(keepers) == 2
    finally:
        stop.set()
        for keeper in keepers:
            keeper.join()
        quick.stop()
        slow.stop()


def test_a_service_that_ends_while_it_starts_is_one_error_with_its_log(tmp_path):
    broken = service(tmp_path, "broken", "raise SystemExit(3)")
    with pytest.raises(ServiceError, match=r"broken: ended while it started; read .*broken\.log"):
        supervisor._start([broken], [], threading.Event())
    broken.stop()
