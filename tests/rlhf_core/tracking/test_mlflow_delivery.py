"""The connection to MLflow: one record at a time, refused or retried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

from rlhf_core.tracking.mlflow_delivery import TRIES_OF_ONE_RECORD, Delivery, Unreachable


def opened(run: str, **changes: Any) -> dict[str, Any]:
    record = {"op": "open_run", "run": run, "run_id": "", "name": "run", "params": {}, "tags": {}, "attempt": "a1"}
    return record | changes


@pytest.fixture
def delivery(database: Path, tmp_path: Path) -> Delivery:
    return Delivery(f"sqlite:///{database}", experiment="rlhf", artifact_root=tmp_path / "files")


def points(run: str, step: int, **values: float) -> dict[str, Any]:
    return {"op": "metrics", "run": run, "step": step, "values": values, "time": 1000 + step}


def test_points_of_one_run_travel_together_and_no_further(delivery: Delivery) -> None:
    delivery([opened("r1")])
    delivery([opened("r2")])
    records = [points("r1", 1, a=1.0), points("r1", 2, a=2.0), points("r2", 1, a=3.0)]
    assert delivery(records) == 2
    assert delivery(records[2:]) == 1
    client = delivery.client()
    assert client.get_run(delivery.runs["r1"].run_id).data.metrics == {"a": 2.0}
    assert client.get_run(delivery.runs["r2"].run_id).data.metrics == {"a": 3.0}


def test_more_points_than_one_request_takes_are_split(delivery: Delivery) -> None:
    delivery([opened("r1")])
    records = [points("r1", step, a=1.0, b=2.0, c=3.0) for step in range(400)]  # 1200 points
    assert delivery(records) == 400
    assert len(delivery.client().get_metric_history(delivery.runs["r1"].run_id, "c")) == 400


def test_a_record_that_comes_twice_changes_nothing(delivery: Delivery) -> None:
    for _ in range(2):
        delivery([opened("r1", params={"a": 1})])
        delivery([points("r1", 1, a=1.0)])
    client = delivery.client()
    assert len(client.search_runs([delivery.experiment_id])) == 1
    assert client.get_run(delivery.runs["r1"].run_id).data.tags["attempt"] == "1"
    assert len(client.get_metric_history(delivery.runs["r1"].run_id, "a")) == 1


def test_a_run_that_is_gone_is_opened_anew(delivery: Delivery) -> None:
    delivery([opened("r1", run_id="0" * 32)])
    assert delivery.runs["r1"].run_id != "0" * 32


def test_a_record_of_an_unknown_run_is_skipped(delivery: Delivery) -> None:
    assert delivery([points("nobody", 1, a=1.0)]) == 1


def test_a_server_that_does_not_answer_is_noticed_in_seconds_and_asked_again() -> None:
    delivery = Delivery("http://127.0.0.1:9", experiment="rlhf", artifact_root=None)
    for _ in range(TRIES_OF_ONE_RECORD + 1):  # never given up
        with pytest.raises(Unreachable, match="does not answer"):
            delivery([opened("r1")])


def test_a_record_that_alone_keeps_failing_does_not_hold_up_the_others(delivery: Delivery) -> None:
    delivery([opened("r1")])
    broken = {"op": "finish", "run": "r1", "status": "FINISHED", "note": 3}  # a note that is no text
    skipped = 0
    for _ in range(TRIES_OF_ONE_RECORD):
        try:
            skipped += delivery([broken])
        except Unreachable:
            continue
    assert skipped >= 1


def test_a_note_that_comes_twice_is_written_once(delivery: Delivery, database: Path) -> None:
    finished = {"op": "finish", "run": "r1", "status": "FINISHED", "note": "- sft: 12ab"}
    delivery([opened("r1")])
    delivery([finished])
    again = Delivery(f"sqlite:///{database}", experiment="rlhf", artifact_root=None)  # the next process, after a kill
    again([finished])
    run = again.client().get_run(delivery.runs["r1"].run_id)
    assert run.data.tags["mlflow.note.content"].count("sft: 12ab") == 1


def test_records_wait_for_a_database_that_is_locked_or_full(
    delivery: Delivery, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery([opened("r1")])
    client = delivery.client()

    def locked(*_: Any, **__: Any) -> None:
        # what MLflow makes of sqlite3.OperationalError, after 20 s of waiting for the lock
        raise MlflowException("(sqlite3.OperationalError) database is locked", TEMPORARILY_UNAVAILABLE)

    with monkeypatch.context() as patch:
        patch.setattr(client, "log_batch", locked)
        for _ in range(TRIES_OF_ONE_RECORD + 1):  # never given up, although reading works
            with pytest.raises(Unreachable, match="database is locked"):
                delivery([points("r1", 1, loss=2.0)])
    assert delivery([points("r1", 1, loss=2.0)]) == 1
    assert client.get_run(delivery.runs["r1"].run_id).data.metrics == {"loss": 2.0}
