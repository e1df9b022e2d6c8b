"""Submit and follow named jobs on Ray's job server; they outlive the process that submitted them.

A job's name (its submission id) can be used once per cluster, so if two processes submit the same name, the server
accepts only one. Every call returns within `REQUEST_TIMEOUT_S` or raises `JobServerError`.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.runtime.cluster import check_ray_address, named_address
from rlhf_core.runtime.liveness import within

JobState = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]

REQUEST_TIMEOUT_S = 15.0  # per request; Ray sets none
CONNECT_TIMEOUT_S = 30.0
"""A newly started head needs about 11 s until its job server answers."""
START_RAY = "`ray start --head --disable-usage-stats`, then RAY_ADDRESS=127.0.0.1:6379"
MESSAGE_CHARACTERS = 300  # one or two lines of a terminal


class JobServerError(WorkerLostError, ConnectionError):
    """The job server gave no usable response; the state of its jobs is unknown."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the server describes it. `message` is the first line of Ray's message about its state."""

    id: str
    state: JobState
    message: str
    metadata: Mapping[str, str]

    @property
    def living(self) -> bool:
        return self.state in ("PENDING", "RUNNING")


class Jobs(Protocol):
    """A job server. Every method raises JobServerError if it does not respond."""

    def all(self) -> list[Job]:
        """Every job that the server remembers, oldest first."""

    def get(self, job_id: str) -> Job | None:
        """The job, or None if the server does not know it (for example, because it was restarted)."""

    def submit(self, job_id: str, command: str, *, environment: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
        """Run `command` (a shell command line) on the head; False if the name was used before."""

    def stop(self, job_id: str) -> None:
        """Send SIGTERM to the job's processes, later SIGKILL, without waiting. An ended job keeps its state."""


def open_jobs() -> Jobs:
    """Connect to the job server of the Ray at `RAY_ADDRESS`; ConfigError within half a minute if it is missing."""
    address = named_address()
    if not address:
        rule = "a job needs a Ray cluster that outlives this process, and RAY_ADDRESS is not set"
        raise ConfigError("runtime.execution", "ray-job", rule, START_RAY)
    check_ray_address(address)
    try:
        return RayJobs(within(CONNECT_TIMEOUT_S, functools.partial(_connect, address)))
    except Exception as error:  # Ray raises errors of all its layers, and a timeout is another kind
        rule = f"its job server does not answer ({_first_line(error)})"
        remedy = "start the head with its dashboard (`pip install 'ray[default]'`) and try again in a minute"
        raise ConfigError("RAY_ADDRESS", address, rule, remedy) from error


class RayJobs:
    """The `Jobs` of Ray's own client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def all(self) -> list[Job]:
        listed = self._ask(self._client.list_jobs)
        submitted = [details for details in listed if details.submission_id is not None]
        return [_job(details) for details in sorted(submitted, key=lambda details: details.start_time or 0)]

    def get(self, job_id: str) -> Job | None:
        try:
            return _job(self._ask(self._client.get_job_info, job_id))
        except JobServerError as error:
            if "status code 404" in str(error):
                return None
            raise

    def submit(self, job_id: str, command: str, *, environment: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
        try:
            self._ask(
                self._client.submit_job,
                entrypoint=command,
                submission_id=job_id,
                runtime_env={"env_vars": dict(environment)},
                metadata=dict(metadata),
                entrypoint_num_cpus=0,  # the job only coordinates: its workers reserve their own resources
            )
        except JobServerError as error:
            if "already exists" in str(error.__cause__):
                return False
            raise
        return True

    def stop(self, job_id: str) -> None:
        self._ask(self._client.stop_job, job_id)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        import requests

        try:
            return call(*arguments, **named)
        except (RuntimeError, OSError, requests.exceptions.RequestException) as error:
            raise JobServerError(f"Ray's job server: {_first_line(error)}") from error


def _connect(address: str) -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The command line imports this module for every run; only runs that execute as Ray jobs need Ray.
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.job_submission import JobSubmissionClient

    # `ray.init` does this, the job client does not: a head requires the user's token as soon as one exists.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    client = JobSubmissionClient(address)
    client._do_request = functools.partial(client._do_request, timeout=REQUEST_TIMEOUT_S)  # Ray sets no time-out
    return client


def _job(details: Any) -> Job:
    state: JobState = details.status.value
    message = (details.message or "").strip().partition("\n")[0][:MESSAGE_CHARACTERS]
    return Job(details.submission_id, state, message, dict(details.metadata or {}))


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:MESSAGE_CHARACTERS]
    return text or type(error).__name__
