"""A new database, and addresses."""

from __future__ import annotations

import threading
from pathlib import Path

from mlflow import MlflowClient

from rlhf_core.tracking.mlflow_client import create_database, run_url


def test_two_processes_that_create_the_database_get_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mlflow.db"
    threads = [threading.Thread(target=create_database, args=(path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment("0").name == "Default"
    assert [item.name for item in path.parent.iterdir()] == ["mlflow.db"]


def test_the_address_of_a_run_leads_to_the_web_interface() -> None:
    assert run_url("http://127.0.0.1:5000", "3", "abc") == "http://127.0.0.1:5000/#/experiments/3/runs/abc"
    assert run_url("sqlite:////data/mlflow.db", "3", "abc") == "runs:/abc"
