"""Records arrive in order and once, whatever the server does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.tracking.mlflow_delivery import Outbox, Record, Unreachable


class Server:
    """Takes every record while `up`; delivers two at a time so that a queue needs several calls."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.got: list[Record] = []
        self.threads: set[str] = set()

    def __call__(self, records: Sequence[Record]) -> int:
        self.threads.add(threading.current_thread().name)
        if not self.up:
            raise Unreachable("down")
        self.got += records[:2]
        return len(records[:2])


def tag(number: int) -> Record:
    return {"op": "tag", "number": number}


def numbers(server: Server) -> list[int]:
    return [record["number"] for record in server.got]


def test_records_arrive_in_order_in_the_background_thread(tmp_path: Path) -> None:
    server = Server()
    outbox = Outbox(tmp_path, server)
    for number in range(7):
        outbox.append(tag(number))
    assert outbox.flush(5.0, retry=False)
    assert numbers(server) == [0, 1, 2, 3, 4, 5, 6]
    assert server.threads == {"tracking-outbox"}
    assert outbox.close(5.0)
    assert list(tmp_path.iterdir()) == []


def test_an_outage_keeps_records_in_the_spool_and_sends_them_when_the_server_is_back(tmp_path: Path) -> None:
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


def test_a_known_outage_costs_a_caller_no_time(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, Server(up=False))
    outbox.append(tag(1))
    outbox.flush(5.0, retry=True)
    clock = time.monotonic()
    assert not outbox.flush(60.0, retry=False)
    assert time.monotonic() - clock < 1.0
    outbox.close(1.0)


def test_the_next_process_sends_what_the_last_one_could_not(tmp_path: Path) -> None:
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


def test_the_spool_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    living = Outbox(tmp_path, Server(up=False))
    living.append(tag(1))
    server = Server()
    other = Outbox(tmp_path, server)
    other.append(tag(2))
    other.close(5.0)
    assert numbers(server) == [2]
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    living.close(1.0)


def test_a_line_that_a_kill_or_a_full_disk_cut_short_is_left_out(tmp_path: Path) -> None:
    whole = ['{"op": "tag", "number": 1}\n', '{"op": "tag", "number": 2}\n']
    (tmp_path / "dead.jsonl").write_text(f'{whole[0]}{{"op": "ta\n{whole[1]}{{"op": "tag", "num')
    server = Server()
    Outbox(tmp_path, server).close(5.0)
    assert numbers(server) == [1, 2]


def test_five_hundred_points_do_not_wait_for_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.tracking.mlflow_delivery.FLUSH_SECONDS", 3600.0)
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


def test_a_record_after_the_end_is_dropped_and_not_an_error(tmp_path: Path) -> None:
    server = Server()
    outbox = Outbox(tmp_path, server)
    outbox.close(5.0)
    outbox.append(tag(1))
    assert server.got == []
