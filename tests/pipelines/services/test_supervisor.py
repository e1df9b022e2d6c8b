import socket
import threading

from pipelines.services import supervisor
from pipelines.services.running import Services
from rlhf_core.tracking import mlflow_client


def test_a_new_supervisor_waits_until_the_services_of_a_killed_one_are_gone(home, monkeypatch):
    supervisor.await_end_of_last(home)  # nothing was up before: no wait
    with socket.socket() as still_there:
        still_there.bind(("127.0.0.1", 0))
        still_there.listen()
        port = still_there.getsockname()[1]
        Services(mlflow_client.tags() | {"owner.pid_started": "1"}, port, 1, ready=True).write(home)
        closing = threading.Timer(0.5, still_there.close)
        closing.start()
        supervisor.await_end_of_last(home)
        assert not closing.is_alive()
    monkeypatch.setattr(supervisor, "LAST_TIMEOUT_S", 0.2)
    with socket.socket() as stays:
        stays.bind(("127.0.0.1", 0))
        stays.listen()
        Services(mlflow_client.tags(), stays.getsockname()[1], 1, ready=True).write(home)
        supervisor.await_end_of_last(home)  # a stranger's: we take another port in the end
