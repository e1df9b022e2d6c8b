"""The whole seam with real engines, on one Ray: vLLM and a trainer, and two DeepSpeed ranks."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig, TrainerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.runtime import HFSamplerConfig, PoolConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError, SamplingError, TrainingError
from rlhf_core.interfaces import ModelSpec, Trainer, logprob_rows
from rlhf_core.models.initialize import initialize_llama
from rlhf_core.runtime.connection import ray_folder
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.runtime.placement import reserve
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import SamplingRequest, TokenSample
from tests.support.policies import TWO_RANKS
from tests.support.sharing import SharedRay

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # the first of them starts what all share

REQUESTS = [SamplingRequest(tuple(range(10, 13 + index % 5)), seed=index) for index in range(16)]
SAMPLING = SamplingConfig(max_tokens=16)
SAMPLES = [TokenSample(tuple(range(10, 40)), (0,) * 4 + (1,) * 26)]
CONFIG = RuntimeConfig(
    worker_timeout_s=400,
    cpu_threads=1,
    pools={"judges": PoolConfig(workers=2, roles=("reference", "value_model"), micro_batch=1)},
    trainer=TrainerConfig(engine="torch"),
    sampler=VllmSamplerConfig(max_model_len=96, kv_cache_gib=0.25, engines=2),  # as the tiny profiles have
)


@pytest.fixture(scope="module")
def runtime(shared_ray: SharedRay) -> Iterator[RayRuntime]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with contextlib.closing(RayRuntime(CONFIG)) as runtime:  # one of its trainers is killed
        runtime.prewarm(trainer=True, sampler=True)
        yield runtime


def spec(policy: Path) -> ModelSpec:
    return ModelSpec(str(policy), "lm", None, 0)


def pids(runtime: RayRuntime) -> tuple[int, int]:
    return runtime._train_workers().call("test", "pid")[0], runtime._sample_workers().call("test", "pid")[0]


def needless(runtime: RayRuntime) -> set[str]:
    """Large packages that a train worker has imported, although neither the plain engine nor a frozen model uses them."""
    actors = [actor for group in runtime._train.values() for actor in group.actors]
    loaded = ray.get([actor.__ray_call__.remote(lambda self: list(sys.modules)) for actor in actors])
    assert loaded and all("transformers" in names for names in loaded)
    return {name for names in loaded for name in names} & {"deepspeed", "sklearn"}


def test_a_ray_of_our_own_and_its_workers_serve_this_machine_alone(runtime, policies):
    with runtime.trainer("policy", spec(policies[0]), None), runtime.sampler(policies[0]):
        listening = {
            (process.name().partition(".")[0], connection.laddr.ip.removeprefix("::ffff:"))
            for process in psutil.Process().children(recursive=True)
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        closed = ray_folder().parent  # Ray opens the one below it to everybody
        assert ray_folder().is_dir() and closed.stat().st_mode & 0o777 == 0o700
    assert {"raylet", "gcs_server", "ray::TrainWorker", "ray::SampleWorker"} <= {name for name, _ in listening}
    assert {ip for _, ip in listening} == {"127.0.0.1"}
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "monitor.py" in command], "nobody needs autoscaler and log monitor"
    # `ray.shutdown` closes what this thread reads, which ended the process with SIGSEGV after the loss of a head.
    assert "ray_listen_error_messages" not in {thread.name for thread in threading.enumerate()}
    assert not (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077


def test_models_in_a_pool_have_workers_of_their_own_which_compute_at_the_same_time(shared_ray, policies):
    pooled = RayRuntime(CONFIG.model_copy(update={"trainer": TrainerConfig(engine="deepspeed")}))
    meet = threading.Barrier(2, timeout=60)
    try:
        with (
            pooled.trainer("policy", spec(policies[0]), None) as policy,
            pooled.trainer("reference", spec(policies[0]), None) as reference,
        ):
            found = pooled.together(
                lambda: (meet.wait(), logprob_rows(policy, SAMPLES * 3))[1],
                lambda: (meet.wait(), logprob_rows(reference, SAMPLES * 3))[1],
            )
            used = {name: set(group.call("test", "pid")) for name, group in pooled._train.items()}
            assert not needless(pooled)  # its models are frozen
        assert found[0] == [pytest.approx(row, abs=1e-5) for row in found[1]]
        assert {name: len(each) for name, each in used.items()} == {"": 1, "judges": 2}
        assert not used[""] & used["judges"]
    finally:
        pooled.close()


def test_a_trained_policy_reaches_the_engine_which_then_agrees_with_the_trainer(runtime, policies, tmp_path):
    with (
        runtime.trainer("policy", spec(policies[0]), OptimizerConfig()) as trainer,
        runtime.sampler(policies[0]) as sampler,
    ):
        before = sampler.generate(REQUESTS, SAMPLING)
        losses = []
        for _ in range(4):
            losses.append(trainer.forward_backward(SAMPLES, SftObjective(pack_to=None))["loss"])
            trainer.optim_step(learning_rate=3e-3)
        assert losses[3] < losses[0] - 0.5
        assert not needless(runtime)  # its engine is torch
        sampler.load_weights(trainer.weights(), version=4)
        after = sampler.generate(REQUESTS, SAMPLING)
        assert {completion.policy_version for completion in after} == {4}
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        sequences = [(request.prompt_ids, completion) for request, completion in zip(REQUESTS, after, strict=True)]
        samples = [
            TokenSample(prompt + c.token_ids, (0,) * len(prompt) + (1,) * len(c.token_ids)) for prompt, c in sequences
        ]
        for (prompt, completion), logprobs in zip(sequences, logprob_rows(trainer, samples), strict=True):
            # 2e-3 is what the importance ratio of an unchanged policy may be off by; fp32 is far below it.
            assert logprobs[len(prompt) :] == pytest.approx(completion.logprobs, abs=2e-3)
        trainer.export(tmp_path / "policy")
    with runtime.sampler(tmp_path / "policy") as sampler:  # the exported policy is the one that was sampled
        exported = sampler.generate(REQUESTS, SAMPLING)
    assert [(c.token_ids, c.logprobs) for c in exported] == [(c.token_ids, c.logprobs) for c in after]
    assert runtime.engines().keys() == {"ray", "torch", "transformers", "vllm"}


def test_a_second_sampler_lease_is_refused_while_the_first_is_open(runtime, policies):
    with (
        runtime.sampler(policies[0]),
        pytest.raises(SamplingError, match="already leased"),
        runtime.sampler(policies[0]),
    ):
        pass


def test_workers_stay_warm_between_leases_and_change_their_policy(runtime, policies, tmp_path):
    before = pids(runtime)
    tokens = []
    for policy in (policies[0], policies[1], policies[0]):
        with runtime.sampler(policy) as sampler:
            tokens.append([completion.token_ids for completion in sampler.generate(REQUESTS, SAMPLING)])
    assert tokens[0] == tokens[2] != tokens[1]
    wider = _policy_of_another_shape(policies[0], tmp_path)
    with runtime.sampler(wider) as sampler:  # a new engine in the same process; no later test needs the former one
        assert len(sampler.generate(REQUESTS, SAMPLING)) == 16
    assert pids(runtime) == before


def test_a_killed_trainer_is_an_error_in_bounded_time_and_the_next_lease_works(runtime, policies):
    victim = pids(runtime)[0]
    start = time.monotonic()
    with (
        pytest.raises(TrainingError, match=r"trainer\.policy = 'forward_backward on worker 0': the worker died"),
        runtime.trainer("policy", spec(policies[0]), OptimizerConfig()) as trainer,
    ):
        os.kill(victim, signal.SIGKILL)
        trainer.forward_backward(SAMPLES, SftObjective(pack_to=None))
    assert time.monotonic() - start < 60
    with runtime.trainer("policy", spec(policies[0]), OptimizerConfig()) as trainer:
        assert trainer.forward_backward(SAMPLES, SftObjective(pack_to=None))["loss"] > 0
    assert pids(runtime)[0] != victim


CLOSING = """
import psutil, sys
from pathlib import Path
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
from rlhf_core.runtime.connection import ray_folder
from rlhf_core.runtime.ray_runtime import RayRuntime
runtime = RayRuntime(RuntimeConfig(trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig()))
with runtime.sampler(Path(sys.argv[1])):
    started = psutil.Process().children(recursive=True)
