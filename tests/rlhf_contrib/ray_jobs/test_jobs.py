import threading
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from rlhf_contrib.ray_jobs import jobs as jobs_module
from rlhf_contrib.ray_jobs.jobs import JobServerError, RayJobs, open_jobs
from rlhf_core.errors import ConfigError


def details(job_id: str | None, state: str, message: str = "", start: int = 0) -> Any:
    return SimpleNamespace(
        submission_id=job_id,
        status=SimpleNamespace(value=state),
        message=message,
        metadata={"a": "b"},
        start_time=start,
    )


class Client:
    """Ray's client: answers, or raises `error`."""

    def __init__(self, answer: Any = None, error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def ask(self, *arguments: Any, **named: Any) -> Any:
        self.asked.append((arguments, named))
        if self.error is not None:
            raise self.error
        return self.answer

    list_jobs = get_job_info = submit_job = stop_job = ask


def test_without_an_address_the_remedy_is_a_head_that_stays(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"runtime.execution = 'ray-job': .*`ray start --head --disable-usage-stats`"):
        open_jobs()


def test_a_head_that_does_not_answer_is_noticed_within_seconds(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="no Ray head answers"):
        open_jobs()


def test_a_job_server_that_keeps_us_waiting_is_given_up(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(jobs_module, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(jobs_module, "_connect", lambda address: threading.Event().wait())
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS = 'auto': its job server does not answer \(nothing for"):
        open_jobs()


def test_jobs_are_listed_oldest_first_without_what_nobody_submitted():
    client = Client(
        [
            details("late", "FAILED", "first line\nsecond", 2),
            details("early", "RUNNING", start=1),
            details(None, "RUNNING"),
        ]
    )
    late, early = RayJobs(client).all()[::-1]
    assert (late.id, late.message, late.living) == ("late", "first line", False)
    assert (early.id, early.living, early.metadata) == ("early", True, {"a": "b"})


def test_a_job_that_the_server_does_not_know_is_none():
    error = RuntimeError("Request failed with status code 404: Job x does not exist.")
    assert RayJobs(Client(error=error)).get("x") is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Request failed with status code 500: internal"),
        requests.exceptions.ReadTimeout("15 s"),
        requests.exceptions.ConnectionError("refused"),
    ],
)
def test_a_server_that_does_not_answer_well_says_nothing_about_the_job(error):
    for call in (lambda jobs: jobs.get("x"), lambda jobs: jobs.all(), lambda jobs: jobs.stop("x")):
        with pytest.raises(JobServerError, match=str(error)[:7]):
            call(RayJobs(Client(error=error)))


def test_a_name_that_was_used_is_told_from_a_server_that_fails():
    used = RuntimeError("Request failed with status code 500: Traceback\n...\nJob with submission_id x already exists.")
    assert not RayJobs(Client(error=used)).submit("x", "true", environment={}, metadata={})
    with pytest.raises(JobServerError):
        RayJobs(Client(error=RuntimeError("status code 500"))).submit("x", "true", environment={}, metadata={})


def test_a_job_reserves_nothing_for_its_driver_and_carries_its_environment():
    client = Client("x")
    assert RayJobs(client).submit("x", "true", environment={"A": "1"}, metadata={"key": "k"})
    ((_, named),) = client.asked
    assert named == {
        "entrypoint": "true",
        "submission_id": "x",
        "runtime_env": {"env_vars": {"A": "1"}},
        "metadata": {"key": "k"},
        "entrypoint_num_cpus": 0,
    }
