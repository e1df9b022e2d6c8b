"""The steps of the first day on a GPU. Each takes a place and a dictionary for measurements; raises if a check fails.

On a CPU the same code runs with Gloo for NCCL, host memory for CUDA IPC, and models of a few layers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.random_policy import VOCABULARY, make_policy

Device = Literal["cuda", "cpu"]
Figures = dict[str, Any]
SEEDS = (17, 18, 19)
GIB = 1 << 30
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "ray")
MISMATCH = 1e-2
"""Maximum mean difference, in nats per token, between engine and trainer log-probs of sampled tokens in bfloat16."""
EXACT = 1e-2
"""Maximum difference in float32, where GPU kernels of different programs sum in different orders."""


@dataclass(frozen=True)
class Place:
    """Where steps run: the device, the results folder, and an interpreter with TRL, or "". `thorough`: all seeds."""

    device: Device
    folder: Path
    trl_python: str = ""
    thorough: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Step:
    """One step; `never_on_cpu` names the parts that only a GPU can show, without `on_cpu` that is the whole step."""

    name: str
    says: str
    run: Callable[[Place, Figures], None]
    timeout_s: float = 600.0
    never_on_cpu: str = ""
    on_cpu: bool = True


class CheckFailed(Exception):
    """A measurement violates a required condition."""


def check(holds: bool, rule: str) -> None:
    """Raise CheckFailed with the violated rule."""
    if not holds:
        raise CheckFailed(rule)


# ---------------------------------------------------------------- imports


def imports(place: Place, figures: Figures) -> None:
    """Import the engines, and add numbers in a group of one rank."""
    import torch

    from rlhf_core.sampling.vllm_engine import platform
    from rlhf_core.training.state import join, local_device

    settings = (
        "CUBLAS_WORKSPACE_CONFIG",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "VLLM_USE_V2_MODEL_RUNNER",
        "RAY_ADDRESS",
    )
    figures["environment"] = {name: os.environ.get(name, "unset") for name in settings}
    figures["versions"] = {name: version(name) for name in PACKAGES}
    figures["python"] = sys.version.split()[0]
    if place.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        figures["gpu"] = (
            f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {torch.cuda.device_count()} of them"
        )
        figures["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(0))
        figures["cuda"] = torch.version.cuda
    join()
    backend = torch.distributed.get_backend()
    figures["backend"] = backend
    numbers = torch.arange(8.0, device=local_device())
    torch.distributed.all_reduce(numbers)
    check(numbers.tolist() == list(range(8)), f"all_reduce of one rank gave {numbers.tolist()}")
    check(backend == ("nccl" if place.on_gpu else "gloo"), f"the process group is of {backend}")
    figures["vllm is built for"] = platform()
    check(platform() == place.device, f"vLLM is built for {platform()}, and the device is {place.device}")


def version(package: str) -> str:
    """The version of an installed package; the CPU build of vLLM has a separate name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return importlib.metadata.version(f"{package}-cpu")


# ---------------------------------------------------------------- training


def train(place: Place, figures: Figures) -> None:
    """Make steps in bfloat16 under each ZeRO stage; they must follow float32, and the loss must fall."""
    from rlhf_core.config.engines import TrainerConfig
    from rlhf_core.config.models import LoraConfig

    bf16 = {"dtype": "bfloat16"}
    settings: dict[str, dict[str, Any]] = {
        "float32": {"engine": "torch"},
        "bfloat16": {"engine": "torch", **bf16},
        **{f"ZeRO {stage}": {"zero_stage": stage, **bf16} for stage in (1, 2, 3)},
        "ZeRO 3, offloaded": {"zero_stage": 3, "offload_optimizer": True, **bf16},
        "ZeRO 1, checkpointed": {"zero_stage": 1, "gradient_checkpointing": True, **bf16},
    }
    with tempfile.TemporaryDirectory() as folder:
        policy = small_policy(Path(folder))
        losses = {name: five_losses(policy, TrainerConfig.model_validate(one)) for name, one in settings.items()}
        adapters = five_losses(policy, TrainerConfig(zero_stage=1, dtype="bfloat16"), lora=LoraConfig(rank=8))
    figures["last loss"] = {name: row[-1] for name, row in losses.items()} | {"LoRA": adapters[-1]}
    check(adapters[-1] < adapters[0], f"with adapters the loss does not fall: {adapters}")
    for name, row in losses.items():
        apart = max(abs(mine / exact - 1) for mine, exact in zip(row, losses["float32"], strict=True))
        check(apart < 3e-2, f"{name} leaves float32 by {apart:.1%}: {row}")  # 8 bits of mantissa
        check(row[-1] < row[0] - 0.1, f"{name}: the loss does not fall: {row}")