runtime.close()
_, alive = psutil.wait_procs(started, timeout=20)
sys.exit(f"{alive}" if alive or len(started) < 3 else 0)
"""


def test_closing_leaves_no_process_behind(policies):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, policies[0]], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _policy_of_another_shape(policy: Path, folder: Path) -> Path:
    wider = Path(shutil.copytree(policy, folder / "wider"))
    shape = InitModel(
        vocab_size=320, hidden_size=128, layers=1, heads=2, kv_heads=2, intermediate_size=384, max_positions=96
    )
    initialize_llama(shape, wider, seed=3)
    return wider


UNEQUAL = [TokenSample(tuple(range(10, 16 + 3 * i)), (0, 0) + (1,) * (4 + 3 * i)) for i in range(7)]
"""Seven samples of unequal lengths: the ranks get four and three, and different numbers of tokens."""


@pytest.fixture(scope="module")
def trainers(shared_ray: SharedRay, policies: tuple[Path, Path]) -> Iterator[tuple[Trainer, Trainer]]:
    """The same policy on two ranks of DeepSpeed and in this process."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    two = shared_ray.runtime(TWO_RANKS)
    one = LocalRuntime(RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig()))
    spec = ModelSpec(str(policies[0]), "lm", None, 0)
    with two.trainer("policy", spec, OptimizerConfig()) as ranks:
        assert two.engines().keys() - {"vllm"} == {"ray", "torch", "transformers", "deepspeed"}
        with one.trainer("policy", spec, OptimizerConfig()) as alone:
            yield ranks, alone


def test_results_per_sample_come_back_in_order(trainers):
    ranks, alone = (logprob_rows(trainer, UNEQUAL) for trainer in trainers)
    for got, expected in zip(ranks, alone, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)


def test_steps_on_two_ranks_are_steps_on_the_whole_batch(trainers):
    for _ in range(3):
        for name in ("forward_backward", "loss"):
            ranks, alone = (getattr(trainer, name)(UNEQUAL, SftObjective(pack_to=None)) for trainer in trainers)
            assert ranks == pytest.approx(alone, rel=1e-4)
        ranks, alone = (trainer.optim_step(learning_rate=1e-3) for trainer in trainers)
        assert ranks == pytest.approx(alone, rel=1e-4)


def test_gpus_that_the_cluster_lacks_are_counted_before_anything_starts(shared_ray):
    config = RuntimeConfig(train_workers=3000, gpus_per_train_worker=1, gpus_per_engine=0.5)
    with pytest.raises(
        ConfigError,
        match=r"3000\.5 GPUs and .* are needed, .*; a Ray cluster that rlhf has started does not grow; use fewer",
    ):
        reserve(config, fixed=True)
