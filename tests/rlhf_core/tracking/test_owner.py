"""A run's owner is recognised, and known to be gone."""

from __future__ import annotations

import subprocess
import sys

from rlhf_core.store.leases import is_gone
from rlhf_core.tracking import mlflow_client


def test_this_process_is_not_gone() -> None:
    process = mlflow_client.from_tags(mlflow_client.tags())
    assert process is not None
    assert not is_gone(process)


def test_a_process_that_has_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    process = mlflow_client.from_tags(mlflow_client.tags() | {"owner.pid": str(child.pid)})
    assert process is not None
    assert is_gone(process)


def test_a_process_with_the_same_number_but_another_start_is_gone() -> None:
    process = mlflow_client.from_tags(mlflow_client.tags() | {"owner.pid_started": "1"})
    assert process is not None
    assert is_gone(process)


def test_a_process_of_another_machine_is_not_judged() -> None:
    process = mlflow_client.from_tags(mlflow_client.tags() | {"owner.host": "elsewhere", "owner.pid": "999999999"})
    assert process is not None
    assert not is_gone(process)


def test_a_run_of_something_else_has_no_owner() -> None:
    assert mlflow_client.from_tags({"mlflow.user": "me"}) is None
