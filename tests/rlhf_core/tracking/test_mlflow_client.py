"""A new database, addresses, and the owner of a run."""

import subprocess
import sys
import threading

import pytest
from mlflow import MlflowClient

from rlhf_core.store.leases import is_gone
from rlhf_core.tracking import mlflow_client
from rlhf_core.tracking.mlflow_client import TRAINING, create_database, run_url


def test_two_processes_that_create_the_database_get_one(tmp_path):
    path = tmp_path / "new" / "mlflow.db"
    threads = [threading.Thread(target=create_database, args=(path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment("0").name == "Default"
    assert [item.name for item in path.parent.iterdir()] == ["mlflow.db"]


def test_the_address_of_a_run_leads_to_the_web_interface():
    assert run_url("http://127.0.0.1:5000", "3", "abc") == f"http://127.0.0.1:5000/#/experiments/3/runs/abc{TRAINING}"
    assert run_url("sqlite:////data/mlflow.db", "3", "abc") == "runs:/abc"


def ended() -> int:
    """Return the id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({}, False),
        ({"owner.pid": "ended"}, True),
        ({"owner.pid_started": "1"}, True),  # the number belongs to another process now
        ({"owner.host": "elsewhere", "owner.pid": "999999999"}, False),  # of another machine nothing is known
    ],
)
def test_an_owner_is_gone_if_its_process_on_this_machine_has_ended(changes, gone):
    changed = {name: str(ended()) if value == "ended" else value for name, value in changes.items()}
    process = mlflow_client.from_tags(mlflow_client.owner_tags() | changed)
    assert process is not None and is_gone(process) is gone


def test_a_run_of_something_else_has_no_owner():
    assert mlflow_client.from_tags({"mlflow.user": "me"}) is None
