"""Jobs on a real Ray: a flow is killed, the next one attaches, and one that is stopped stops its job."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipelines.services.home import Home
from rlhf_contrib.ray_jobs.jobs import Job, Jobs, open_jobs
from rlhf_core.runtime.cluster import free_port
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import living_owner
from tests.support.toy_stage import ToyConfig, stage_key, toy_spec

ROOT = Path(__file__).parents[3]
PATIENT = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300", "RAY_NUM_REDIS_GET_RETRIES": "120"}
HEAD_START_S = 120
GO = "go"
"""File that the stage waits for after its first step."""
PROFILE = """
name = "jobs"
[runtime]
type = "local"
execution = "ray-job"
trainer = {engine = "torch"}
sampler = {type = "hf"}
[prepare_data]
"""


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray head of this test's own, which ends with it. On a busy machine Ray's processes may miss their deadlines."""
    reasons = []
    for _ in range(3):
        with ray_head() as (address, said):
            if address:
                yield address
                return
            reasons.append(said)
    pytest.fail("no Ray head would start:\n" + "\n---\n".join(reasons))


@contextmanager
def ray_head() -> Iterator[tuple[str, str]]:
    """Yield the address of a Ray head and what its processes said; the address is "" if it did not start in time."""
    folder = Path(tempfile.mkdtemp(prefix="rj-", dir="/tmp"))  # short: Unix sockets below it
    port, log = free_port(), folder / "head.log"
    ports = {"--port": port, "--dashboard-port": free_port(), "--ray-client-server-port": free_port()}
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
            *(f"{option}={number}" for option, number in ports.items()), "--dashboard-agent-listen-port=0",
            "--include-dashboard=true",  # else Ray goes on without one when it fails
            "--num-cpus=2", "--object-store-memory=100000000", f"--temp-dir={folder}", "--disable-usage-stats",
        ],
        stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT, cwd=folder,
        env=os.environ | PATIENT | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + HEAD_START_S
        while "ray job submit" not in log.read_text() and head.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        ready = "ray job submit" in log.read_text()
        logs = [log, *folder.glob("session_*[0-9]/logs/dashboard*"), *folder.glob("session_*[0-9]/logs/gcs_server.*")]
        said = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in logs)
        yield f"127.0.0.1:{port}" if ready else "", said
    finally:
        family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()
        _, left = psutil.wait_procs(family, timeout=20)
        for process in left:
            process.kill()
        head.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


class Flow:
    """A flow in a process of its own, in the folder `home`."""

    def __init__(self, home: Home, address: str) -> None:
        profile = home.root / "profile.toml"
        profile.write_text(PROFILE)
        # MLflow's client notes the database that it looked into last in the environment of this process.
        inherited = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        environment = {"RLHF_HOME": str(home.root), "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
        self._output = home.root / f"flow-{time.monotonic_ns()}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rlhf_contrib.ray_jobs.job_flow", str(profile), str(home.root / GO)],
            stdout=self._output.open("wb"), stderr=subprocess.STDOUT, cwd=ROOT, env=inherited | environment,
        )  # fmt: skip

    def said(self) -> list[str]:
        return self._output.read_text().splitlines()

    def until(self, words: str) -> None:
        wait_until(lambda: any(line.startswith(words) for line in self.said()) or self.process.poll() is not None)
        assert any(line.startswith(words) for line in self.said()), self.said()


def wait_until(true: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start_flow(home: Home, ray_address: str) -> Iterator[Callable[[], Flow]]:
    """Start a flow; those that are still there at the end are killed."""
    flows: list[Flow] = []

    def start() -> Flow:
        flows.append(Flow(home, ray_address))
        return flows[-1]

    yield start
    for flow in flows:
        flow.process.kill()
        flow.process.wait()


@pytest.fixture
def jobs(ray_address: str, monkeypatch) -> Jobs:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    return open_jobs()


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_flow_leaves_its_job_at_work_and_the_next_run_attaches_to_it(home, start_flow, jobs):
    key = stage_key(toy_spec(ToyConfig(), label="toy"))
    first = start_flow()
    first.until("progress")
    (job_id,) = (job.id for job in own(jobs, home))
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = start_flow()
    second.until(f"started ATTACH Ray job {job_id} is computing it")
    (home.root / GO).touch()
    assert second.process.wait(300) == 0
    assert [job.id for job in own(jobs, home)] == [job_id]
    store = ArtifactStore(home.store)
    record = store.record(key)
    assert record is not None and record.attempts == 1 and record.tracking["ray.submission_id"] == job_id
    assert living_owner(store.shared, key) is None
    assert tracked(home) == [("jobs", "FINISHED"), ("jobs", "KILLED"), ("toy · jobs", "FINISHED")]


def own(jobs: Jobs, home: Home) -> list[Job]:
    """Return the jobs of this test: the other one has the same key, in another store."""
    return [job for job in jobs.all() if job.metadata["store"] == str(home.store.resolve())]


def tracked(home: Home) -> list[tuple[str, str]]:
    """Return name (without the part in brackets that tells pipeline runs apart) and status of every run in MLflow."""
    from rlhf_core.tracking.mlflow_client import open_client

    client = open_client(home.mlflow_uri)
    experiment = client.get_experiment_by_name("jobs")
    found = client.search_runs([experiment.experiment_id])
    return sorted((run.info.run_name.partition(" (")[0], run.info.status) for run in found)
