"""A run by `sbatch` on two nodes of a real Slurm: its time ends, it is queued again, and resumes to the same result."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.cli.main import main
from rlhf_core.store.artifacts import ArtifactStore
from tests.support.forks import soon
from tests.support.slurm import two_nodes
from tests.support.small_pipeline import write_mini

CHANGES = {"runtime.type": "ray", "runtime.cpu_threads": 1, "sft.loop.epochs": 150, "sft.loop.checkpoint_every": 5}


def words(profile: Path, store: Path) -> list[str]:
    """Return what follows `rlhf run` for the profile up to `sft`, with a store of its own."""
    pairs = {**CHANGES, "store": store}
    return [
        str(profile),
        "--until",
        "sft",
        *(word for key, value in pairs.items() for word in ("--set", f"{key}={value}")),
    ]


@contextmanager
def shown_if_failed(log: Path) -> Iterator[None]:
    """Print the log of a job if the test ends here."""
    try:
        yield
    except BaseException:
        sys.stdout.write(log.read_text() if log.exists() else f"{log}: the job has not started")
        raise


@pytest.mark.parametrize(
    ("before", "code", "requeued"), [(0, 130, True), (1, 130, True), (2, 130, False), (0, 1, False)]
)
def test_a_job_that_was_stopped_goes_back_into_the_queue_but_not_for_ever(tmp_path, before, code, requeued):
    programs = {
        "scontrol": 'case $1 in show) echo "NodeAddr=10.77.0.1 ";; *) echo "$@" >> calls;; esac',
        "getent": "echo 10.77.0.1 STREAM",
        "srun": "exec sleep 600",
        "ray": """echo '"node_id"'""",
        "rlhf": f"echo $RLHF_GRACE_S > grace; trap 'exit {code}' TERM; kill -USR1 $PPID; while :; do sleep 0.05; done",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "a", "SLURM_RESTART_COUNT": str(before)}
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RLHF_RESTARTS": "2", "RLHF_GRACE_S": "400", **job}
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen(
            ["bash", "rlhf.sbatch"], cwd=tmp_path, env=variables, stderr=said, start_new_session=True
        )
    assert child.wait() == code
    os.killpg(child.pid, signal.SIGKILL)  # what Slurm ends with the job
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert (calls == "requeue 7\n") == requeued and (tmp_path / "grace").read_text() == "400\n"
    assert ("RLHF_RESTARTS = 2: job 7 was started again so often" in (tmp_path / "said").read_text()) == (
        code == 130 and not requeued
    )


@pytest.mark.parametrize("given", ["never", "-1", "1.5"])
def test_a_number_of_restarts_that_is_none_ends_the_job_before_it_begins(tmp_path, given):
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    variables = {"PATH": os.environ["PATH"], "RLHF_RESTARTS": given}
    said = subprocess.run(["bash", tmp_path / "rlhf.sbatch"], env=variables, capture_output=True, text=True)
    assert (said.returncode, said.stderr.partition(";")[0]) == (2, f"RLHF_RESTARTS = {given}: must be a whole number")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_a_job_whose_time_is_up_is_queued_again_and_resumes(tmp_path):
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    profile, two, plain, log = write_mini(tmp_path), tmp_path / "two", tmp_path / "plain", tmp_path / "job.out"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "RLHF_HOME": str(tmp_path / "home")}
    with two_nodes() as slurm, shown_if_failed(log):
        submit = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", str(tmp_path / "rlhf.sbatch")]
        job = slurm.run(*submit, *words(profile, two), variables=variables).strip()
        soon(lambda: any(two.glob("attempts/*/work-1/ckpt/step-*")) or slurm.ended(job), within_s=600, every_s=0.3)
        slurm.run("scancel", "--signal=USR1", "--batch", job)  # as Slurm does 180 s before the time is up
        soon(lambda: slurm.field(job, "Restarts") == "1" or slurm.ended(job), within_s=120, every_s=0.3)
        soon(lambda: slurm.ended(job), within_s=600, every_s=0.3)
        assert slurm.field(job, "JobState") == "COMPLETED", log.read_text()
    assert "sft: RESUME: from step " in log.read_text()
    command = [sys.executable, "-m", "pipelines.cli.main", "run", *words(profile, plain)]
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    made = [{one.label: one.handle.digest for one in ArtifactStore(store).records()} for store in (two, plain)]
    assert made[0] == made[1]
    assert "sft" in made[0]
