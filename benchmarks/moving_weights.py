"""Measure the memory that loading, sending, exporting and resuming a model add on a rank, next to the targets.

    python -m benchmarks.moving_weights --ranks 1 2 4
    python -m benchmarks.moving_weights --model adapters experts
    python -m benchmarks.moving_weights --lora-sync 16
    python -m benchmarks.moving_weights --prepare

A random Llama of 168M parameters with a separate LM head is opened frozen under ZeRO 3. `--model adapters` opens it to
train adapters of rank 4 on all linear layers. `experts` is a frozen Qwen3-MoE with 16 experts in each layer. Peaks are
of anonymous memory (`RssAnon`), on the rank with the most: mapped files and the object store are shared and not
counted. A load is measured relative to the process before it, the other moments relative to the resident model. For
`resume`, a model of 68M parameters is trained under each stage of `--stages`, saved and reopened; its peak is relative
to its memory after restoring. `reads` is the amount that one process reads to detect damage in that checkpoint: the
driver, and the rank that reads most.

`--lora-sync RANK` sends the large model with adapters of that rank on all linear layers to vLLM in the same process, merged and
as adapters alone: three times each, after a first time, without Ray's copy to its store. `--prepare` writes the policy
folder of a dense model and of a mixture of experts of 1.8 GiB each in bfloat16, as `prepare_data` does.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.planner import MIB, TOKENS
from rlhf_core.runtime.cluster import free_port

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 256,
}
LARGE, SMALL = {"vocab_size": 32_000, **SHAPE}, {"vocab_size": TOKENS, **SHAPE, "num_hidden_layers": 1}
TRAINED = {"vocab_size": 8192, **SHAPE, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 352, "head_dim": 64}
KINDS: dict[str, tuple[str, dict[str, int], bool]] = {
    "dense": ("llama", {}, False),
    "adapters": ("llama", {}, True),
    "experts": ("qwen3_moe", EXPERTS, False),
}
"""Name -> architecture, further keys of its shape, and whether adapters are trained."""
PREPARED = {**LARGE, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
EVERY_S = 0.002
"""Seconds between two samples of the memory."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], metavar="R")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 3], metavar="ZERO")
    parser.add_argument("--lora-sync", type=int, metavar="RANK", help="send to vLLM, merged and adapters alone")
    parser.add_argument("--model", nargs="+", choices=tuple(KINDS), default=["dense"])
    parser.add_argument("--one-sync", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--one-rank", nargs=3, metavar=("FOLDER", "DTYPE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=int, metavar="ZERO", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help="write policy folders as `prepare_data` does")
    options = parser.parse_args()
    if options.prepare:
        return prepared()
    if options.one_rank:
        folder, dtype, kind = options.one_rank
        if options.resume is not None:
            return resume(Path(folder), dtype, options.resume)
        return run_rank(Path(folder), dtype, adapters=KINDS[kind][2])
    if options.one_sync:
        return sync_with_vllm(Path(options.one_sync[0]), options.dtype, options.one_sync[1], options.lora_sync)
    if options.lora_sync:
        return lora_syncs(options.dtype, options.lora_sync)
    print("| model | ranks | moment | MiB above | target MiB |\n|---|--:|---|--:|--:|", flush=True)
    for kind in options.model:
        with tempfile.TemporaryDirectory() as place:
            for line in moments_of(kind, Path(place), options.dtype, options.ranks, options.stages):
                print(f"| {kind} | {line} |", flush=True)
    return 0


def moments_of(kind: str, folder: Path, dtype: str, groups: list[int], stages: list[int]) -> Iterator[str]:
    """Yield the lines of a model; only the dense one is resumed."""
    family, more, _ = KINDS[kind]
    shapes = {"small": SMALL, "large": LARGE} | ({"trained": TRAINED} if kind == "dense" else {})
    for name, shape in shapes.items():
        make_model(folder / name, family, shape | more, dtype)
    for ranks in groups:
        found = measured(folder, dtype, kind, ranks)
        for moment, target in targets(found[0], ranks).items():
            most = max(rank[moment] for rank in found)
            yield f"{ranks} | {moment} | {most:,.0f} | {target:,.0f}"
        for stage in stages if kind == "dense" else ():
            for line in resumed(folder, dtype, ranks, stage):
                yield f"{ranks} | ZeRO {stage}: {line}"


