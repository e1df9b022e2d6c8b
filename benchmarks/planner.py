"""Compare the memory predicted by `rlhf plan --estimate` with the memory of real training processes, on CPUs.

    python -m benchmarks.planner                      # all cases; minutes each on two busy cores
    python -m benchmarks.planner --cases sft-zero3-fp32 ppo-zero1-bf16 --parts

A case is one process per rank with real engines on random Llamas: it opens the models of a stage, takes two optimizer
steps, measures, sends the weights and copies a checkpoint. `measured` is the kernel's largest resident set of such a
moment (VmHWM, reset before each), minus the value of the same process after the same work with a model of 0.1M
parameters, which is the memory of Python, torch and DeepSpeed. Freed blocks return to the system at once
(MALLOC_MMAP_THRESHOLD_), as the blocks of a GPU return to its allocator. On CPUs, host and device are one: `predicted`
counts both, and only the pages of a bucket that are written. With `--device cuda`, `measured` is the largest memory
that torch has allocated in a moment, and `predicted` is the memory on the GPU. Nothing here was run on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_contrib.planner.memory import RankMemory, Role, larger, rank_memory
from rlhf_contrib.planner.sizes import shape_of_init
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.runtime.cluster import free_port

MIB = 1 << 20
TOKENS = 512  # ids that are in every vocabulary here
STEPS = 2  # optimizer states exist after the first one
SHAPES: dict[str, dict[str, int]] = {
    "0.1M": {"vocab_size": 600, "hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 128},
    "63M": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "layers": 8,
        "heads": 12,
        "kv_heads": 12,
        "intermediate_size": 2048,
    },
    "160M": {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "layers": 11,
        "heads": 16,
        "kv_heads": 8,
        "intermediate_size": 2816,
    },
    "1B": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "intermediate_size": 8192,
    },
}
"""Random Llamas by their number of parameters; the smallest is for the baseline."""


@dataclass(frozen=True)
class Case:
    """A stage on real engines; `length` tokens per row, `rows` rows in each of two micro-batches per step."""

    stage: str
    model: str = "63M"
    ranks: int = 1
    lora: bool = False
    rows: int = 2
    length: int = 128
    trainer: dict[str, Any] = field(default_factory=dict)

    def config(self) -> TrainerConfig:
        """The settings of training."""
        return TrainerConfig(**{"micro_batch": self.rows, **self.trainer})

    def roles(self) -> list[Role]:
        """The models of the stage."""
        shape = shape_of_init(InitModel(max_positions=1024, **SHAPES[self.model]))
        lora = LoraConfig(rank=16) if self.lora else None
        sides = 2 if self.stage in ("dpo", "reward_model") else 1
        tokens = self.rows * self.length * sides
        policy = Role("policy", shape, True, tokens, lora=lora)
        scalar = Role("value_model", shape.without_head(), True, tokens, logits=False)
        if self.stage == "reward_model":
            return [replace(scalar, name="reward_model")]
        if self.stage == "ppo":
            return [scalar, policy, Role("reference", shape, False, tokens)]
        return [policy]


FP32, BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
ZERO3, ZERO2, ZERO1 = {"zero_stage": 3}, {"zero_stage": 2}, {"zero_stage": 1}
TORCH = {"engine": "torch"}
CASES: dict[str, Case] = {
    "sft-torch-fp32": Case("sft", trainer=TORCH | FP32),
    "sft-torch-fp32-160M": Case("sft", model="160M", trainer=TORCH | FP32),
    "sft-torch-long": Case("sft", rows=4, length=512, trainer=TORCH | FP32),
    "sft-torch-long-checkpointing": Case(
        "sft", rows=4, length=512, trainer=TORCH | FP32 | {"gradient_checkpointing": True}
    ),
    "sft-zero0-fp32": Case("sft", trainer=FP32),
    "sft-zero1-bf16": Case("sft", trainer=BF16),
    "sft-zero1-bf16-checkpointing": Case("sft", trainer=BF16 | {"gradient_checkpointing": True}),
    "sft-zero2-bf16": Case("sft", trainer=ZERO2 | BF16),
    "sft-zero3-fp32": Case("sft", trainer=ZERO3 | FP32),
    "sft-zero3-bf16": Case("sft", trainer=ZERO3 | BF16),
    "dpo-lora-torch-fp32": Case("dpo", lora=True, trainer=TORCH | FP32),
    "dpo-lora-zero3-bf16": Case("dpo", lora=True, trainer=ZERO3 | BF16),
    "reward-zero3-fp32": Case("reward_model", trainer=ZERO3 | FP32),
    "ppo-torch-fp32": Case("ppo", trainer=TORCH | FP32),
    "ppo-zero1-bf16": Case("ppo", trainer=BF16),
    "sft-zero1-fp32-2": Case("sft", ranks=2, trainer=ZERO1 | FP32),
    "sft-zero2-bf16-2": Case("sft", ranks=2, trainer=ZERO2 | BF16),
    "sft-zero3-fp32-2": Case("sft", ranks=2, trainer=ZERO3 | FP32),
    "sft-zero3-bf16-2": Case("sft", ranks=2, trainer=ZERO3 | BF16),
    "sft-zero3-bf16-offload-2": Case("sft", ranks=2, trainer=ZERO3 | BF16 | {"offload_optimizer": True}),
    "ppo-zero3-bf16-2": Case("ppo", ranks=2, trainer=ZERO3 | BF16),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--parts", action="store_true", help="print the terms of each prediction, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append each result there as a line of JSON")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep the random models there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=list(SHAPES), help="in place of the model of each case")
    parser.add_argument("--one-rank", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_rank:
        name, folder = options.one_rank
        return run_rank(case_of(name, options.model), Path(folder), options.device)
    print("| case | ranks | moment | predicted MiB | measured MiB | ratio |\n|---|--:|---|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name in options.cases:
            for line in compare(name, options.work or Path(place), options):
                print(line, flush=True)
    return 0


def case_of(name: str, model: str | None) -> Case:
    """A case, optionally with another model."""
    return replace(CASES[name], model=model) if model else CASES[name]


def compare(name: str, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for the peak of a case, or with `--parts` one for each moment."""
    case, out, parts = case_of(name, options.model), options.out, options.parts
    measured = measured_moments(name, folder, model=options.model, device=options.device)
    terms = predicted(name, model=options.model, device=options.device)
    worst = max(measured, key=lambda moment: measured[moment])
    for moment in measured if parts else [worst]:
        total = sum(terms[moment].values()) / MIB
        mark = " (peak)" if parts and moment == worst else ""
        ratio = total / measured[moment]
        yield f"| {name} | {case.ranks} | {moment}{mark} | {total:,.0f} | {measured[moment]:,.0f} | {ratio:.2f} |"
        if parts:
            yield "  " + ", ".join(f"{term} {size / MIB:,.0f}" for term, size in terms[moment].items() if size > MIB)
    if out is not None:
        totals = {moment: sum(terms[moment].values()) / MIB for moment in measured}
        with out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"case": name, "measured": measured, "predicted": totals}) + "\n")


