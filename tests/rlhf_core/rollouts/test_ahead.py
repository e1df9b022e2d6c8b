"""Jobs in a thread of their own: in order, with their own errors, and never waited for in vain."""

import threading
import time

import pytest

from rlhf_core.errors import SamplerLostError, SamplingError
from rlhf_core.rollouts import answers
from rlhf_core.rollouts.answers import Background


def test_jobs_run_in_order_in_one_other_thread():
    jobs = Background("sampling")
    seen: list[tuple[int, str]] = []
    waiting = [jobs.submit(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(3)]
    jobs.result(waiting[2])
    assert seen == [(0, "sampling"), (1, "sampling"), (2, "sampling")]
    jobs.close(interrupted=False)


def test_a_failure_has_its_own_message_and_no_later_job_runs():
    jobs = Background("sampling")
    ran: list[int] = []

    def fail() -> int:
        raise SamplerLostError("sampler.policy = 'generate on worker 0': the worker died; run again")

    before = jobs.submit(lambda: 1)
    failed = jobs.submit(fail)
    later = jobs.submit(lambda: ran.append(1))
    for job in (failed, later, before):  # also what went well: nobody shall train on it for nothing
        with pytest.raises(SamplerLostError, match="the worker died"):
            jobs.result(job)
    with pytest.raises(SamplerLostError, match="the worker died"):
        jobs.submit(lambda: 2)
    assert ran == []
    jobs.close(interrupted=False)


def test_an_interrupted_stage_leaves_a_job_behind_that_does_not_end(monkeypatch):
    monkeypatch.setattr(answers, "INTERRUPT_PATIENCE_S", 0.1)
    go_on = threading.Event()
    jobs = Background("sampling")
    dropped: list[int] = []
    jobs.submit(lambda: go_on.wait(60))
    jobs.submit(lambda: dropped.append(1))
    clock = time.monotonic()
    jobs.close(interrupted=True)
    assert time.monotonic() - clock < 5
    go_on.set()
    jobs.close(interrupted=False)  # the thread ends all the same, without the job that waited
    assert dropped == []


def test_closing_waits_for_the_job_that_runs():
    jobs = Background("sampling")
    ended: list[int] = []
    started = threading.Event()

    def work() -> None:
        started.set()
        time.sleep(0.2)
        ended.append(1)

    jobs.submit(work)
    started.wait(10)
    jobs.close(interrupted=False)
    assert ended == [1]


def test_nobody_waits_for_a_thread_that_is_gone(monkeypatch):
    monkeypatch.setattr(answers, "LOOK_EVERY_S", 0.05)
    jobs = Background("sampling")
    jobs.close(interrupted=False)
    with pytest.raises(SamplingError, match="the sampling thread ended before it had finished"):
        jobs.result(jobs.submit(lambda: 1))