def five_losses(policy: Path, config: Any, lora: Any = None) -> list[float]:
    """Losses of five steps on the same rows."""
    from rlhf_core.config.engines import OptimizerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.training.objectives.base import SftObjective
    from rlhf_core.training.trainer import LocalTrainer

    rows = [row(range(10, 30 + index), 4) for index in range(6)]
    losses = []
    with contextlib.closing(LocalTrainer(ModelSpec(str(policy), "lm", lora, 0), OptimizerConfig(), config)) as trainer:
        for _ in range(5):
            losses.append(trainer.forward_backward(rows, SftObjective(pack_to=None))["loss"])
            trainer.optim_step(learning_rate=1e-3)
    return losses


MEMORY_CASES = (
    "sft-zero1-bf16",
    "sft-zero2-bf16",
    "sft-zero3-bf16",
    "sft-zero1-bf16-checkpointing",
    "dpo-lora-zero3-bf16",
)


def memory(place: Place, figures: Figures) -> None:
    """Compare the peak of a training step with the planner's, which must not be less by more than 15 %."""
    from benchmarks.planner import measured_moments, predicted

    model = "0.1M"
    if place.on_gpu:
        model = "1B" if gpu_memory() >= 70 * GIB else "160M"
    too_small = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MEMORY_CASES if place.on_gpu else MEMORY_CASES[-2:]:
            measured = measured_moments(name, Path(folder), model=model, device=place.device)["train"]
            foreseen = sum(predicted(name, model=model, device=place.device)["train"].values()) / 2**20
            figures[name] = {"measured MiB": measured, "predicted MiB": foreseen}
            if place.on_gpu and measured > 1.15 * foreseen:
                too_small.append(name)
    check(not too_small, f"the planner's number is too small for {too_small}")


def gpu_memory() -> int:
    """The memory of the GPU in bytes."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def throughput(place: Place, figures: Figures) -> None:
    """Measure a step of training at a real vocabulary: deterministic or not, rows padded or packed."""
    import torch

    from benchmarks.own_sides import token_sample
    from benchmarks.train_step import Size, rows_of, work
    from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.training.objectives.base import SftObjective
    from rlhf_core.training.trainer import LocalTrainer

    mean, longest = (512, 2048) if place.on_gpu else (32, 64)
    peak = matmul_flops(place)
    figures["matmul TFLOP/s"] = peak / 1e12
    with tempfile.TemporaryDirectory() as name:
        policy = Path(name)
        if place.on_gpu:
            make_policy(policy, 2048, 16, positions=longest, vocabulary=128_256)
        else:
            make_policy(policy, 128, 2, positions=longest, vocabulary=2048)
        size = Size(policy, rows=32 if place.on_gpu else 8, mean=mean, longest=longest, micro_batch=4)
        rows = rows_of(size, "sft", "mixed")
        tokens, flops = work(size, rows, shares=False)  # no prompt occurs twice
        samples = [token_sample(one, "answer_ids") for one in rows]
        config = TrainerConfig(dtype="bfloat16", zero_stage=1, micro_batch=4, gradient_checkpointing=True)
        with contextlib.closing(LocalTrainer(ModelSpec(name, "lm", None, 17), OptimizerConfig(), config)) as trainer:

            def step(pack_to: int | None) -> None:
                trainer.forward_backward(samples, SftObjective(pack_to=pack_to))
                trainer.optim_step(learning_rate=1e-5)

            for deterministic in (True, False):
                torch.use_deterministic_algorithms(deterministic, warn_only=place.on_gpu)
                for pack_to in (None, longest):
                    seconds = median_seconds(partial(step, pack_to))
                    kind = "packed" if pack_to else "padded"
                    figures[f"{kind}, {'deterministic' if deterministic else 'any order'}"] = {
                        "tokens/s": tokens / seconds, "MFU": flops / seconds / peak,
                    }  # fmt: skip


def matmul_flops(place: Place) -> float:
    """Measure the operations per second of a large product in bfloat16."""
    import torch

    size = 8192 if place.on_gpu else 512
    one = torch.randn(size, size, dtype=torch.bfloat16, device=place.device)

    def multiply() -> None:
        one @ one
        if place.on_gpu:
            torch.cuda.synchronize()

    return 2 * size**3 / median_seconds(multiply, repeats=9)


def median_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of `work`, after one call to warm up."""
    work()
    taken = []
    for _ in range(repeats):
        clock = time.perf_counter()
        work()
        taken.append(time.perf_counter() - clock)
    return statistics.median(taken)


