"""Predict the memory and time of each stage of a plan (`rlhf plan --estimate`): arithmetic without torch.

Training memory comes from `rlhf_contrib.planner.memory`, which `benchmarks/planner.py` compares with real processes.
Engine memory and all times are formulas over data sheets and have not been confirmed on a GPU. All rows are assumed to
have their maximum length.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.execution.plan import PlannedStage
from rlhf_contrib.planner.hardware import COMMUNICATOR, CONTEXT, CPU, DECODING, EXPERTS, GIB, Hardware
from rlhf_contrib.planner.memory import BYTES, RankMemory, Role, human, larger, rank_memory, zero_stage
from rlhf_contrib.planner.sizes import ModelShape
from rlhf_contrib.planner.stage_models import Phase, Shapes, Step, phases, step_of
from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig, VllmServerSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore

GRAPHS = 2e9
"""Bytes of an engine besides weights and KV cache: CUDA graphs, activations, sampling. An allowance, not measured."""
ASLEEP = 1.5e9
"""Bytes of a sleeping engine: its context and graphs; 1.14 GB were seen on each of four RTX 3090 (vllm-project/vllm#32714)."""
SENDING = 2 * GIB
"""Bytes on either side of a transfer by NCCL: two buffers of 1 GiB (`packed_num_buffers` of vllm.distributed.weight_transfer)."""


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes of one memory at its worst moment, by term, and its limit."""

    where: str
    """`train GPU`, `engine GPU`, `shared GPU`, `node` (host memory)."""
    limit: float
    terms: Mapping[str, float]
    moment: str = ""
    """The moment, and the role that causes it."""

    @property
    def total(self) -> float:
        """Sum of the terms, in bytes."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether the sum is within the limit."""
        return self.total <= self.limit


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memories of a stage, and the seconds of one step by part ({} if the data alone determine the steps)."""

    label: str
    loads: tuple[Load, ...]
    roles: tuple[tuple[Role, RankMemory], ...]
    seconds: Mapping[str, float]
    steps: int = 0
    kv_tokens: float | None = None
    """Tokens that fit in the KV cache of one engine; None for engines without a cache of fixed size."""

    @property
    def fits(self) -> bool:
        """Whether all memories are within their limits."""
        return all(load.fits for load in self.loads)


def estimates(
    planned: Sequence[PlannedStage], store: ArtifactStore, runtime: RuntimeConfig, on: Hardware, prompt_tokens: int
) -> list[Estimate]:
    """Estimate each stage that has engines and will run, in order."""
    shapes = Shapes(store)
    found = []
    for stage in planned:
        if stage.decision.action != "HIT":
            held = phases(stage.spec, shapes, runtime, prompt_tokens)
            if held:
                found.append(estimate(stage.label, held, step_of(stage, prompt_tokens), runtime, on))
        shapes.note(stage.spec)
    return found


def estimate(label: str, held: Sequence[Phase], step: Step | None, runtime: RuntimeConfig, on: Hardware) -> Estimate:
    """Estimate a stage that holds the models of each phase in `held`, one phase after another."""
    loads: dict[str, Load] = {}
    for phase in held:
        for load in _loads(phase, runtime, on):
            if load.where not in loads or load.total - load.limit > loads[load.where].total - loads[load.where].limit:
                loads[load.where] = load
    roles = {role.label: role for phase in held for role in phase.roles}
    memories = tuple((role, _memory(role, runtime, on)) for role in roles.values())
    sampled = next((phase.sampled for phase in held if phase.sampled), None)
    tokens = kv_tokens(sampled, runtime, on) if sampled else None
    kept = any(keeps_weights(phase, runtime) for phase in held)
    seconds = step_seconds(list(roles.values()), sampled, step, runtime, on, kept=kept) if step else {}
    return Estimate(label, tuple(loads.values()), memories, seconds, step.steps if step else 0, tokens)


# ---------------------------------------------------------------- memory


def _memory(role: Role, runtime: RuntimeConfig, on: Hardware) -> RankMemory:
    own = runtime.of(role.name)
    return rank_memory(role, own.trainer, own.train_workers, on_cpu=on.name == CPU)


def _loads(phase: Phase, runtime: RuntimeConfig, on: Hardware) -> Iterator[Load]:
    """Yield the memory of each kind of GPU, and of a node."""
    _check_kinds(phase, runtime, on)
    memories = {role.label: _memory(role, runtime, on) for role in phase.roles}
    pools = {name: [one for one in phase.roles if runtime.pool_of(one.name) == name] for name in ("", *runtime.pools)}
    worst = {name: _worst(roles, memories) for name, roles in pools.items()}
    engine = engine_bytes(phase.sampled, runtime, on) if phase.sampled else {}
    host = host_bytes(phase, memories, runtime, on)
    if on.name == CPU:
        workers = {name: runtime.in_pool(name).train_workers for name in pools}
        ranks = {
            f"{term} x {workers[name]}": size * workers[name]
            for name, (terms, _) in worst.items()
            for term, size in terms.items()
        }
        yield Load("machine", on.memory, ranks | engine | host, worst[""][1])
        return
    context = {"context": CONTEXT}
    trained, moment = worst.pop("")
    if trained and engine and runtime.shares_gpus:
        own = {role.label: memories[role.label] for role in pools[""]}
        yield Load("shared GPU", on.memory, *_shared(trained, own, engine, moment, runtime))
    else:
        sent = by_nccl(phase, runtime, on)
        if trained:
            if sent:  # no model trains while rank 0 sends: buffers count only if they make the worst moment
                trained, moment = _sending(trained, moment, memories)
            group = {"NCCL to the engines": COMMUNICATOR} if sent else {}
            yield Load("train GPU", on.memory, context | group | trained, moment)
        if engine:
            received = {"NCCL from the trainer": COMMUNICATOR, "buffers of a sync": SENDING} if sent else {}
            yield Load("engine GPU", on.memory, engine | received)
    for name, (terms, moment) in worst.items():
        if terms:
            yield Load(f"GPU of pool {name}", on.memory, context | terms, moment)
    yield Load("node", on.host, host)


def _check_kinds(phase: Phase, runtime: RuntimeConfig, on: Hardware) -> None:
    """Raise ConfigError if some models are on CPUs and others on GPUs; this mix has no hardware description here."""
    for key, held in (("gpus_per_train_worker", phase.roles), ("gpus_per_engine", phase.sampled)):
        if held and on.name != CPU and not getattr(runtime, key):
            rule = "computes on CPUs what --estimate knows on GPUs or on CPUs alone"
            raise ConfigError(f"runtime.{key}", 0, rule, "give both GPUs or none, or leave --estimate out")


def _worst(roles: Sequence[Role], memories: Mapping[str, RankMemory]) -> tuple[dict[str, float], str]:
    """The terms and name of a train worker's worst moment. Opening a model keeps all earlier ones resident."""
    worst: dict[str, float] = {}
    name = ""
    for number, role in enumerate(roles):
        for moment, terms in memories[role.label].moments.items():
            if moment == "sync" and role.name == "value_model":
                continue  # its weights are never sent
            beside = roles[: number + 1] if moment == "open" else roles
            kept = {
                f"{one.label} {term}": size for one in beside for term, size in memories[one.label].resident.items()
            }
            now = kept | {f"{moment} {term}": size for term, size in terms.items()}
            if sum(now.values()) > sum(worst.values()):
                worst, name = now, f"{MOMENTS[moment]} the {role.label.replace('_', ' ')}"
    return worst, name


def _sending(worst: dict[str, float], moment: str, memories: Mapping[str, RankMemory]) -> tuple[dict[str, float], str]:
    """The larger of `worst` and the moment when rank 0 sends its weights by NCCL."""
    kept = {f"{name} {term}": size for name, memory in memories.items() for term, size in memory.resident.items()}
    gathered = max((sum(memory.moments.get("sync", {}).values()) for memory in memories.values()), default=0.0)
    now = kept | {"buffers of a sync": SENDING, "weights being gathered": gathered}
    return (now, "handing out the policy") if sum(now.values()) > sum(worst.values()) else (worst, moment)


MOMENTS = {
    "open": "opening",
    "train": "training",
    "measure": "measuring with",
    "sync": "handing out",
    "save": "saving",
}


def _shared(
    trained: dict[str, float],
    memories: Mapping[str, RankMemory],
    engine: dict[str, float],
    moment: str,
    runtime: RuntimeConfig,
) -> tuple[dict[str, float], str]:
    """Terms of a GPU shared by a train worker and an engine: the larger of training and sampling."""
    sleeps = runtime.sampler.needs().sleeps
    asleep = {"engine asleep": ASLEEP} if sleeps else engine
    between = {f"{name} {term}": size for name, memory in memories.items() for term, size in memory.resident.items()}
    resting = {} if runtime.trainer.sleep else between
    training = {"context": CONTEXT} | trained | asleep
    sampling = {"context": CONTEXT} | resting | engine
    # Weights are received before the KV cache is allocated.
    sync = dict(memories["policy"].moments.get("sync", {}))
    buffers = {"buffer of a sync": float(GIB)}
    awake = {name: size for name, size in engine.items() if name != "engine KV cache" or not sleeps}
    loading = {"context": CONTEXT} | resting | sync | buffers | awake
    moments = {moment: training, "sampling": sampling, "handing out the policy": loading}
    worst = max(moments, key=lambda name: sum(moments[name].values()))
    return moments[worst], worst


def engine_bytes(shape: ModelShape, runtime: RuntimeConfig, on: Hardware) -> dict[str, float]:
    """Bytes of an engine on each of its GPUs; on CPUs, of all engines together; {} for remote servers.

    vLLM uses `gpu_memory_fraction` of the GPU for weights, graphs and KV cache together.
    """
    sampler = runtime.sampler
    if isinstance(sampler, VllmServerSamplerConfig):
        return {}
    if not isinstance(sampler, VllmSamplerConfig):
        context = {} if on.name == CPU else {"engine context": CONTEXT}
        return context | {"engine weights": float(BYTES[sampler.dtype] * shape.parameters)}
    weights = float(BYTES[sampler.dtype] * shape.parameters) / sampler.tensor_parallel
    if on.name == CPU:
        engines = sampler.engines
        return {"engine weights": weights * engines, "engine KV cache": sampler.kv_cache_gib * GIB * engines}
    cache = sampler.gpu_memory_fraction * on.memory - weights - GRAPHS
    return {"engine weights": weights, "engine graphs": GRAPHS, "engine KV cache": max(cache, 0.0)}


def kv_token_bytes(shape: ModelShape, dtype: str) -> float:
    """Bytes of one token in the KV cache: a key and a value in each layer."""
    return 2.0 * shape.layers * shape.key_width * BYTES[dtype]


def kv_tokens(shape: ModelShape, runtime: RuntimeConfig, on: Hardware) -> float | None:
    """Number of tokens that fit in the KV cache of one engine; None for an engine without a cache of fixed size."""
    sampler = runtime.sampler
    if not isinstance(sampler, VllmSamplerConfig):
        return None
    cache = engine_bytes(shape, runtime, on)["engine KV cache"]
    cache *= sampler.tensor_parallel if on.name != CPU else 1 / sampler.engines
    return cache / kv_token_bytes(shape, sampler.dtype)


def host_bytes(
    phase: Phase, memories: Mapping[str, RankMemory], runtime: RuntimeConfig, on: Hardware
) -> dict[str, float]:
    """Bytes of host memory on the fullest node: the resident data of its ranks and engines, and temporary copies.

    Model files are memory-mapped. They are in a node's page cache once, and the kernel frees them if memory is short.
    """
    roles = phase.roles
    ranks = _ranks_of_fullest_node(roles, memories, runtime, on)
    kept = {
        f"{name} {term}": number * ranks[name]
        for name, memory in memories.items()
        for term, number in memory.host.items()
    }

    def used(moment: str) -> dict[str, float]:
        return {name: sum(memory.host_moments.get(moment, {}).values()) for name, memory in memories.items()}

    # Copies of all trained models may wait to be written; with offloaded states, a model is written before the next is
    # copied. One rank sends the weights through Ray's store.
    copied = [size * ranks[name] for name, size in used("save").items()]
    saved = max(copied, default=0.0) if runtime.trainer.offload_optimizer else sum(copied)
    # Rank 0 holds a copy of tensors that leave the GPU before they are sent.
    by_host = phase.samples_first and (runtime.trainer.sleep or not by_gpu(runtime, on))
    sent = max(used("sync").values(), default=0.0) if by_host else 0.0
    updated = max((size * ranks[name] for name, size in used("train").items()), default=0.0)
    copies = [{"checkpoint copies": saved}, {"weights handed out": sent}, {"update": updated}]
    if phase.sampled and keeps_weights(phase, runtime):
        engine = engine_bytes(phase.sampled, runtime, on)["engine weights"]
        kept["engine weights, asleep"] = engine * min(_engine_gpus(runtime), on.per_node)
    if phase.sampled and runtime.trainer.sleep:
        resting = sum(
            memories[role.label].total * ranks[role.label] for role in roles if not runtime.pool_of(role.name)
        )
        copies.append({"train workers, asleep": resting})
    return kept | larger(*copies)


def _ranks_of_fullest_node(
    roles: Sequence[Role], memories: Mapping[str, RankMemory], runtime: RuntimeConfig, on: Hardware
) -> dict[str, int]:
    """Label of each role -> its ranks on the node with the most host memory in use; largest pools are placed first."""
    kept = defaultdict[str, float](float)
    for role in roles:
        kept[runtime.pool_of(role.name)] += sum(memories[role.label].host.values())
    free, ranks = on.per_node, dict[str, int]()
    for pool in sorted(kept, key=lambda name: -kept[name]):
        ranks[pool] = min(runtime.in_pool(pool).train_workers, free)
        free -= ranks[pool]
    return {role.label: ranks[runtime.pool_of(role.name)] for role in roles}


def keeps_weights(phase: Phase, runtime: RuntimeConfig) -> bool:
    """Whether sleeping engines move weights to host memory, because they get no new ones before they sample again."""
    needs, replaced = runtime.sampler.needs(), phase.samples_first and not phase.samples_again
    return needs.sleeps and phase.sampled is not None and (needs.adapters or not replaced)


def by_gpu(runtime: RuntimeConfig, on: Hardware) -> bool:
    """Whether weights travel between GPUs: by NCCL to other GPUs, by IPC to engines that share a rank's GPU."""
    shared = not runtime.shares_gpus or _engine_gpus(runtime) <= runtime.train_workers
    return on.name != CPU and shared and runtime.sampler.needs().device_transfer


def by_nccl(phase: Phase, runtime: RuntimeConfig, on: Hardware) -> bool:
    """Whether the policy's full weights travel by NCCL, from GPUs to other GPUs."""
    sends = phase.samples_first and phase.sampled is not None
    return sends and by_gpu(runtime, on) and not runtime.shares_gpus


# ---------------------------------------------------------------- time


def step_seconds(
    roles: Sequence[Role],
    sampled: ModelShape | None,
    step: Step,
    runtime: RuntimeConfig,
    on: Hardware,
    *,
    kept: bool = False,
) -> dict[str, float]:
    """Seconds of one step by part: sample, measure, train, sync, sleep. Pools compute at the same time.

    With `kept`, sleeping engines move their weights to host memory and back.
    """
    trainer = runtime.trainer
    seconds: dict[str, float] = {}
    if sampled is not None and step.answers:
        seconds["sample"] = sample_seconds(sampled, step, runtime, on)
    measured, trained = defaultdict[str, float](float), defaultdict[str, float](float)
    for role in roles:
        own, pool = runtime.of(role.name), "" if on.name == CPU else runtime.pool_of(role.name)
        # On CPUs all workers share the cores.
        speed = on.flops * on.mfu * (own.train_workers if on.name != CPU else 1)
        gathers = _gather_seconds(role, step.trained, own, on)
        if step.answers:
            measured[pool] += role.measures * max(products(role, step, linear=2) / speed, gathers)
        if role.trained:
            again = 2 * trainer.gradient_checkpointing
            work = products(role, step, linear=(4 if role.lora else 6) + again, attention=6 + again)
            trained[pool] += step.epochs * max(work / speed, 3 * gathers)
            if trainer.offload_optimizer and zero_stage(role, own.trainer):
                moved = 6.0 * role.trained_parameters / own.train_workers  # gradients out, weights back
                trained[pool] += moved / on.pcie
    if measured:
        seconds["measure"] = max(measured.values())
    seconds["train"] = max(trained.values(), default=0.0)
    if step.answers and sampled is not None:
        policy = next((role for role in roles if role.trained and role.name == "policy"), None)
        if policy is not None:
            seconds["sync"] = _sync_seconds(policy, runtime, on)
        slept = _sleep_seconds(roles, sampled if kept else None, runtime, on)
        seconds |= {"sleep": slept} if slept else {}
    return seconds


def products(role: Role, step: Step, *, linear: int, attention: int = 2) -> float:
    """Operations of passes over the samples of a step, as in a dense model; `linear` and `attention` are 2 per pass.

    A pass multiplies each token with each weight and, in attention, with the keys and values of half of its row on
    average (causal mask). Adapters save the products for weight gradients, which attention does not have.
    """
    over = attention * role.shape.layers * role.shape.query_width * step.length
    total = step.trained * (float(linear * role.shape.active) + over)
    return total / EXPERTS if role.shape.sparse else total


def _sync_seconds(policy: Role, runtime: RuntimeConfig, on: Hardware) -> float:
    """Seconds that rank 0 needs to send the weights of the policy, or its adapters."""
    alone = runtime.sampler.needs().adapters and policy.lora is not None
    number = policy.trained_parameters if alone else policy.shape.parameters
    weights = BYTES[runtime.trainer.dtype] * number
    by_host = on.name != CPU and (alone or not by_gpu(runtime, on))
    across = on.link if runtime.train_workers + _engine_gpus(runtime) <= on.per_node else on.card
    if runtime.shares_gpus:  # each rank gathers them for its own GPU
        across = on.link if runtime.train_workers <= on.per_node else on.network
    return weights / (on.pcie if by_host else across)


def _sleep_seconds(roles: Sequence[Role], sampled: ModelShape | None, runtime: RuntimeConfig, on: Hardware) -> float:
    """Seconds that the engines of `sampled` and the train workers need to move to host memory and back."""
    moved = 0.0
    if sampled is not None:
        moved += engine_bytes(sampled, runtime, on)["engine weights"]
    if runtime.trainer.sleep:
        moved += sum(_memory(role, runtime, on).total for role in roles if not runtime.pool_of(role.name))
    return 2 * moved / on.pcie


def _engine_gpus(runtime: RuntimeConfig) -> int:
    needs = runtime.sampler.needs()
    return needs.engines * needs.tensor_parallel


def _gather_seconds(role: Role, tokens: int, runtime: RuntimeConfig, on: Hardware) -> float:
    """Seconds that ZeRO 3 needs to gather the weights, once per micro-batch of a rank.

    A rank receives the shards of all other ranks at `busbw`.
    """
    workers = runtime.train_workers
    if zero_stage(role, runtime.trainer) != 3 or workers == 1:
        return 0.0
    link = on.link if workers <= on.per_node else on.network
    passes = math.ceil(tokens * runtime.trainer.ranks_per_share / (workers * role.tokens))
    return passes * BYTES[runtime.trainer.dtype] * role.parameters * (workers - 1) / workers / link


def sample_seconds(shape: ModelShape, step: Step, runtime: RuntimeConfig, on: Hardware) -> float:
    """Seconds of sampling: the prompts at the speed of matrix products, then each token at memory bandwidth."""
    sampler, needs = runtime.sampler, runtime.sampler.needs()
    dtype = getattr(sampler, "dtype", "float32")
    engines, parallel = needs.engines, needs.tensor_parallel
    each = math.ceil(step.answers / engines)
    held = kv_tokens(shape, runtime, on)
    most = each if held is None else held / (step.prompt_tokens + step.answer_tokens)
    together = max(1.0, min(each, most, getattr(sampler, "max_num_seqs", None) or each))
    flops = on.flops * on.mfu / (1 if on.name != CPU else engines)
    prompts = 2.0 * shape.active * each * step.prompt_tokens / (parallel * flops)
    length = step.prompt_tokens + step.answer_tokens / 2
    # The answers of a batch are routed to different experts; large batches read all experts.
    weights = min(float(shape.parameters), shape.active * together)
    read = BYTES[dtype] * weights + together * length * kv_token_bytes(shape, dtype)
    multiplied = 2.0 * shape.active * together / flops
    token = max(read / (on.bandwidth * DECODING), multiplied) / parallel
    # The last answers read the weights for themselves alone.
    late = max(0, step.longest - step.answer_tokens)
    last = late * BYTES[dtype] * shape.active / (parallel * on.bandwidth * DECODING)
    return prompts + token * step.answer_tokens * math.ceil(each / together) + last


# ---------------------------------------------------------------- what does not fit


def refusal(
    found: Sequence[Estimate],
    planned: Sequence[PlannedStage],
    store: ArtifactStore,
    runtime: RuntimeConfig,
    on: Hardware,
    prompt_tokens: int,
) -> ConfigError | None:
    """The error for the stage that exceeds its memory the most, with settings that would fix it; None if all fit."""
    over = [(load.total / load.limit, one, load) for one in found for load in one.loads if not load.fits]
    if not over:
        return _cache_error(found, runtime, on)
    _, worst, load = max(over, key=lambda each: each[0])

    def fits(changed: RuntimeConfig) -> bool:
        again = estimates(planned, store, changed, on, prompt_tokens)
        return all(one.fits for one in again)

    where = f"{worst.label} needs {human(load.total)} GB on each {load.where} of {human(load.limit)}"
    where += f" while {load.moment}" if load.moment else ""
    for key, value, changed in mends(runtime, on):
        if fits(changed):
            names, was = key.split(" and "), _value_at(runtime, key.split(" and ")[0])
            others = f" and {' and '.join(names[1:])}" if len(names) > 1 else ""
            return ConfigError(names[0], was, where, f"set it to {json.dumps(value)}{others}")
    largest = max(load.terms, key=lambda term: load.terms[term])
    rule = f"{where}, and no other setting of [runtime] alone mends it; the largest part is {largest}, {human(load.terms[largest])} GB"
    size = f"{max(role.parameters for role, _ in worst.roles) / 1e9:.3g}B parameters" if worst.roles else "this size"
    return ConfigError("prepare_data.model", size, rule, "take a smaller model, or GPUs with more memory")


def _cache_error(found: Sequence[Estimate], runtime: RuntimeConfig, on: Hardware) -> ConfigError | None:
    """The error for an engine whose KV cache is too small for one answer of full length; None if there is none."""
    longest = getattr(runtime.sampler, "max_model_len", 0)
    for one in found:
        if one.kv_tokens is not None and one.kv_tokens < longest:
            rule = f"leaves {one.label} a KV cache of {one.kv_tokens:,.0f} tokens, less than one answer of {longest}"
            name = "kv_cache_gib" if on.name == CPU else "gpu_memory_fraction"
            remedy = "raise it" if on.name == CPU else "raise it, or raise runtime.sampler.tensor_parallel"
            return ConfigError(f"runtime.sampler.{name}", getattr(runtime.sampler, name), rule, remedy)
    return None


def mends(runtime: RuntimeConfig, on: Hardware) -> Iterator[tuple[str, Any, RuntimeConfig]]:
    """Yield settings that lower memory use as (key, value, changed runtime), cheapest first."""
    trainer, sampler = runtime.trainer, runtime.sampler
    steps: list[tuple[str, Any, RuntimeConfig]] = []

    def with_trainer(base: RuntimeConfig, **update: Any) -> RuntimeConfig:
        return base.model_copy(update={"trainer": base.trainer.model_copy(update=update)})

    if not trainer.gradient_checkpointing:
        steps.append(
            ("runtime.trainer.gradient_checkpointing", True, with_trainer(runtime, gradient_checkpointing=True))
        )
    batch = trainer.micro_batch // 2
    while batch >= 1 and not trainer.micro_tokens:
        steps.append(("runtime.trainer.micro_batch", batch, with_trainer(runtime, micro_batch=batch)))
        batch //= 2
    if runtime.shares_gpus and isinstance(sampler, VllmSamplerConfig) and not sampler.sleep:
        asleep = runtime.model_copy(update={"sampler": sampler.model_copy(update={"sleep": True})})
        steps.append(("runtime.sampler.sleep", True, asleep))
    if runtime.shares_gpus and not trainer.sleep:
        steps.append(("runtime.trainer.sleep", True, with_trainer(runtime, sleep=True)))
    if isinstance(sampler, VllmSamplerConfig):
        for tenths in range(round(sampler.gpu_memory_fraction * 10) - 1, 1, -1):
            lower = sampler.model_copy(update={"gpu_memory_fraction": tenths / 10})
            if runtime.shares_gpus:
                key = "runtime.sampler.gpu_memory_fraction"
                steps.append((key, tenths / 10, runtime.model_copy(update={"sampler": lower})))
    if trainer.engine == "deepspeed":
        if trainer.zero_stage < 3 and runtime.train_workers > 1 and trainer.tensor_parallel == 1:
            steps.append(("runtime.trainer.zero_stage", 3, with_trainer(runtime, zero_stage=3)))
        if not trainer.offload_optimizer and trainer.zero_stage > 0:
            steps.append(("runtime.trainer.offload_optimizer", True, with_trainer(runtime, offload_optimizer=True)))
        if not trainer.offload_optimizer and runtime.train_workers > 1 and trainer.zero_stage < 3:
            both = with_trainer(runtime, offload_optimizer=True, zero_stage=3)
            steps.append(("runtime.trainer.zero_stage and runtime.trainer.offload_optimizer = true", 3, both))
        if not trainer.offload_optimizer and trainer.zero_stage == 3:
            least = with_trainer(runtime, offload_optimizer=True, micro_batch=1)
            steps.append(("runtime.trainer.offload_optimizer and runtime.trainer.micro_batch = 1", True, least))
    spread = (
        runtime.shares_gpus and runtime.sampler.needs().tensor_parallel > 1
    )  # then the number of engines sets the number of ranks
    if trainer.engine == "deepspeed" and on.name != CPU and not spread:
        for factor in (2, 4, 8):
            more = runtime.train_workers * factor
            steps.append(("runtime.train_workers", more, runtime.model_copy(update={"train_workers": more})))
    for name, pool in runtime.pools.items():
        for key, value in (("zero_stage", 3), ("workers", 2 * pool.workers), ("workers", 4 * pool.workers)):
            changed = runtime.pools | {name: pool.model_copy(update={key: value})}
            steps.append((f"runtime.pools.{name}.{key}", value, runtime.model_copy(update={"pools": changed})))
    yield from steps


def _value_at(runtime: RuntimeConfig, key: str) -> Any:
    value: Any = runtime
    for name in key.split(".")[1:]:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def alike(found: Sequence[Estimate]) -> list[tuple[list[str], Estimate]]:
    """Group equal estimates: each distinct estimate with the labels of its stages."""
    groups: list[tuple[list[str], Estimate]] = []
    for one in found:
        for labels, known in groups:
            if replace(one, label=known.label) == known:
                labels.append(one.label)
                break
        else:
            groups.append(([one.label], one))
    return groups
