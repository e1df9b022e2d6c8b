"""Records on their way to MLflow: queued in order and once, then refused or tried again one by one."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

from rlhf_core.tracking.mlflow_delivery import TRIES_OF_ONE_RECORD, Delivery
from rlhf_core.tracking.outbox import Outbox, Record, ServerUnreachable
from tests.support.forks import soon


class Server:
    """Takes every record while `up`; delivers two at a time so that a queue needs several calls."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.got: list[Record] = []
        self.threads: set[str] = set()

    def __call__(self, records: Sequence[Record]) -> int:
        self.threads.add(threading.current_thread().name)
        if not self.up:
            raise ServerUnreachable("down")
        self.got += records[:2]
        return len(records[:2])


def tag(number: int) -> Record:
    return {"op": "tag", "number": number}


def numbers(server: Server) -> list[int]:
    return [record["number"] for record in server.got]


def test_records_arrive_in_order_in_the_background_thread(tmp_path):
    server = Server()
    outbox = Outbox(tmp_path, server)
    for number in range(7):
        outbox.append(tag(number))
    assert outbox.flush(5.0, retry=False)
    assert numbers(server) == [0, 1, 2, 3, 4, 5, 6]
    assert server.threads == {"tracking-outbox"}
    assert outbox.close(5.0)
    assert list(tmp_path.iterdir()) == []


def test_an_outage_keeps_records_in_the_spool_and_sends_them_when_the_server_is_back(tmp_path):
    server = Server(up=False)
    outbox = Outbox(tmp_path, server)
    outbox.append(tag(1))
    assert not outbox.flush(5.0, retry=True)
    assert outbox.offline
    outbox.append(tag(2))
    (spool,) = tmp_path.glob("*.jsonl")
    assert len(spool.read_text().splitlines()) == 2
    server.up = True
    assert outbox.flush(5.0, retry=True)
    assert numbers(server) == [1, 2]
    assert spool.read_text() == ""
    assert not outbox.offline
    outbox.close(5.0)


def test_a_known_outage_costs_a_caller_no_time(tmp_path):
    outbox = Outbox(tmp_path, Server(up=False))
    outbox.append(tag(1))
    outbox.flush(5.0, retry=True)
    clock = time.monotonic()
    assert not outbox.flush(60.0, retry=False)
    assert time.monotonic() - clock < 1.0
    outbox.close(1.0)


def test_the_next_process_sends_what_the_last_one_could_not(tmp_path):
    first = Outbox(tmp_path, Server(up=False))
    first.append(tag(1))
    first.append(tag(2))
    assert not first.close(5.0)
    server = Server()
    second = Outbox(tmp_path, server)
    second.append(tag(3))
    assert second.close(5.0)
    assert numbers(server) == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []


def test_what_arrives_after_the_time_of_a_close_is_not_left_to_the_next_run(tmp_path, monkeypatch, caplog):
    under_way = threading.Event()

    def slow(records: Sequence[Record]) -> int:
        under_way.set()
        soon(lambda: outbox._closing)
        return len(records)

    outbox = Outbox(tmp_path, slow)
    outbox.append(tag(1))
    outbox.flush(0.0, retry=False)
    assert under_way.wait(60)
    monkeypatch.setattr(outbox, "flush", lambda timeout_s, retry: False)  # the time is up
    assert outbox.close(60.0)
    assert caplog.text == "" and list(tmp_path.iterdir()) == []


def test_the_spool_of_a_living_process_is_left_alone(tmp_path):
    living = Outbox(tmp_path, Server(up=False))
    living.append(tag(1))
    server = Server()
    other = Outbox(tmp_path, server)
    other.append(tag(2))
    other.close(5.0)
    assert numbers(server) == [2]
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    living.close(1.0)


def test_a_line_that_a_kill_or_a_full_disk_cut_short_is_left_out(tmp_path):
    whole = ['{"op": "tag", "number": 1}\n', '{"op": "tag", "number": 2}\n']
    (tmp_path / "dead.jsonl").write_text(f'{whole[0]}{{"op": "ta\n{whole[1]}{{"op": "tag", "num')
    server = Server()
    Outbox(tmp_path, server).close(5.0)
    assert numbers(server) == [1, 2]


def test_five_hundred_points_do_not_wait_for_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.tracking.outbox.FLUSH_SECONDS", 3600.0)
    server = Server()
    outbox = Outbox(tmp_path, server)
    outbox.append({"op": "metrics", "number": 0, "values": dict.fromkeys(map(str, range(499)), 1.0)})
    time.sleep(0.2)
    assert server.got == []
    outbox.append({"op": "metrics", "number": 1, "values": {"x": 1.0}})
    deadline = time.monotonic() + 5
    while len(server.got) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(server) == [0, 1]
    outbox.close(5.0)