Device = Literal["cpu", "cuda"]


def predicted(name: str, *, model: str | None = None, device: Device = "cpu") -> dict[str, dict[str, float]]:
    """The terms of each moment of a case, in bytes; on a GPU, without host memory."""
    case = case_of(name, model)
    roles = {role.name: rank_memory(role, case.config(), case.ranks, on_cpu=device == "cpu") for role in case.roles()}
    if device == "cuda":
        roles = {role: replace(memory, host={}, host_moments={}) for role, memory in roles.items()}
    return on_one_machine(roles)


def on_one_machine(roles: Mapping[str, RankMemory]) -> dict[str, dict[str, float]]:
    """The terms of each moment if host and device are one: the resident memory of all roles, and the largest rise."""
    moments: dict[str, dict[str, float]] = {}
    kept = {
        f"{name}: {term}": size
        for name, memory in roles.items()
        for term, size in (*memory.resident.items(), *memory.host.items())
    }
    for name in {name: None for memory in roles.values() for name in (*memory.moments, *memory.host_moments)}:
        added = [
            {f"{role}: {term}": size for term, size in terms.items()}
            for role, memory in roles.items()
            for terms in [{**memory.moments.get(name, {}), **memory.host_moments.get(name, {})}]
        ]
        moments[name] = kept | dict(larger(*added))
    return moments


def measured_moments(name: str, folder: Path, *, model: str | None = None, device: Device = "cpu") -> dict[str, float]:
    """Measure the largest memory of rank 0 in each moment, in MiB."""
    case = case_of(name, model)
    for shape in ("0.1M", case.model):
        make_model(shape, folder / shape)
    group = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner", "--one-rank", name, str(folder)]
    command += ["--device", device, *(["--model", model] if model else [])]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | settings | ({**group, "RANK": str(rank)} if case.ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if rank else None,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{name}: a rank ended with {[rank.returncode for rank in ranks]}")
    moments: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return moments


def make_model(name: str, folder: Path) -> None:
    """Write a random Llama of `SHAPES`, unless it exists."""
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    if folder.exists():
        return
    folder.mkdir(parents=True)
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=TOKENS, folder=folder)
    initialize_llama(InitModel(max_positions=1024, **SHAPES[name]), folder, seed=17)


# ---------------------------------------------------------------- one rank


