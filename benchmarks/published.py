"""Compare `rlhf plan --estimate` with published configurations: whether they fit, and the seconds of a step.

    python -m benchmarks.published                  # every row; docs/cluster.md lists the rows that disagree
    python -m benchmarks.published --only 32B --terms

Each publication is planned with this project's settings on the same GPUs: ZeRO 3, the micro-batch given here, and rows
of the published average length if it is known. Nothing here was run on a GPU. Models are counted from the `config.json`
given here; mixtures of experts are built on torch's meta device, which takes seconds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_contrib.planner.estimate import Estimate, Load, estimate
from rlhf_contrib.planner.hardware import HARDWARE
from rlhf_contrib.planner.memory import Role, human
from rlhf_contrib.planner.sizes import ModelShape, shape_of
from rlhf_contrib.planner.stage_models import Phase, Step
from rlhf_contrib.planner.verb import parts
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.runtime import RuntimeConfig

LOWEST, HIGHEST = 0.6, 1.5
"""Range of the ratio of planned to published seconds that counts as agreement."""

# ---------------------------------------------------------------- models


def dense(family: str, hidden: int, layers: int, heads: int, keys: int, inner: int, words: int, **more: Any) -> str:
    """The `config.json` of a family without experts."""
    sizes = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": words,
    }
    return json.dumps(sizes | more)


MODELS = {
    "Llama 2 7B": dense("llama", 4096, 32, 32, 32, 11008, 32000),
    "Llama 2 13B": dense("llama", 5120, 40, 40, 40, 13824, 32000),
    "Llama 2 70B": dense("llama", 8192, 80, 64, 8, 28672, 32000),
    "CodeLlama 34B": dense("llama", 8192, 48, 64, 8, 22016, 32000),
    "Llama 3 8B": dense("llama", 4096, 32, 32, 8, 14336, 128256),
    "Llama 3 70B": dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "Llama 3.1 405B": dense("llama", 16384, 126, 128, 8, 53248, 128256),
    "Qwen2.5 7B": dense("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5 14B": dense("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5 32B": dense("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5 72B": dense("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "Qwen3 4B": dense("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3 32B": dense("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Qwen3 30B-A3B": dense(
        "qwen3_moe",
        *(2048, 48, 32, 4, 6144, 151936),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "Mixtral 8x7B": dense(
        "mixtral", *(4096, 32, 32, 8, 14336, 32000), num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
}


@cache
def shape(model: str) -> ModelShape:
    """The shape of one of `MODELS`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(MODELS[model], encoding="utf-8")
        return shape_of(Path(folder))


# ---------------------------------------------------------------- publications