def test_a_record_after_the_end_is_dropped_and_not_an_error(tmp_path):
    server = Server()
    outbox = Outbox(tmp_path, server)
    outbox.close(5.0)
    outbox.append(tag(1))
    assert server.got == []


def opened(run: str, **changes: Any) -> dict[str, Any]:
    record = {"op": "open_run", "run": run, "run_id": "", "name": "run", "params": {}, "tags": {}, "attempt": "a1"}
    return record | changes


@pytest.fixture
def delivery(database: Path, tmp_path) -> Delivery:
    return Delivery(f"sqlite:///{database}", experiment="rlhf", artifact_root=tmp_path / "files")


def points(run: str, step: int, **values: float) -> dict[str, Any]:
    return {"op": "metrics", "run": run, "step": step, "values": values, "time": 1000 + step}


def test_points_of_one_run_travel_together_and_no_further(delivery):
    delivery([opened("r1")])
    delivery([opened("r2")])
    records = [points("r1", 1, a=1.0), points("r1", 2, a=2.0), points("r2", 1, a=3.0)]
    assert delivery(records) == 2
    assert delivery(records[2:]) == 1
    client = delivery.client()
    assert client.get_run(delivery.runs["r1"].run_id).data.metrics == {"a": 2.0}
    assert client.get_run(delivery.runs["r2"].run_id).data.metrics == {"a": 3.0}


def test_more_points_than_one_request_takes_are_split(delivery):
    delivery([opened("r1")])
    records = [points("r1", step, a=1.0, b=2.0, c=3.0) for step in range(400)]  # 1200 points
    assert delivery(records) == 400
    assert len(delivery.client().get_metric_history(delivery.runs["r1"].run_id, "c")) == 400


def test_a_record_that_comes_twice_changes_nothing(delivery):
    for _ in range(2):
        delivery([opened("r1", params={"a": 1})])
        delivery([points("r1", 1, a=1.0)])
    client = delivery.client()
    assert len(client.search_runs([delivery.experiment_id])) == 1
    assert client.get_run(delivery.runs["r1"].run_id).data.tags["attempt"] == "1"
    assert len(client.get_metric_history(delivery.runs["r1"].run_id, "a")) == 1


def test_a_run_that_is_gone_is_opened_anew(delivery):
    delivery([opened("r1", run_id="0" * 32)])
    assert delivery.runs["r1"].run_id != "0" * 32


def test_a_record_of_an_unknown_run_is_skipped(delivery):
    assert delivery([points("nobody", 1, a=1.0)]) == 1


def test_a_server_that_does_not_answer_is_noticed_in_seconds_and_asked_again():
    delivery = Delivery("http://127.0.0.1:9", experiment="rlhf", artifact_root=None)
    for _ in range(TRIES_OF_ONE_RECORD + 1):  # never given up
        with pytest.raises(ServerUnreachable, match="does not answer"):
            delivery([opened("r1")])


def test_a_record_that_alone_keeps_failing_does_not_hold_up_the_others(delivery):
    delivery([opened("r1")])
    broken = {"op": "finish", "run": "r1", "status": "FINISHED", "note": 3}  # a note that is no text
    skipped = 0
    for _ in range(TRIES_OF_ONE_RECORD):
        try:
            skipped += delivery([broken])
        except ServerUnreachable:
            continue
    assert skipped >= 1


def test_a_note_that_comes_twice_is_written_once(delivery, database):
    finished = {"op": "finish", "run": "r1", "status": "FINISHED", "note": "- sft: 12ab"}
    delivery([opened("r1")])
    delivery([finished])
    again = Delivery(f"sqlite:///{database}", experiment="rlhf", artifact_root=None)  # the next process, after a kill
    again([finished])
    run = again.client().get_run(delivery.runs["r1"].run_id)
    assert run.data.tags["mlflow.note.content"].count("sft: 12ab") == 1


def test_records_wait_for_a_database_that_is_locked_or_full(delivery, database, monkeypatch):
    delivery([opened("r1")])
    client = delivery.client()

    def locked(*_: Any, **__: Any) -> None:
        # what MLflow makes of sqlite3.OperationalError, after 20 s of waiting for the lock
        raise MlflowException("(sqlite3.OperationalError) database is locked", TEMPORARILY_UNAVAILABLE)

    with monkeypatch.context() as patch:
        patch.setattr(client, "log_batch", locked)
        for _ in range(TRIES_OF_ONE_RECORD + 1):  # never given up, although reading works
            with pytest.raises(ServerUnreachable, match="database is locked"):
                delivery([points("r1", 1, loss=2.0)])
    assert delivery([points("r1", 1, loss=2.0)]) == 1
    assert client.get_run(delivery.runs["r1"].run_id).data.metrics == {"loss": 2.0}