def run_rank(case: Case, folder: Path, device: Device) -> int:
    """Run the work of `case` on one rank, and print the largest memory of each moment."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=device == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    moments: dict[str, float] = {}
    work(case, folder / "0.1M", lambda name, do: do())
    gc.collect()
    base, _ = memory_of(device)

    def measured(name: str, do: Callable[[], Any]) -> Any:
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM, see man 5 proc
        made = do()
        moments[name] = max(moments.get(name, 0.0), memory_of(device)[1] - base)
        return made

    work(case, folder / case.model, measured)
    print(json.dumps(moments))
    return 0


def memory_of(device: Device) -> tuple[float, float]:
    """The current and the peak memory of this process, in MiB: its resident set, or tensors on the GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return sizes["VmRSS"], sizes["VmHWM"]


def work(case: Case, model: Path, moment: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Open the models of a case, train, measure, send the weights and copy a checkpoint."""
    from rlhf_core.config.engines import OptimizerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.sequences import Sequences
    from rlhf_core.training.trainer import LocalTrainer

    heads = {"value_model": "value", "reward_model": "score"}
    trainers: dict[str, tuple[Any, Role]] = {}
    for role in case.roles():
        head: Any = heads[role.name] if role.name in heads else "lm"
        spec = ModelSpec(path=str(model), head=head, lora=role.lora, seed=1)
        optimizer = OptimizerConfig() if role.trained else None
        opened = moment("open", lambda s=spec, o=optimizer: LocalTrainer(s, o, case.config()))  # type: ignore[misc]
        trainers[role.name] = opened, role
    for _ in range(STEPS):
        for trainer, role in trainers.values():
            if role.trained:
                samples, objective = samples_of(case, role)
                moment("train", lambda t=trainer, s=samples, o=objective: train(t, s, o))  # type: ignore[misc]
        for trainer, role in trainers.values():
            if role.logits:
                moment("measure", lambda t=trainer: t.logprobs(Sequences.of(token_samples(case)), temperature=1.0))  # type: ignore[misc]
    for name, (trainer, _) in trainers.items():
        if name == "policy":
            moment("sync", trainer.weights)
    with tempfile.TemporaryDirectory() as place:
        for name, (trainer, role) in trainers.items():
            if role.trained:
                moment("save", lambda t=trainer, n=name: save(t, Path(place) / n))  # type: ignore[misc]
    for trainer, _ in trainers.values():
        trainer.close()


def train(trainer: Any, samples: Sequence[Any], objective: Any) -> None:
    """Take an optimizer step of two micro-batches."""
    trainer.forward_backward(samples, objective)
    trainer.optim_step(learning_rate=1e-4)


def save(trainer: Any, folder: Path) -> None:
    """Copy the content of a checkpoint, and drop the copies."""
    folder.mkdir()
    trainer._engine.snapshot(folder)


def token_samples(case: Case) -> list[Any]:
    from rlhf_core.types import TokenSample, ids, mask

    trained = mask([0] + [1] * (case.length - 1))
    return [
        TokenSample(ids([(7 * row + at) % TOKENS for at in range(case.length)]), trained)
        for row in range(2 * case.rows)
    ]


def samples_of(case: Case, role: Role) -> tuple[Any, Any]:
    """Two micro-batches of a role, and its objective."""
    from rlhf_core.algorithms.policy.clip import ClipLoss
    from rlhf_core.algorithms.preference.dpo import DPOLoss
    from rlhf_core.config.policy import CorrectionConfig
    from rlhf_core.sequences import Sequences
    from rlhf_core.training.objectives import base
    from rlhf_core.training.objectives.preference import PairObjective
    from rlhf_core.types import PreferenceSample, RewardPair, TokenSample

    rows = token_samples(case)
    batch = Sequences.of(rows)
    some = np.full(len(batch.token_ids), 0.1, np.float32)
    if role.name == "reward_model":
        pairs = [RewardPair(row.token_ids, row.token_ids[::-1], 0.0) for row in rows]
        return pairs, base.BradleyTerryObjective(centering_coef=0.0)
    if role.name == "value_model":
        return batch.with_fields(old_values=some, returns=some), base.ValueObjective(clip=None)
    if case.stage == "dpo":
        # Sides that began with the same tokens would compute these once.
        others = [TokenSample(row.token_ids[::-1], row.loss_mask) for row in rows]
        both = [PreferenceSample(row, other, -1.0, -1.0) for row, other in zip(rows, others, strict=True)]
        return both, PairObjective(DPOLoss(), 0.0, 1.0)
    if case.stage == "ppo":
        made = batch.with_fields(rollout_logprobs=some, old_logprobs=some, ref_logprobs=some, advantages=some)
        return made, base.PolicyObjective(ClipLoss(), case.length, 1.0, 0.1, 0.0, CorrectionConfig())
    return rows, base.SftObjective(pack_to=None)


if __name__ == "__main__":
    sys.exit(main())