def resumed(folder: Path, dtype: str, ranks: int, stage: int) -> Iterator[str]:
    """Yield the lines of a resume under a ZeRO stage."""
    from rlhf_core.stage.checkpoints import Checkpoints

    found = measured(folder, dtype, "dense", ranks, "--resume", str(stage))
    yield f"resume | {max(rank['resume'] for rank in found):,.0f} | {found[0]['whole'] / 10:,.0f}"
    before = read_bytes()
    checkpoint = Checkpoints(folder / f"steps_{stage}_of_{ranks}").to_resume(lambda path: "")
    read = (read_bytes() - before) / MIB
    assert checkpoint is not None
    yield f"the driver reads | {read:,.2f} | 1"
    largest = max(file.stat().st_size for file in checkpoint.path.rglob("*.pt")) / MIB
    yield f"a rank reads | {max(rank['read'] for rank in found):,.0f} | {largest:,.0f} and what else it loads"


def read_bytes() -> int:
    """Number of bytes that this process has read, from the page cache or a disk."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def targets(sizes: Mapping[str, float], ranks: int) -> dict[str, float]:
    """The maximum memory that each moment may add, in MiB."""
    whole, largest, bucket = sizes["whole"], sizes["largest"], sizes["bucket"]
    return {"load": whole / ranks + largest + 150, "sync": 2 * largest + bucket, "export": whole}


def measured(folder: Path, dtype: str, kind: str, ranks: int, *more: str) -> list[dict[str, float]]:
    """Measure in a process per rank; returns the measurements of each rank."""
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.moving_weights",
        "--one-rank",
        str(folder),
        dtype,
        kind,
        *more,
    ]
    processes = [
        subprocess.Popen(
            command, env=os.environ | settings | group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank ended with {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def make_model(folder: Path, family: str, shape: Mapping[str, int], dtype: str) -> None:
    """Write a random model and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf_core.models.initialize import train_tokenizer

    folder.mkdir()
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=TOKENS, folder=folder)
    torch.manual_seed(17)
    config = AutoConfig.for_model(family, **shape, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def run_rank(folder: Path, dtype: str, *, adapters: bool) -> int:
    """Print the memory that one rank adds in each moment."""
    import torch

    from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
    from rlhf_core.config.models import LoraConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.runtime.weights import BUCKET_BYTES, buckets, pack_weights
    from rlhf_core.training.trainer import LocalTrainer

    torch.set_num_threads(1)
    config = TrainerConfig(zero_stage=3, dtype=dtype)
    rank = int(os.environ["RANK"])

    def opened(name: str) -> Any:
        lora = LoraConfig(rank=4, target_modules="all-linear") if adapters else None
        return LocalTrainer(
            ModelSpec(str(folder / name), "lm", lora, 1), OptimizerConfig() if adapters else None, config
        )

    def sync(trainer: Any) -> None:
        """On the first rank, fill the buckets of the object store, which copies each one into shared memory."""
        for part in map(pack_weights, buckets(trainer.stream())) if rank == 0 else trainer.stream():
            del part
        trainer.stream().digest()

    small = opened("small")  # imports, the group, and DeepSpeed's resident memory
    sync(small)
    small.close()
    moments: dict[str, float] = {}
    moments["load"], trainer = above(lambda: opened("large"))
    moments["sync"], _ = above(lambda: sync(trainer))
    moments["export"], _ = above(lambda: trainer.export(folder / f"exported_of_{os.environ['WORLD_SIZE']}"))
    sizes = [weight.numel() * weight.element_size() / MIB for _, weight in trainer.stream()]
    print(json.dumps(moments | {"whole": sum(sizes), "largest": max(sizes), "bucket": BUCKET_BYTES / MIB}))
    trainer.close()
    return 0


def prepared() -> int:
    """Print the peak memory of this process while it writes the policy folders of pretrained models."""
    from rlhf_core.config.models import PretrainedModel
    from rlhf_core.models.materialize import materialize

    print("| model | MiB of weights | MiB above |\n|---|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name, kind, shape in (
            ("warm", "dense", SMALL),
            ("dense", "dense", PREPARED),
            ("experts", "experts", PREPARED),
        ):
            family, more, _ = KINDS[kind]
            folder, out = Path(place) / name, Path(place) / "out"
            make_model(folder, family, shape | more, "bfloat16")
            model = PretrainedModel(path=str(folder))
            most, _ = above(partial(materialize, model, out))
            if name != "warm":  # which only triggers imports
                whole = sum(file.stat().st_size for file in out.glob("*.safetensors")) / MIB
                print(f"| {name} | {whole:,.0f} | {most:,.0f} |", flush=True)
            shutil.rmtree(folder)
            shutil.rmtree(out)
    return 0


def lora_syncs(dtype: str, rank: int) -> int:
    """Print the cost of a sync, merged and with adapters alone, each in a separate process."""
    print("| sent | MiB | seconds of a sync | MiB above |\n|---|--:|---|--:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "large", "llama", LARGE, dtype)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.moving_weights", "--lora-sync", str(rank)]
        for way in ("merged", "adapter"):
            one = [*command, "--dtype", dtype, "--one-sync", str(Path(place) / "large"), way]
            ended = subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(ended.stdout.splitlines()[-1])
            seconds = ", ".join(f"{each:.2f}" for each in found["seconds"])
            print(f"| {way} | {found['sent']:,.1f} | {seconds} | {found['above']:,.0f} |", flush=True)
    return 0


def sync_with_vllm(folder: Path, dtype: str, way: Any, rank: int) -> int:
    """Print the MiB that one way sends, and the seconds and the memory of three syncs."""
    from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
    from rlhf_core.config.models import LoraConfig
    from rlhf_core.config.runtime import VllmSamplerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.sampling.vllm_sampler import VllmSampler

    config = VllmSamplerConfig(dtype=dtype, max_model_len=64, kv_cache_gib=0.25, lora_sync=way, max_lora_rank=rank)
    sampler = VllmSampler(folder, config, threads=1, transfer="")
    from rlhf_core.training.trainer import LocalTrainer  # imported after setting the variables that vLLM reads

    spec = ModelSpec(str(folder), "lm", LoraConfig(rank=rank, target_modules="all-linear"), 1)
    torch_engine = TrainerConfig(engine="torch", dtype=dtype)
    trainer = LocalTrainer(spec, OptimizerConfig(), torch_engine, adapters_alone=way == "adapter")
    sent = sum(weight.nbytes / MIB for weight in trainer.stream().metadata.values())

    def sync() -> None:
        sampler.load_weights(trainer.weights(), version=1)

    sync()
    seconds, most = [], 0.0
    for _ in range(3):
        began = time.perf_counter()
        rise, _ = above(sync)
        seconds.append(time.perf_counter() - began)
        most = max(most, rise)
    print(json.dumps({"sent": sent, "seconds": seconds, "above": most}), flush=True)
    os._exit(0)  # exit under vLLM is slow


def resume(folder: Path, dtype: str, stage: int) -> int:
    """Print the peak memory of one rank, above its final memory, while a trained model is restored."""
    from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
    from rlhf_core.interfaces import ModelSpec
    from rlhf_core.stage.checkpoints import Checkpoints, wait_for_parts
    from rlhf_core.training.objectives.base import SftObjective
    from rlhf_core.training.trainer import LocalTrainer
    from rlhf_core.types import TokenSample, ids, mask

    config, rank = TrainerConfig(zero_stage=stage, dtype=dtype), int(os.environ["RANK"])
    row = TokenSample(ids(range(10, 42)), mask([0] + [1] * 31))

    def opened(name: str) -> Any:
        return LocalTrainer(ModelSpec(str(folder / name), "lm", None, 1), OptimizerConfig(), config)

    def saved(name: str, place: Path) -> None:
        trainer = opened(name)
        trainer.forward_backward([row], SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-4)
        trainer.save(place)
        trainer.stream().digest()  # all ranks have saved
        wait_for_parts(place)
        trainer.close()

    root = folder / f"steps_{stage}_of_{os.environ['WORLD_SIZE']}"
    saved("small", root / "small")
    restored = opened("small")
    restored.load(root / "small")  # imports
    restored.close()
    saved("trained", root / "trained")
    trainer = opened("trained")
    before = read_bytes()
    assert trainer.damage(root / "trained") == ""
    read = (read_bytes() - before) / MIB
    least = anonymous()
    most, _ = above(lambda: trainer.load(root / "trained"))
    gc.collect()
    kept = anonymous()
    whole = sum(weight.numel() * weight.element_size() / MIB for _, weight in trainer.stream())
    if rank == 0:
        checkpoints = Checkpoints(root)
        with checkpoints.saving(1, {}) as place:
            (root / "trained").rename(place / "policy")
        checkpoints.settle()
    print(json.dumps({"resume": least + most - kept, "read": read, "whole": whole}))
    trainer.close()
    return 0


def above(do: Callable[[], Any]) -> tuple[float, Any]:
    """The maximum rise of this process's anonymous memory during `do`, in MiB, and the result of `do`."""
    from rlhf_core.training.engines.offload import release_freed_memory

    gc.collect()
    release_freed_memory()
    before = most = anonymous()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(EVERY_S):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        made = do()
    finally:
        over.set()
        thread.join()
    return most - before, made


def anonymous() -> float:
    """The anonymous memory of this process, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
