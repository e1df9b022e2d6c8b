"""A Slurm of two nodes on this machine, for tests: each in a network namespace with an address of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.forks import soon

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")
# A job gets one CPU, 500 MB and no GPU of a node unless it asks for more, as on many clusters. GPUs are files that exist.
# `cred_expire` is also the pause before a job that was put back into the queue starts again; 120 s otherwise.
CONFIGURATION = """
ClusterName=rlhf
SlurmctldHost=HEAD(10.77.0.1)
SlurmUser=root
SlurmctldPort=16817
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=SCRATCH/munge.sock,cred_expire=10
StateSaveLocation=SCRATCH/state
SlurmdSpoolDir=SCRATCH/%n.spool
SlurmctldPidFile=SCRATCH/controller.pid
SlurmdPidFile=SCRATCH/%n.pid
SlurmctldLogFile=SCRATCH/controller.log
SlurmdLogFile=SCRATCH/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MailProg=/bin/true
NodeName=HEAD NodeAddr=10.77.0.1 Port=16821 CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=OTHER NodeAddr=10.77.0.2 Port=16822 CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=HEAD,OTHER Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Slurm:
    """Two nodes. Commands such as `sbatch` run on the first, `nodes[0]`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = tuple(f"rlhf{os.getpid()}n{number}" for number in (1, 2))
        self._stack = ExitStack()

    def run(self, *words: str, variables: dict[str, str] | None = None) -> str:
        """Return what a command prints on the first node; raise if it fails."""
        inside = ["nsenter", f"--net=/var/run/netns/{self.nodes[0]}", *words]
        environment = {**(variables or os.environ), "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(inside, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Return a field of a job as `scontrol show job` has it, such as JobState or Restarts."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def ended(self, job: str) -> bool:
        """Return whether a job has ended and will not start again."""
        ended = self.field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return ended or self.field(job, "Reason") == "launch_failed_requeued_held"

    def _daemon(self, *words: str) -> None:
        with (self.folder / "daemons.out").open("ab") as log:
            daemon = subprocess.Popen(words, stdout=log, stderr=log)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.kill)  # with it goes its PID namespace, and the jobs in that

    def _networks(self) -> None:
        first, other = self.nodes
        for node in self.nodes:
            subprocess.run(["ip", "netns", "add", node], check=True)
            self._stack.callback(subprocess.run, ["ip", "netns", "del", node], check=True)
        pair = ["ip", "link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", other]
        subprocess.run(pair, check=True)
        for number, node in enumerate(self.nodes, start=1):
            for words in (f"addr add 10.77.0.{number}/24 dev cable", "link set cable up", "link set lo up"):
                subprocess.run(["ip", "-n", node, *words.split()], check=True)

    def start(self) -> None:
        """Start munge, the controller and both nodes, and wait until the nodes are idle."""
        scratch = self.folder
        for name in ("state", *(f"{node}.spool" for node in self.nodes)):
            (scratch / name).mkdir(parents=True)
        text = CONFIGURATION.replace("SCRATCH", str(scratch)).replace("HEAD", self.nodes[0])
        (scratch / "slurm.conf").write_text(text.replace("OTHER", self.nodes[1]))
        (scratch / "gres.conf").write_text(f"NodeName={','.join(self.nodes)} Name=gpu File={scratch}/gpu[0-1]\n")
        for number in range(2):
            (scratch / f"gpu{number}").touch()
        key = scratch / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": key, "socket": scratch / "munge.sock", "pid-file": scratch / "munge.pid"}
        files |= {"log-file": scratch / "munge.log", "seed-file": scratch / "munge.seed"}
        self._networks()
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        soon(files["socket"].exists, within_s=30)
        programs = [(self.nodes[0], "slurmctld -D"), *((node, f"slurmd -D -N {node}") for node in self.nodes)]
        for node, program in programs:
            # Not `ip netns exec`, which hides /sys/fs/cgroup. With a PID namespace each node sees its processes alone.
            inside = [*("nsenter", f"--net=/var/run/netns/{node}"), *("unshare", "--uts", "--pid", "--fork")]
            shell = f"hostname {node}; exec {program} -f {scratch}/slurm.conf"
            self._daemon(*inside, "--kill-child", "--mount-proc", "sh", "-c", shell)
        soon(
            lambda: self.run("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"],
            within_s=120,
            every_s=0.3,
        )

    def stop(self) -> None:
        """End all jobs and daemons, and remove the networks."""
        self._stack.close()


@contextmanager
def two_nodes() -> Iterator[Slurm]:
    """Yield a Slurm of two nodes; skip the test where it cannot run.

    Its folder has a short name: sockets of jobs are in it, whose paths may have 107 characters.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's slurm-wlm, munge, iproute2 and util-linux; missing: {missing or 'root'}")
    with TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        except BaseException:
            sys.stdout.write((slurm.folder / "daemons.out").read_text(errors="replace"))
            raise
        finally:
            slurm.stop()
