"""A job server for tests: a job is a forked process that does what the command would have done."""

import os
import shlex
import signal
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess

from rlhf_contrib.ray_jobs.job import main
from rlhf_contrib.ray_jobs.jobs import Job, JobServerError, JobState
from tests.support.forks import forked


class ForkedJobs:
    """A `Jobs`. `pending` keeps jobs from starting, `silent` lets no request through."""

    def __init__(self, body: Callable[[list[str]], int] = main) -> None:
        self.processes: dict[str, BaseProcess | None] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.environment: dict[str, str] = {}
        self.stopped: list[str] = []
        self.pending = False
        self.silent = False
        self._body = body

    def all(self) -> list[Job]:
        return [self._job(job_id) for job_id in self.processes]

    def get(self, job_id: str) -> Job | None:
        if self.silent:
            raise JobServerError("connection refused")
        return self._job(job_id) if job_id in self.processes else None

    def submit(self, job_id: str, command: str, *, environment: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
        if job_id in self.processes:
            return False
        self.metadata[job_id], self.environment = dict(metadata), dict(environment)
        folder = shlex.split(command)[-1]
        process = forked(lambda: self._run(folder, self.environment))
        self.processes[job_id] = None if self.pending else process
        if not self.pending:
            process.start()
        return True

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)
        process = self.processes[job_id]
        if process is not None:
            process.terminate()

    def kill(self, job_id: str) -> None:
        process = self.processes[job_id]
        assert process is not None and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def join(self) -> None:
        for process in self.processes.values():
            if process is not None:
                process.join()

    def _run(self, folder: str, environment: dict[str, str]) -> int:
        os.environ.update(environment)
        return self._body([folder])

    def _job(self, job_id: str) -> Job:
        process = self.processes[job_id]
        state: JobState = "PENDING"
        if process is not None:
            ended: JobState = (
                "STOPPED" if job_id in self.stopped else "SUCCEEDED" if process.exitcode == 0 else "FAILED"
            )
            state = "RUNNING" if process.exitcode is None else ended
        return Job(job_id, state, "as the test has it", self.metadata[job_id])
