"""A run by `sbatch` on two nodes of a real Slurm: its time ends, it is queued again, and resumes to the same result."""

import os
import re
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


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "a", "SLURM_JOB_CPUS_PER_NODE": "4"}


def words(profile: Path, store: Path) -> list[str]:
    """Return what follows `rlhf run` for the profile up to `sft`, with a store of its own."""
    pairs = {**CHANGES, "store": store}
    return [
        str(profile),
        "--until",
        "sft",
        *(word for key, value in pairs.items() for word in ("--set", f"{key}={value}")),
    ]


def put_programs(folder: Path, programs: dict[str, str]) -> None:
    """Write programs of Bash, name -> text."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


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
    put_programs(tmp_path, programs)
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RLHF_RESTARTS": "2", "RLHF_GRACE_S": "400", **JOB}
    variables["SLURM_RESTART_COUNT"] = str(before)
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


@pytest.mark.parametrize(
    ("cpus", "gpus", "refused"),
    [("1(x2)", "2", "1"), ("32(x2),3", "4", "3"), ("128,96(x3)", "97", "96"), ("8(x2)", "8", ""), ("4", "", "")],
)
def test_fewer_cpus_than_gpus_end_the_job_before_it_begins(cpus, gpus, refused, tmp_path):
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    put_programs(tmp_path, {"scontrol": "exit 3"})  # the next command: it would go on
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **JOB, "SLURM_JOB_CPUS_PER_NODE": cpus}
    variables |= {"SLURM_GPUS_ON_NODE": gpus} if gpus else {}
    said = subprocess.run(["bash", tmp_path / "rlhf.sbatch"], env=variables, capture_output=True, text=True)
    expected = f"CPUs per node = {refused}: must be at least one for each of the {gpus} GPUs; add to rlhf.sbatch: #SBATCH --exclusive"
    assert (said.returncode, expected in said.stderr) == ((2, True) if refused else (3, False))


def test_a_heterogeneous_job_ends_before_it_begins(tmp_path):
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    variables = {"PATH": os.environ["PATH"], **JOB, "SLURM_HET_SIZE": "2"}
    said = subprocess.run(["bash", tmp_path / "rlhf.sbatch"], env=variables, capture_output=True, text=True)
    assert (said.returncode, said.stderr.partition(",")[0]) == (2, "SLURM_HET_SIZE = 2: must be 1")


@pytest.mark.parametrize(("lent", "asked"), [("2", ["--gpus-per-node=2"]), ("", [])])
def test_each_step_names_the_gpus_of_its_nodes_however_the_job_asked_for_them(lent, asked, tmp_path):
    programs = {
        "scontrol": 'echo "NodeAddr=10.77.0.1 "',
        "getent": "echo 10.77.0.1 STREAM",
        "srun": f"(echo $*; env) > {tmp_path}/said; mv {tmp_path}/said {tmp_path}/step; exec sleep 600",
        "ray": """echo '"node_id"'""",
        "rlhf": f"until [ -f {tmp_path}/step ]; do sleep 0.05; done",
    }
    put_programs(tmp_path, programs)
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    of_the_job = dict.fromkeys(("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"), "1")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **JOB, **of_the_job}
    variables |= {"SLURM_GPUS_ON_NODE": lent} if lent else {}
    child = subprocess.Popen(["bash", "rlhf.sbatch"], cwd=tmp_path, env=variables, start_new_session=True)
    assert child.wait() == 0
    os.killpg(child.pid, signal.SIGKILL)  # what Slurm ends with the job
    words, *environment = (tmp_path / "step").read_text().splitlines()
    assert [word for word in words.split() if word.startswith("--gpus")] == asked
    assert not {line.partition("=")[0] for line in environment} & of_the_job.keys()


@pytest.mark.slow
@pytest.mark.services
def test_a_job_has_all_cpus_and_memory_of_its_nodes_and_their_gpus(tmp_path):
    """On a Slurm that gives a job one CPU and 500 MB of a node with 2 and 4000 if it asks for no more."""
    assert main(["scaffold", "slurm", "--out", str(tmp_path)]) == 0
    nodes_up = "if [ $1 = list ]; then sed 's/.*/\"node_id\"/' started; exit; fi"
    start = 'echo "$SLURMD_NODENAME $SLURM_GPUS_ON_NODE $*" >> started; exec sleep 600'
    programs = {"ray": f"{nodes_up}\n{start}", "rlhf": "true"}
    put_programs(tmp_path, programs)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", f"--chdir={tmp_path}"]
    text = (tmp_path / "rlhf.sbatch").read_text()
    [other] = re.findall(
        r"^##(SBATCH --mem-per-gpu=)\d+G$", text, re.MULTILINE
    )  # commented out beside the one that it replaces
    (tmp_path / "per_gpu.sbatch").write_text(text.replace("#SBATCH --mem=0\n", f"#{other}1G\n"))
    with two_nodes() as slurm:
        for accepted in (["--mem=1G", "rlhf.sbatch"], ["per_gpu.sbatch"], ["--mem-per-gpu=500M", "per_gpu.sbatch"]):
            slurm.run(*submit, "--test-only", *accepted[:-1], f"{tmp_path}/{accepted[-1]}")
        with pytest.raises(AssertionError, match="mutually exclusive"):
            slurm.run(*submit, "--test-only", "--mem-per-gpu=1G", f"{tmp_path}/rlhf.sbatch")
        jobs = [
            slurm.run(*submit, f"--output={tmp_path}/{number}", *more, f"{tmp_path}/rlhf.sbatch", variables=variables)
            for number, more in enumerate(([], ["--oversubscribe", "--mem=100"]))
        ]
        whole, part = (job.strip() for job in jobs)
        for job in (whole, part):
            soon(lambda job=job: slurm.ended(job), within_s=120, every_s=0.3)
        assert slurm.field(whole, "JobState") == "COMPLETED", (tmp_path / "0").read_text()
        assert slurm.field(whole, "TRES").startswith("cpu=4,mem=8000M,node=2,")
        assert slurm.field(part, "ExitCode") == "2:0"
    assert "CPUs per node = 1: must be at least one for each of the 2 GPUs" in (tmp_path / "1").read_text()
    started = [line.split(" ", 2) for line in (tmp_path / "started").read_text().splitlines()]
    assert {node for node, *_ in started} == set(slurm.nodes)
    assert all(gpus == "2" and "--num-cpus=2 " in words for _, gpus, words in started)


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