# ---------------------------------------------------------------- sampling


def generate(place: Place, figures: Figures, *, dtype: Literal["float32", "bfloat16"], graphs: bool) -> None:
    """Sample with vLLM; its log-probabilities must equal the trainer's, and the same seeds must repeat the tokens."""
    from rlhf_core.config.engines import SamplingConfig, TrainerConfig
    from rlhf_core.config.runtime import VllmSamplerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.runtime.samplers import open_sampler
    from rlhf_core.training.trainer import LocalTrainer

    answers, length = (256, 128) if place.on_gpu else (8, 8)
    requests = requests_of(answers)
    config = VllmSamplerConfig(
        max_model_len=length + 32, dtype=dtype, enforce_eager=not graphs, gpu_memory_fraction=0.3, kv_cache_gib=0.25
    )
    with tempfile.TemporaryDirectory() as name:
        policy = small_policy(Path(name))
        sampler: Any = open_sampler(policy, config, threads=1, transfer="")
        with contextlib.closing(sampler):
            figures["model runner"] = sampler._llm.collective_rpc(runner_of)[0]
            sampler.generate(requests[:4], SamplingConfig(max_tokens=4))
            clock = time.perf_counter()
            first = sampler.generate(requests, SamplingConfig(max_tokens=length))
            figures["tokens/s"] = sum(len(one.token_ids) for one in first) / (time.perf_counter() - clock)
            again = sampler.generate(requests, SamplingConfig(max_tokens=length))
        trainer = LocalTrainer(ModelSpec(name, "lm", None, 0), None, TrainerConfig(dtype=dtype))
        apart = differences(trainer, requests, first)
    figures["mismatch"] = {"mean": statistics.fmean(apart), "largest": max(apart)}
    check([one.token_ids for one in first] == [one.token_ids for one in again], "the same seeds gave other tokens")
    check(len({tuple(one.token_ids) for one in first}) > answers // 2, "other seeds gave the same tokens")
    limit = figures["mismatch"]["largest"] < EXACT if dtype == "float32" else figures["mismatch"]["mean"] < MISMATCH
    check(limit, f"vLLM and the trainer disagree: {figures['mismatch']}")


def runner_of(worker: Any) -> str:
    """The module of a vLLM worker's model runner; V2 is the default on GPUs, and never runs on CPUs."""
    return type(worker.model_runner).__module__


def requests_of(count: int) -> list[Any]:
    """Prompts of some lengths, with seeds."""
    from rlhf_core.types import SamplingRequest, ids

    return [SamplingRequest(ids(range(10, 13 + index % 5)), seed=index) for index in range(count)]


def differences(trainer: Any, requests: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    """Differences between trainer and engine log-probabilities of each sampled token."""
    from rlhf_core.interfaces import logprob_rows

    samples = [
        row([*request.prompt_ids, *one.token_ids], len(request.prompt_ids))
        for request, one in zip(requests, completions, strict=True)
    ]
    rows = logprob_rows(trainer, samples)
    return [
        abs(ours - theirs)
        for request, one, mine in zip(requests, completions, rows, strict=True)
        for ours, theirs in zip(mine[len(request.prompt_ids) :], one.logprobs, strict=True)
    ]


def row(tokens: Sequence[int], prompt: int) -> Any:
    """A sample whose first `prompt` tokens are not trained on."""
    from rlhf_core.types import TokenSample, ids, mask

    return TokenSample(ids(list(tokens)), mask([0] * prompt + [1] * (len(tokens) - prompt)))


def small_policy(folder: Path) -> Path:
    """Write a random Llama with a head size that vLLM's kernels support."""
    make_policy(folder, 128, 2, positions=256)
    return folder


# ---------------------------------------------------------------- trainer and engine on one GPU


def sync(place: Place, figures: Figures) -> None:
    """Send trained weights, one tensor above 1 GiB, to an engine on the same GPU: log-probs of both must then agree."""
    large = place.on_gpu and gpu_memory() >= 40 * GIB
    with tempfile.TemporaryDirectory() as name:
        make_policy(Path(name), 1024 if large else 128, 2, positions=96, vocabulary=300_000 if large else VOCABULARY)
        figures["largest tensor MiB"] = (300_000 * 1024 if large else VOCABULARY * 128) * 4 / 2**20
        figures |= synced(Path(name), place, transfer="ipc" if place.on_gpu else "")


def experts(place: Place, figures: Figures) -> None:
    """Send a trained mixture of experts, whose weights the engine joins and packs."""
    import torch
    from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as name:
        dense = LlamaConfig.from_pretrained(small_policy(Path(name)))
        torch.manual_seed(17)
        shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        shape |= {"head_dim": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        tokens = {kind: getattr(dense, kind) for kind in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(max_position_embeddings=96, **shape, **tokens)).save_pretrained(name)
        figures |= synced(Path(name), place, transfer="ipc" if place.on_gpu else "")


def adapters(place: Place, figures: Figures) -> None:
    """Send only the adapters."""
    with tempfile.TemporaryDirectory() as name:
        figures |= synced(small_policy(Path(name)), place, transfer="", alone=True)


def synced(
    policy: Path, place: Place, *, transfer: str, gpus: float = 0.5, engines: int = 1, alone: bool = False
) -> dict[str, float]:
    """Train and send twice; returns the seconds, and the largest remaining difference of log-probabilities."""
    from rlhf_core.config.engines import SamplingConfig

    requests = requests_of(16)
    largest, seconds = 0.0, []
    with shared(policy, place, gpus=gpus, engines=engines, alone=alone) as (runtime, trainer, engine):
        check(runtime._transfer() == transfer, f"weights would go by {runtime._transfer()!r}, not {transfer!r}")
        for number in (1, 2):
            one_step(trainer)
            clock = time.perf_counter()
            engine.load_weights(trainer.weights(), version=number)
            seconds.append(time.perf_counter() - clock)
            completions = engine.generate(requests, SamplingConfig(max_tokens=16))
            check({one.policy_version for one in completions} == {number}, "answers have another version")
            largest = max(largest, *differences(trainer, requests, completions))
        # A step moves log-probabilities by tenths of a nat, so the previous weights would be far outside.
        check(largest < EXACT, f"after a sync, engine and trainer differ by {largest:.2g}")
    return {"seconds of a sync": min(seconds), "largest difference": largest}


def sleep(place: Place, figures: Figures) -> None:
    """Give the engine's memory to the trainer and back; answers must stay the same, and weights must still arrive."""
    from rlhf_core.config.engines import SamplingConfig

    requests, sampling = requests_of(16), SamplingConfig(max_tokens=16)
    with tempfile.TemporaryDirectory() as name:
        policy = small_policy(Path(name))
        with shared(policy, place, sleep=place.on_gpu) as (_, trainer, engine):
            before = engine.generate(requests, sampling)
            awake = free_memory(place)
            one_step(trainer)
            figures["GiB given back"] = (free_memory(place) - awake) / GIB
            # Most of the 0.3 that the engine may have is its KV cache.
            enough = not place.on_gpu or figures["GiB given back"] > 0.2 * gpu_memory() / GIB
            check(enough, f"the engine gave back {figures['GiB given back']:.1f} GiB")
            again = engine.generate(requests, sampling)
            check([one.token_ids for one in again] == [one.token_ids for one in before], "other answers after sleep")
            engine.expect_weights()  # it may drop its weights
            one_step(trainer)
            engine.load_weights(trainer.weights(), version=1)
            apart = max(differences(trainer, requests, engine.generate(requests, sampling)))
            figures["largest difference"] = apart
    check(apart < EXACT, f"weights that were sent after sleep differ by {apart:.2g}")


@contextlib.contextmanager
def shared(
    policy: Path, place: Place, *, gpus: float = 0.5, engines: int = 1, sleep: bool = False, alone: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """Open a runtime, a trainer and an engine in float32; with half a GPU each, they share one.

    With `alone`, the trainer has adapters, and the engine receives only these.
    """
    from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
    from rlhf_core.config.models import LoraConfig
    from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.runtime.ray_runtime import RayRuntime

    part = gpus if place.on_gpu else 0
    config = RuntimeConfig(
        cpu_threads=0 if place.on_gpu else 1,
        gpus_per_train_worker=part,
        gpus_per_engine=part,
        trainer=TrainerConfig(engine="torch"),
        sampler=VllmSamplerConfig(
            max_model_len=96,
            gpu_memory_fraction=0.3,
            kv_cache_gib=0.25,
            sleep=sleep,
            engines=engines,
            lora_sync="adapter" if alone else "merged",
        ),
    )
    lora = LoraConfig(target_modules="all-linear") if alone else None
    runtime = RayRuntime(config)
    try:
        # The engine first, because it measures the free memory when it starts.
        with (
            runtime.sampler(policy) as engine,
            runtime.trainer("policy", ModelSpec(str(policy), "lm", lora, 0), OptimizerConfig()) as trainer,
        ):
            yield runtime, trainer, engine
    finally:
        runtime.close()


def one_step(trainer: Any) -> None:
    """Take a large optimizer step."""
    from rlhf_core.training.objectives.base import SftObjective

    trainer.forward_backward([row(range(10, 40), 4)], SftObjective(pack_to=None))
    trainer.optim_step(learning_rate=3e-3)


def free_memory(place: Place) -> int:
    """The free memory of the GPU in bytes."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if place.on_gpu else 0


# ---------------------------------------------------------------- policy optimization


def short_is_good(generations: Sequence[Any]) -> list[float]:
    """Reward short answers; a random policy's answers differ in length, so some are better than others."""
    return [-len(one.completion.token_ids) / 16 for one in generations]


def policy_steps(place: Place, figures: Figures, *, settings: Mapping[str, Any]) -> None:
    """Take a few steps in bfloat16, engine and trainer on one GPU: the first KL must be 0, and both must agree."""
    from benchmarks.arms import logged
    from pipelines import run

    on_gpu = {
        "runtime.gpus_per_train_worker": 0.5,
        "runtime.gpus_per_engine": 0.5,
        "runtime.sampler.gpu_memory_fraction": 0.3,
    }
    on_cpu = {"runtime.cpu_threads": 1, "ppo.steps": 2}
    for seed in SEEDS if place.on_gpu and place.thorough else SEEDS[:1]:
        overrides = {**settings, **(on_gpu if place.on_gpu else on_cpu), "seed": seed}
        with tempfile.TemporaryDirectory() as home:
            ran = run(Path(__file__).with_name("rl.toml"), overrides=overrides, home=Path(home))["ppo"]
            kl, mismatch, reward, norm = (
                logged(ran, name) for name in ("/kl/per_sequence", "/mismatch/log_q_mean", "/reward/mean", "/grad_norm")
            )
        figures[f"seed {seed}"] = {
            "first KL": kl[0],
            "mismatch": max(mismatch),
            "reward": f"{reward[0]:.2f} to {reward[-1]:.2f}",
        }
        check(kl[0] == 0, f"seed {seed}: policy and reference are the same at step 0, and their KL is {kl[0]}")
        check(max(mismatch) < MISMATCH, f"seed {seed}: engine and trainer disagree: {mismatch}")
        check(all(math.isfinite(one) and one > 0 for one in norm), f"seed {seed}: gradient norms are {norm}")


def beside_trl(place: Place, figures: Figures) -> None:
    """Compare a GRPO step with TRL's, in one run."""
    command = [sys.executable, "-m", "benchmarks.grpo_step", "--device", place.device, "--lengths", "uniform"]
    if place.trl_python:
        command += ["--trl-python", place.trl_python]
    else:
        figures["TRL"] = "not measured: it is not installed; --trl-python names an interpreter that has it"
    with tempfile.TemporaryDirectory() as name:
        if place.on_gpu:
            make_policy(Path(name), 2048, 16, positions=1024, vocabulary=128_256)
            command += ["--model", name, "--prompts", "16", "--answer", "256"]
        else:
            command += [
                "--prompts",
                "2",
                "--group",
                "2",
                "--answer",
                "8",
                "--repeats",
                "1",
                "--sides",
                "ours HF",
                "TRL HF",
            ]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sides = [line.split("|")[2:6] for line in ran.stdout.splitlines() if line.startswith("| uniform |")]
    for side, *rest in sides:
        names = ("seconds", "tokens/s", "TRL's time over it")
        figures[side.strip()] = dict(zip(names, map(str.strip, rest), strict=True))
    check(bool(sides), f"no side was measured: {ran.stdout}")


def gpu_tests(place: Place, figures: Figures) -> None:
    """Run the other tests that need a GPU."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu", "--ignore", "tests/gpu/test_steps.py"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(ran.stdout)
    figures["tests"] = ran.stdout.splitlines()[-1].strip("= ")
    check(ran.returncode == 0, figures["tests"])


# ---------------------------------------------------------------- the table

GENERATIONS: tuple[tuple[Literal["float32", "bfloat16"], bool], ...] = (
    ("bfloat16", True),
    ("float32", False),
    ("bfloat16", False),
    ("float32", True),
)
"""Precision, and whether CUDA graphs are used."""
GAE = {"ppo.advantage": {"type": "gae"}, "ppo.kl": {"in": "reward", "coef": 0.01}}
STEPS: dict[str, Step] = {
    one.name: one
    for one in (
        Step("imports", "the engines, and a process group of one rank", imports, never_on_cpu="NCCL"),
        Step("sync", "weights by CUDA IPC, a tensor above 1 GiB", sync, never_on_cpu="CUDA IPC"),
        Step("sleep", "an engine gives its memory to a trainer and back", sleep, never_on_cpu="sleep and wake"),
        Step("grpo", "GRPO in bfloat16, engine and trainer on one GPU", partial(policy_steps, settings={}), 1800.0, never_on_cpu="one GPU for both"),
        Step("memory", "peak of a training step beside the planner's", memory, 900.0, never_on_cpu="memory of a GPU"),
        Step("train", "bfloat16 under ZeRO 1 to 3, checkpointed and with adapters, beside float32", train, never_on_cpu="kernels of a GPU"),
        Step("experts", "weights of a mixture of experts", experts, never_on_cpu="CUDA IPC"),
        Step("throughput", "a training step at a vocabulary of 128k, with MFU", throughput, 900.0, never_on_cpu="real sizes"),
        *(
            Step(
                f"generate-{dtype}-{'graphs' if graphs else 'eager'}",
                f"vLLM in {dtype}, {'with CUDA graphs' if graphs else 'eager'}",
                partial(generate, dtype=dtype, graphs=graphs),
                never_on_cpu="CUDA graphs" if graphs else "model runner V2",
                on_cpu=not graphs,
            )
            for dtype, graphs in GENERATIONS
        ),
        Step("adapters", "adapters alone, as a LoRA request", adapters, never_on_cpu="kernels of a GPU"),
        Step("tests", "tests/gpu", gpu_tests, 1800.0, never_on_cpu="tests/gpu", on_cpu=False),
        Step("ppo", "PPO in bfloat16, engine and trainer on one GPU", partial(policy_steps, settings=GAE), 1800.0, never_on_cpu="one GPU for both"),
        Step("trl", "a GRPO step beside TRL's", beside_trl, 1800.0, never_on_cpu="1B parameters"),
    )
}  # fmt: skip
"""Name -> step, in running order: first the steps that a CPU cannot show and that users need most."""
