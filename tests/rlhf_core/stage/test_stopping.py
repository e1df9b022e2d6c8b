import os
import pty
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.stage import stopping
from rlhf_core.stage.stopping import StageStopped, deadline, on_signals, reason, time_limit

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVES = """
import os, sys, time
from pathlib import Path
from rlhf_core.stage.stopping import on_signals, reason, StageStopped
with on_signals():
    print("begins", flush=True)
    while not reason():
        time.sleep(0.01)
    for _ in range(3):
        print("to a terminal that has gone", flush=True)
    Path(sys.argv[1]).write_text(reason())
    raise StageStopped(reason())
"""


@pytest.fixture
def passed_on() -> Iterator[list[int]]:
    """What the handlers outside were given."""
    given: list[int] = []
    before = {n: signal.signal(n, lambda number, _: given.append(number)) for n in SIGNALS}
    yield given
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_reaches_whoever_handled_it_before_once_the_stage_has_saved(passed_on, number):
    with pytest.raises(StageStopped), on_signals():
        assert reason() == ""
        os.kill(os.getpid(), number)
        assert reason() == f"{number.name} arrived"
        assert passed_on == []
        raise StageStopped(reason())
    assert passed_on == [number]
    assert reason() == ""


def test_the_second_signal_is_handled_at_once(passed_on):
    with on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed_on == [signal.SIGTERM]


@pytest.mark.parametrize("first", SIGNALS)
def test_a_hang_up_is_never_the_second_signal(passed_on, first):
    with on_signals():
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGHUP)
        assert passed_on == [] and reason() == f"{first.name} arrived"


def test_a_hang_up_that_nobody_handles_ends_as_a_termination(passed_on):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(StageStopped), on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        raise StageStopped(reason())
    assert passed_on == [signal.SIGTERM]


def test_under_nohup_a_hang_up_is_ignored(passed_on):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert reason() == "" and stopping.terminations() == (signal.SIGTERM,)


def test_a_stage_saves_when_its_terminal_goes(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", SAVES, str(tmp_path / "saved")])
    assert os.read(terminal, 6) == b"begins"
    os.close(terminal)
    os.waitpid(child, 0)
    assert (tmp_path / "saved").read_text() == "SIGHUP arrived"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stage_that_comes_to_no_end_is_interrupted_after_a_while(passed_on, monkeypatch, number):
    monkeypatch.setenv("RLHF_GRACE_S", "0.05")
    with on_signals():
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not passed_on and time.monotonic() < deadline:
            time.sleep(0.01)
    assert passed_on == [signal.SIGTERM]


@pytest.mark.parametrize("given", ["soon", "-1", "nan"])
def test_a_grace_period_is_a_number_of_seconds(monkeypatch, given):
    monkeypatch.setenv("RLHF_GRACE_S", given)
    with (
        pytest.raises(ConfigError, match=f"RLHF_GRACE_S = '{given}': is not a number of seconds; unset it for 20"),
        on_signals(),
    ):
        pass


def test_a_body_that_ends_in_time_is_not_interrupted_later(passed_on, monkeypatch):
    monkeypatch.setattr(stopping, "GRACE_S", 0.5)
    with on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.7)
    assert passed_on == []


def test_the_time_limit_counts_from_the_start_of_the_allocation(monkeypatch):
    monkeypatch.setenv(stopping.ALLOCATION_START, str(time.time() - 100))
    with time_limit(200):
        assert reason() == ""
    with time_limit(99):
        assert reason() == "the time limit is reached"
    assert reason() == ""


def test_without_an_allocation_the_time_limit_counts_from_now_and_0_is_none(monkeypatch):
    monkeypatch.delenv(stopping.ALLOCATION_START, raising=False)
    with time_limit(60):
        assert reason() == ""
    with time_limit(0.01):
        time.sleep(0.02)
        assert reason() == "the time limit is reached"
    with time_limit(0):
        assert reason() == ""


def test_an_alarm_that_somebody_else_set_on_the_signal_does_not_end_the_process_before_it_has_saved(passed_on):
    with on_signals():
        signal.alarm(60)  # as Ray's handler does, with 3 s
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.alarm(0) == 0


def test_a_block_that_ends_removes_its_own_deadline_alone():
    """Blocks of two threads end in any order."""
    first, second = deadline(3600, "the first has not passed"), deadline(-1, "the second has passed")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert reason() == "the second has passed"
    second.__exit__(None, None, None)
    assert reason() == ""