@dataclass(frozen=True, slots=True)
class Publication:
    """A published configuration, and the settings to run it with this project."""

    source: str
    """Key of `SOURCES`."""
    model: str
    work: str
    """`sft`, `grpo` (policy and reference) or `ppo` (policy, reference, reward and value model of the same size)."""
    card: str
    gpus: int
    fits: bool
    """Whether it ran; False if it was reported as out of memory."""
    seconds: float = 0.0
    """Published seconds of a step; 0: not published."""
    note: str = ""
    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    rows: int = 0
    """Rows or answers that a step trains on."""
    length: int = 2048
    """Tokens of a row; the average if that is published."""
    prompt: int = 512
    longest: int = 0
    """Tokens of the longest row, if `length` is an average."""
    micro_batch: int = 1
    train_workers: int = 0
    """0: all GPUs train, and engines share them."""
    engines: int = 0
    parallel: int = 1
    critic_workers: int = 0
    """Workers of a separate pool for the value model."""
    frozen_workers: int = 0
    """Workers of a separate pool for the reference and the reward model."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    sampler: Mapping[str, Any] = field(default_factory=dict)


VERL = "verl"
NEMO = "NeMo-RL"
OPENRLHF = "OpenRLHF"
SUPPORT = "OpenRLHF, matrix"
DGX = "OpenRLHF, 2023-10"
TITAN = "torchtitan, H100"
TITAN_A100 = "torchtitan, A100"
TITAN_405B = "torchtitan, 405B"
PRIME = "prime-rl"
SOURCES = {
    VERL: "https://github.com/volcengine/verl/blob/904e7bf3/docs/perf/device_tuning.rst and examples/tuning",
    NEMO: "https://github.com/NVIDIA-NeMo/RL/blob/06beed91/docs/about/performance-summary.md (v0.4)",
    OPENRLHF: "https://github.com/OpenRLHF/OpenRLHF/blob/4d26d253/README.md (command and performance), examples/scripts",
    SUPPORT: "https://github.com/OpenRLHF/OpenRLHF/blob/76d9b65a/README.md (support matrix)",
    DGX: "https://github.com/OpenRLHF/OpenRLHF/blob/b20685bc/README.md (news of 2023/10/2)",
    TITAN: "https://github.com/pytorch/torchtitan/blob/31a17bfd/benchmarks/llama3_h100_202412_torchtitan.md",
    TITAN_A100: "https://github.com/pytorch/torchtitan/blob/04133643/docs/performance.md and train_configs (norm_type)",
    TITAN_405B: "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md (section Llama 3.1)",
    PRIME: "https://github.com/PrimeIntellect-ai/prime-rl/tree/559b4477/benchmarks/baselines",
}

OFFLOAD = {"offload_optimizer": True}
RESTING = {"sleep": True}
WHOLE = {"gradient_checkpointing": False}

PUBLISHED = (
    Publication(
        *(VERL, "Qwen2.5 72B", "grpo", "h100", 8, True), rank=32, length=1536, rows=880, parallel=8, trainer=RESTING
    ),
    Publication(
        *(VERL, "Qwen2.5 32B", "grpo", "h100", 4, True), rank=32, length=1536, rows=900, parallel=4, trainer=RESTING
    ),
    Publication(
        *(VERL, "Qwen2.5 14B", "grpo", "h100", 2, True), rank=32, length=1536, rows=580, parallel=2, trainer=RESTING
    ),
    Publication(*(VERL, "Qwen2.5 7B", "grpo", "h100", 1, True), rank=32, length=1536, rows=80, trainer=RESTING),
    Publication(
        *(VERL, "Qwen2.5 7B", "grpo", "h100", 2, True),
        note="2 H800, parameters and optimizer offloaded",
        rows=5120,
        prompt=1024,
        parallel=2,
        trainer=OFFLOAD | RESTING,
    ),
    Publication(
        *(VERL, "Qwen2.5 14B", "grpo", "h100", 4, True),
        note="4 H800, parameters and optimizer offloaded",
        rows=5120,
        prompt=1024,
        parallel=4,
        trainer=OFFLOAD | RESTING,
    ),
    Publication(
        *(VERL, "Qwen2.5 72B", "grpo", "h100", 32, True),
        note="32 H800, parameters and optimizer offloaded; engines of 16 GPUs there, of 8 here",
        rows=5120,
        length=1024,
        parallel=8,
        trainer=OFFLOAD | RESTING,
    ),
    Publication(
        *(NEMO, "Llama 3 8B", "grpo", "h100", 16, True, 97.7),
        rows=2048,
        length=1060,
        longest=4096,
        prompt=160,
        micro_batch=4,
    ),
    Publication(
        *(NEMO, "Qwen3 32B", "grpo", "h100", 32, True, 393),
        rows=2048,
        length=3206,
        longest=4096,
        prompt=160,
        micro_batch=4,
        parallel=4,
    ),
    Publication(
        *(NEMO, "Qwen3 30B-A3B", "grpo", "h100", 32, True, 225),
        rows=2048,
        length=3154,
        longest=4096,
        prompt=160,
        micro_batch=4,
        parallel=4,
    ),
    Publication(
        *(OPENRLHF, "Llama 3 8B", "ppo", "a100", 8, True),
        note="the command of three READMEs; the card is not stated",
        rows=1024,
        prompt=1024,
        micro_batch=8,
        parallel=2,
        trainer=RESTING,
        sampler={"gpu_memory_fraction": 0.5},
    ),
    Publication(
        *(SUPPORT, "Llama 2 70B", "ppo", "a100", 16, True),
        note="70B+ full tuning with 16 A100",
        rows=1024,
        prompt=1024,
        micro_batch=4,
        parallel=8,
        trainer=OFFLOAD | RESTING,
    ),
    Publication(
        *(SUPPORT, "Llama 2 7B", "ppo", "rtx4090", 4, True),
        note="7B full tuning with 4 RTX 4090",
        rows=1024,
        prompt=1024,
        parallel=4,
        trainer=OFFLOAD | RESTING,
        sampler={"gpu_memory_fraction": 0.6},
    ),
    Publication(
        *(DGX, "CodeLlama 34B", "ppo", "a100", 8, True),
        note="one DGX A100, Adam offloaded, rows of 4,096",
        rows=512,
        length=4096,
        prompt=2048,
        parallel=4,
        trainer=OFFLOAD | RESTING,
    ),
    Publication(
        *(OPENRLHF, "Llama 2 7B", "ppo", "a100", 16, True, 471),
        note="16 A800; called outdated by its authors",
        rows=1024,
        prompt=1024,
        micro_batch=4,
        train_workers=4,
        critic_workers=4,
        frozen_workers=4,
        engines=4,
    ),
    Publication(
        *(OPENRLHF, "Llama 2 70B", "ppo", "a100", 32, True, 4489),
        note="32 A800; called outdated by its authors",
        rows=1024,
        prompt=1024,
        train_workers=8,
        critic_workers=8,
        frozen_workers=8,
        engines=4,
        parallel=2,
        trainer=OFFLOAD,
        sampler={"gpu_memory_fraction": 0.95},
    ),
    Publication(
        *(OPENRLHF, "Mixtral 8x7B", "sft", "a100", 8, True),
        note="the number of GPUs is not stated",
        rank=64,
        rows=128,
        micro_batch=4,
    ),
    Publication(
        *(TITAN, "Llama 3 8B", "sft", "h100", 8, True, 2.46),
        note="selective checkpointing there; of 95 GB",
        rows=16,
        length=8192,
        micro_batch=2,
    ),
    Publication(
        *(TITAN, "Llama 3 8B", "sft", "h100", 128, True, 2.52),
        note="selective checkpointing there; of 95 GB",
        rows=256,
        length=8192,
        micro_batch=2,
    ),
    Publication(*(TITAN, "Llama 3 8B", "sft", "h100", 8, True, 8.42), note="float8", rows=8, length=32768),
    Publication(
        *(TITAN, "Llama 3 70B", "sft", "h100", 256, True, 19.8),
        note="float8, tensor parallelism of 8",
        rows=512,
        length=8192,
        micro_batch=2,
    ),
    Publication(
        *(TITAN_A100, "Llama 3 8B", "sft", "a100", 64, True, 2.82),
        note="selective checkpointing there",
        rows=64,
        length=8192,
    ),
    Publication(*(TITAN_A100, "Llama 3 70B", "sft", "a100", 64, True, 24.7), rows=64, length=8192),
    Publication(
        *(TITAN_A100, "Llama 2 13B", "sft", "a100", 64, True, 3.79),
        note="no checkpointing, and its fused norms, which Liger's stand for",
        rows=128,
        length=4096,
        micro_batch=2,
        trainer=WHOLE | {"liger": True},
    ),
    Publication(
        *(TITAN_A100, "Llama 2 70B", "sft", "a100", 64, False),
        note="selective checkpointing there, none here: out of memory",
        rows=128,
        length=4096,
        micro_batch=2,
        trainer=WHOLE,
    ),
    Publication(
        *(TITAN_405B, "Llama 3.1 405B", "sft", "h100", 128, False),
        note="without tensor parallelism: out of memory, of 94 GB",
        rows=256,
        length=8192,
        micro_batch=2,
    ),
    Publication(*(PRIME, "Qwen3 4B", "sft", "h100", 8, True, 5.38), rank=16, rows=16, length=16384),
    Publication(*(PRIME, "Qwen3 4B", "sft", "h100", 8, True, 32.0), rank=16, rows=16, length=65536),
    Publication(*(PRIME, "Qwen3 30B-A3B", "sft", "h100", 8, True, 7.92), rank=16, rows=16, length=16384),
    Publication(*(PRIME, "Qwen3 4B", "sft", "h200", 8, True, 4.71), rows=16, length=16384),
    Publication(*(PRIME, "Qwen3 4B", "sft", "b200", 8, True, 3.74), rows=16, length=16384),
)


# ---------------------------------------------------------------- planned estimates


def planned(one: Publication) -> Estimate:
    """Estimate a publication."""
    return estimate(one.model, [_phase(one)], _step(one), _runtime(one), HARDWARE[one.card])


def _runtime(one: Publication) -> RuntimeConfig:
    workers = one.train_workers or one.gpus
    shares = one.work != "sft" and not one.train_workers
    sampler = {
        "type": "vllm",
        "dtype": "bfloat16",
        "engines": one.engines or max(1, one.gpus // one.parallel),
        "tensor_parallel": one.parallel,
        "max_model_len": one.length,
        "gpu_memory_fraction": 0.6 if shares else 0.85,
        "sleep": shares,
        **one.sampler,
    }
    trainer = {
        "dtype": "bfloat16",
        "zero_stage": 3,
        "gradient_checkpointing": True,
        "micro_batch": one.micro_batch,
        **one.trainer,
    }
    pools = {
        name: {"workers": number, "gpus_per_worker": 1, "roles": roles}
        for name, number, roles in (
            ("critic", one.critic_workers, ["value_model"]),
            ("frozen", one.frozen_workers, ["reference", "reward_model"]),
        )
        if number
    }
    return RuntimeConfig.model_validate(
        {
            "train_workers": workers,
            "gpus_per_train_worker": 0.5 if shares else 1,
            "gpus_per_engine": 0.5 if shares else one.parallel,
            "trainer": trainer,
            "sampler": sampler,
            "pools": pools,
        }
    )


def _phase(one: Publication) -> Phase:
    model, tokens = shape(one.model), one.micro_batch * one.length
    lora = LoraConfig(rank=one.rank) if one.rank else None
    lends = bool(lora) and one.work != "sft"  # switching off the adapters gives the reference
    policy = Role("policy", model, True, tokens, lora=lora, measures=1 + lends)
    if one.work == "sft":
        return Phase((policy,))
    roles = [policy]
    if not lends:
        roles.append(Role("reference", model, False, tokens))
    if one.work == "ppo":
        scores = model.without_head()
        roles.insert(0, Role("value_model", scores, True, tokens, logits=False))
        roles.append(Role("reward_model", scores, False, tokens, logits=False))
    return Phase(tuple(roles), model, samples_first=True)


def _step(one: Publication) -> Step:
    if one.work == "sft":
        return Step(one.rows * one.length, length=one.length)
    answer, longest = one.length - one.prompt, max(0, one.longest - one.prompt)
    return Step(one.rows * one.length, 1, one.rows, answer, one.prompt, length=one.length, longest=longest)


def ratio(one: Publication, made: Estimate) -> float | None:
    """Ratio of planned to published seconds, None if the publication has no seconds."""
    return sum(made.seconds.values()) / one.seconds if one.seconds else None


def agrees(one: Publication, made: Estimate) -> bool:
    """Whether both fit or neither does, and the ratio of seconds is within the bounds."""
    times = ratio(one, made)
    return made.fits == one.fits and (times is None or not made.fits or LOWEST <= times <= HIGHEST)


# ---------------------------------------------------------------- the table


def table(pairs: Sequence[tuple[Publication, Estimate]]) -> Iterator[str]:
    """Yield a Markdown table with a line per publication, the number of agreements, and the sources."""
    yield "| source | model, work | GPUs | published | planned GB on a GPU, of | node | fits | seconds | ratio | agrees |"
    yield "|---|---|---|---|--:|--:|---|--:|--:|---|"
    for one, made in pairs:
        yield _line(one, made)
    agree = sum(agrees(*pair) for pair in pairs)
    yield ""
    yield f"{agree} of {len(pairs)} agree."
    yield ""
    for name in dict.fromkeys(one.source for one, _ in pairs):
        yield f"- {name}: {SOURCES[name]}"


def _line(one: Publication, made: Estimate) -> str:
    fullest = max((load for load in made.loads if load.where != "node"), key=_fill)
    node = next(load for load in made.loads if load.where == "node")
    times = ratio(one, made)
    said = ("runs" if one.fits else "out of memory") + (f", {one.seconds:g} s" if one.seconds else "")
    lora = f" LoRA {one.rank}" if one.rank else ""
    columns = (
        one.source,
        f"{one.model}, {one.work}{lora}" + (f" ({one.note})" if one.note else ""),
        f"{one.gpus} {one.card}",
        said,
        f"{human(fullest.total)} of {human(fullest.limit)}",
        human(node.total),
        "yes" if made.fits else "**no**",
        f"{sum(made.seconds.values()):.3g}" if one.seconds else "",
        "" if times is None else f"{times:.2f}",
        "yes" if agrees(one, made) else "**no**",
    )
    return "| " + " | ".join(columns) + " |"


def _fill(load: Load) -> float:
    return load.total / load.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="publications whose model has this in its name")
    parser.add_argument("--terms", action="store_true", help="print what each memory and each second is made of")
    words = parser.parse_args()
    pairs = [(one, planned(one)) for one in PUBLISHED if words.only in one.model]
    for line in table(pairs):
        print(line)
    if words.terms:
        for one, made in pairs:
            print(f"\n{one.model}, {one.gpus} {one.card}: { ({k: round(v, 2) for k, v in made.seconds.items()}) }")
            for load in made.loads:
                print(f"  {load.where} ({load.moment}): {parts(load)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
