"""Configure the parts that several stages share: models, optimizer, trainer, sampler and runtime."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import LONGEST_S, OPERATIONAL, Config, RenamedConfig, Seconds, added_option
from rlhf_core.schema.secrets import HOLDS_SECRETS

# ---------------------------------------------------------------- precision

CPU_INFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply bfloat16: AVX-512, AMX and Arm."""


@cache
def multiplies_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether this machine's processor multiplies bfloat16 natively; False if unknown."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not NATIVE_BFLOAT16.isdisjoint(next(flags, []))


def native_dtype(value: Any) -> Any:
    """Return the precision that `auto` means on this machine, and anything else as it is.

    >>> native_dtype("float32")
    'float32'
    """
    if value != "auto":
        return value
    return "bfloat16" if multiplies_bfloat16() else "float32"


def dtype_of_gpus(table: Any, gpus: Any) -> Any:
    """Return `table` with bfloat16 for a `dtype` of `auto` if it computes on GPUs, whatever processor plans the run.

    `gpus` is what is written; validation refuses it if it is no number.

    >>> dtype_of_gpus({"dtype": "auto"}, 0.5)
    {'dtype': 'bfloat16'}
    """
    uses = isinstance(gpus, (int, float)) and gpus > 0
    if isinstance(table, Mapping) and table.get("dtype") == "auto" and uses:
        return {**table, "dtype": "bfloat16"}
    return table


Precision = Literal["float32", "bfloat16"]
DType = Annotated[
    Precision, BeforeValidator(native_dtype, json_schema_input_type=Literal["auto", "float32", "bfloat16"])
]
"""Precision; `auto` is replaced when the configuration is read, so plans and keys have the precision itself."""

# ---------------------------------------------------------------- engines

Url = Annotated[str, Field(pattern=r"^https?://[^/?#]+$")]
"""Address of a server, without a path."""


# ---------------------------------------------------------------- models


GIVEN_TO_TEMPLATES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of chat templates that are of a conversation."""


class PretrainedModel(Config):
    """A causal LM, given by folder or Hub name, or a GGUF file inside a folder."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Folder or Hub name; `package:<python package>/<folder>` finds a folder inside an installed package."""
    revision: str = ""
    """Commit of a Hub model; required for a Hub name so that the key means one model."""
    gguf_file: str = ""
    """Name of a GGUF file in `path`, dequantized on load."""
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str] = (
        added_option({})
    )
    """Values of variables that the chat template reads, such as `{enable_thinking = false}`. They are written into the template
    of the model, so that training, sampling and serving have the same."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, values: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        for name in sorted(values.keys() & GIVEN_TO_TEMPLATES):
            raise ValueError(f"{name} = {values[name]!r}: is given to the template with each conversation; remove it")
        for name, value in values.items():
            if isinstance(value, str) and value.lower() in ("true", "false"):
                rule = "is text, which a template takes for true"
                raise ValueError(f"{name} = {value!r}: {rule}; write {value.lower()} without quotes")
        return values


class InitModel(Config):
    """A randomly initialized Llama of a given shape, with a byte-level BPE tokenizer trained on the demonstrations."""

    type: Literal["init"] = "init"
    vocab_size: int = Field(1024, ge=300)
    hidden_size: int = Field(256, ge=32)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(4, ge=1)
    intermediate_size: int = Field(704, ge=32)
    max_positions: int = Field(256, ge=32)


BaseModelConfig = Annotated[PretrainedModel | InitModel, Field(discriminator="type")]


ALL_LINEAR: Literal["all-linear"] = "all-linear"


class LoraConfig(RenamedConfig):
    """Low-rank adapters (arXiv 2106.09685), merged into the weights on export."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """Variant of the adapters: `rslora` scales by alpha / sqrt(rank) (arXiv 2312.03732), `dora` also learns the norms
    of the rows (2402.09353)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear modules by name or by the end of their full name, as in peft; the default fits Llama and its kin. "all-linear"
    fits every architecture: all but the LM head. Fused experts are not modules and get no adapters. A module that shares
    its weight (a tied LM head) is refused, because its adapter could not be merged."""
    quantize: Literal["", "nf4"] = ""
    """Quantization of the base weights: `nf4` keeps them in 4 bits (QLoRA, arXiv 2305.14314) and needs bitsandbytes.
    The export has full weights: the rounded ones with the adapters merged in."""


# ---------------------------------------------------------------- training


class OptimizerConfig(Config):
    """AdamW with gradient clipping and a learning-rate schedule over the actual number of optimizer steps."""

    learning_rate: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    min_lr_fraction: float = Field(0.1, ge=0, le=1)
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of the exponential moving average of the weights, which is the stage's result if above 0; 0.99 is common.
    Evaluations during training use the weights themselves, so it cannot be combined with `loop.keep_best`."""


def refuse_average(optimizer: OptimizerConfig) -> None:
    """Raise ValueError for averaged weights of a reward model: its report and probe scores use the trained weights."""
    if optimizer.ema_decay:
        raise ValueError(
            f"optimizer.ema_decay = {optimizer.ema_decay}: the report and the probe scores use the trained "
            "weights, not their average; leave it at 0"
        )


class TrainerConfig(Config):
    """The settings of training. Row and worker counts change results only by rounding, the precision does more."""

    engine: Literal["deepspeed", "torch"] = "deepspeed"
    dtype: DType = "float32"
    """Precision of the passes; updates are made in float32. `auto` is bfloat16 on GPUs, and on CPUs if the processor of
    the machine that plans the run multiplies it natively, else float32. In Python, a `TrainerConfig` that is made before
    its `RuntimeConfig` knows no GPUs: give it the precision."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], OPERATIONAL] = 0
    offload_optimizer: Annotated[bool, OPERATIONAL] = False
    micro_batch: Annotated[int, Field(ge=1), OPERATIONAL] = 8
    """Number of rows per forward pass and rank; gradients depend on it only by rounding."""
    micro_tokens: Annotated[int, Field(ge=0), OPERATIONAL] = 0
    """Maximum number of tokens, with padding, in a forward pass of at least one row, used instead of `micro_batch` if
    above 0: short rows form larger batches. `micro_batch` applies to packed rows."""
    fp32_lm_head: bool = added_option(False)
    """Whether the LM head of a policy multiplies in float32 under `dtype = "bfloat16"`. Set it for the sampler, too:
    bfloat16 logits are the largest part of the difference between the log-probabilities of the two (arXiv 2506.13585).
    Takes a float32 copy of the head's weight. Scores and values are always computed in float32."""
    fp32_reduce: bool = added_option(False)
    """Whether train workers sum their gradients in float32 under `dtype = "bfloat16"` on DeepSpeed, which sends twice the
    bytes. In bfloat16 each sum of two workers' gradients is rounded to 8 bits."""
    gradient_checkpointing: Annotated[bool, OPERATIONAL] = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel. `sdpa` is refused for architectures with an attention cap or sinks (Gemma 2, gpt-oss)."""
    liger: bool = False
    """Whether to use Liger's kernels for norms, rotations and MLPs; needs `liger-kernel` and a GPU."""
    router_aux_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, computed over each sequence and added to every loss of
    every trained model; 0.001 to 0.02 are common. 0 omits it; dense models are refused above 0."""
    sleep: Annotated[bool, OPERATIONAL] = False
    """Whether a train worker that shares its GPU with an engine moves weights and optimizer states to host memory while
    the engine samples, and back to train."""
    sequence_parallel: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Number of train workers that share each row (Ulysses), for rows too long for one GPU; it must divide the train
    workers and the attention heads. DeepSpeed and sdpa only."""

    tensor_parallel: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Number of train workers that share each attention and MLP weight of a trained model (AutoTP); it must divide the
    train workers and the key heads. DeepSpeed with ZeRO 1 or 2 only, without adapters. Frozen models stay whole."""

    @property
    def ranks_per_share(self) -> int:
        """Return the number of neighboring train workers that get the same samples."""
        return self.sequence_parallel * self.tensor_parallel

    @model_validator(mode="after")
    def _check_reduce(self) -> Self:
        for name, needed in (("engine", "deepspeed"), ("dtype", "bfloat16")) if self.fp32_reduce else ():
            if getattr(self, name) != needed:
                raise ValueError(
                    f"fp32_reduce = true: has no effect with {name} = {getattr(self, name)!r}; remove it, or set {name} to {needed!r}"
                )
        return self

    @model_validator(mode="after")
    def _check_parallelism(self) -> Self:
        rules: dict[str, dict[str, tuple[object, ...]]] = {
            "sequence_parallel": {"engine": ("deepspeed",), "attention": ("sdpa",), "router_aux_coef": (0,)},
            "tensor_parallel": {"engine": ("deepspeed",), "zero_stage": (1, 2), "sequence_parallel": (1,)},
        }
        for kind, allowed in rules.items():
            for name, values in allowed.items() if getattr(self, kind) > 1 else ():
                if getattr(self, name) not in values:
                    choice = " or ".join(repr(value) for value in values)
                    raise ValueError(
                        f"{kind} = {getattr(self, kind)}: {name} = {getattr(self, name)!r} cannot be combined with it; set {name} "
                        f"to {choice}, or {kind} to 1"
                    )
        return self


# ---------------------------------------------------------------- sampling


LEAST_TEMPERATURE = 0.01


NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties of sampling -> the value without effect."""


class SamplingConfig(Config):
    """The settings by which tokens are sampled. The trainer applies the same temperature."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the likeliest token, otherwise at least 0.01, the minimum of vLLM."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens to sample from; 0 keeps every token."""
    min_p: float = added_option(0.0, ge=0, lt=1)
    """Least probability of a token, as a part of the likeliest token's (arXiv 2407.01082); 0 keeps every token."""
    repetition_penalty: float = added_option(1.0, gt=0, le=2)
    """Divisor of the positive logits, and factor of the negative ones, of tokens in the prompt or the answer so far."""
    presence_penalty: float = added_option(0.0, ge=-2, le=2)
    """Number subtracted from the logits of tokens in the answer so far."""
    frequency_penalty: float = added_option(0.0, ge=-2, le=2)
    """Number subtracted from the logit of a token for each time that it is in the answer so far."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = added_option(())
    """Texts that end an answer: it is cut after the token that completes the first of them, and its text has it."""
    max_tokens: int = Field(64, ge=1)

    @property
    def reshapes(self) -> str:
        """Return the first setting by which tokens are not drawn from the policy's whole distribution, or ""."""
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | NO_PENALTIES
        return next(
            (f"{name} = {getattr(self, name)}" for name, one in whole.items() if getattr(self, name) != one), ""
        )

    @property
    def penalties(self) -> dict[str, float]:
        """Return the penalties that are set, by name."""
        return {name: getattr(self, name) for name, none in NO_PENALTIES.items() if getattr(self, name) != none}

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        # vLLM raises it to 0.01 (`_MAX_TEMP` of its sampling_params.py) with only a warning.
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}: vLLM would sample at {LEAST_TEMPERATURE}, but the "
                f"trainer would assume {temperature}"
            )
        return temperature


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """The resources that a runtime provides for a sampler.

    >>> VllmSamplerConfig(engines=2).needs()
    EngineNeeds(engines=2, tensor_parallel=1, sleeps=False, device_transfer=True, adapters=False)
    """

    engines: int = 1
    """Number of processes that sample."""
    tensor_parallel: int = 1
    """Number of GPUs over which one engine shards its model."""
    sleeps: bool = False
    """Whether the engine frees its GPU while models train: it is a `DeviceSampler` with `sleep` and `wake`."""
    device_transfer: bool = False
    """Whether a trainer may send weights from GPU to GPU: the engine is a `DeviceSampler` with `transfer`."""
    adapters: bool = False
    """Whether the engine takes the adapters of a policy that trains such, without its other weights."""


class BaseSamplerConfig(Config):
    """Base class of sampler configurations. It names the module that opens the sampler, so planning imports no engine.

    docs/add_a_sampler.md shows a complete example.
    """

    module: ClassVar[str]
    """Dotted path of the module; its `ENGINE` is a `rlhf_core.interfaces.SamplerEngine`."""

    def needs(self) -> EngineNeeds:
        """Return the resources that the sampler needs: by default one process that gets weights through host memory."""
        return EngineNeeds()


class VllmSamplerConfig(BaseSamplerConfig):
    """vLLM engines, each a Ray actor."""

    module: ClassVar[str] = "rlhf_core.sampling.vllm_sampler"
    type: Literal["vllm"] = "vllm"
    dtype: DType = "float32"
    """Precision of sampling; `auto` as in `trainer.dtype`."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`, and to be set with it; vLLM's `head_dtype`."""
    max_model_len: int = Field(256, ge=16)
    tensor_parallel: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    engines: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Number of processes that sample, each with the weights, a KV cache and, on CPU, an equal share of the cores. On a
    few cores, engines of one thread are faster than one of several: much of a step is Python, which uses one core."""
    max_num_seqs: Annotated[int, Field(ge=1), OPERATIONAL] = 256
    kv_cache_gib: Annotated[float, Field(gt=0), OPERATIONAL] = 1.0
    """Size of the KV cache in GiB, on CPU only."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1), OPERATIONAL] = 0.5
    enforce_eager: Annotated[bool, OPERATIONAL] = True
    prefix_caching: bool = False
    """Whether common prefixes of prompts are computed once per version of the weights, which speeds up groups and turns
    of episodes. The cached tokens depend on earlier sampling, so a restart is no longer bitwise the same."""
    sleep: Annotated[bool, OPERATIONAL] = False
    """Whether an engine that shares its GPU with a train worker moves its weights to host memory and frees its KV cache
    while a model trains, and takes them back to sample."""
    lora_sync: Literal["merged", "adapter"] = added_option("merged")
    """What an engine is sent of a policy that trains adapters: all weights, with the adapters `merged`, or each `adapter` alone,
    which it adds to the products of the weights that it has. Results differ by rounding."""
    max_lora_rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], OPERATIONAL] = added_option(16)
    """Largest rank of the adapters, for which an engine with `lora_sync = "adapter"` keeps room."""

    def needs(self) -> EngineNeeds:
        """Return `engines` processes of `tensor_parallel` GPUs each, which take weights from GPU to GPU, or adapters alone."""
        alone = self.lora_sync == "adapter"
        return EngineNeeds(
            self.engines, self.tensor_parallel, sleeps=self.sleep, device_transfer=not alone, adapters=alone
        )


class VllmServerSamplerConfig(BaseSamplerConfig):
    """External `vllm serve` processes (`rlhf_core.sampling.vllm_server_sampler` lists the options they need)."""

    module: ClassVar[str] = "rlhf_core.sampling.vllm_server_sampler"
    type: Literal["vllm_server"] = "vllm_server"
    urls: Annotated[tuple[Url, ...], Field(min_length=1), OPERATIONAL, HOLDS_SECRETS]
    """Servers of the same policy, e.g. `["http://node-1:8000"]`; requests go to the one with the fewest. Write a
    secret in an address as `${env:NAME}`."""
    weights_folder: Annotated[str, Field(min_length=1), OPERATIONAL]
    """Folder for weight transfer, which the servers and this run see under the same absolute path."""
    token_env: Annotated[str, OPERATIONAL, HOLDS_SECRETS] = ""
    """Environment variable with the servers' `--api-key`."""
    dtype: Precision = "float32"
    """Precision with which the servers were started."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`: whether the servers were started with `--hf-overrides '{"head_dtype": "float32"}'`."""
    max_model_len: int = Field(256, ge=16)
    request_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Deadline, in seconds, of one completion, including the wait in the server's queue."""
    load_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Deadline, in seconds, of one weight update on all servers."""
    retries: Annotated[int, Field(ge=0), OPERATIONAL] = 2
    """Number of retries of a failed request, on another server if there is one."""
    max_in_flight: Annotated[int, Field(ge=1), OPERATIONAL] = 256
    """Maximum number of concurrent requests per server."""

    @field_validator("weights_folder")
    @classmethod
    def _check_absolute_path(cls, folder: str) -> str:
        if not folder.startswith("/"):
            raise ValueError("must be an absolute path, because servers resolve it too; start it with /")
        return folder


class HFSamplerConfig(BaseSamplerConfig):
    """Generation with plain transformers, for tests and machines without vLLM; never chosen silently."""

    module: ClassVar[str] = "rlhf_core.sampling.hf_sampler"
    type: Literal["hf"] = "hf"
    dtype: DType = "float32"
    """Precision of sampling; `auto` as in `trainer.dtype`."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`, and to be set with it."""
    batch_size: Annotated[int, Field(ge=1), OPERATIONAL] = 32


AnySamplerConfig = (
    VllmSamplerConfig
    | VllmServerSamplerConfig
    | HFSamplerConfig
)  # fmt: skip
"""The samplers, one per line; `runtime.sampler.type` selects one."""
SamplerConfig = Annotated[AnySamplerConfig, Field(discriminator="type")]


def check_lora_sync(lora: LoraConfig | None, *, key: str) -> None:
    """Raise ConfigError for adapters that a sampler cannot be sent alone (`lora_sync = "adapter"`).

    `key` is that of `lora`, in the stage that trains them.
    """
    remedy = 'or set runtime.sampler.lora_sync = "merged"'
    if lora is None:
        rule = 'there are no adapters, which runtime.sampler.lora_sync = "adapter" would send'
        raise ConfigError(key, None, rule, f"give it, {remedy}")
    if lora.variant == "dora":
        raise ConfigError(f"{key}.variant", lora.variant, "vLLM does not scale rows to norms", f'use "lora", {remedy}')
    if lora.quantize:
        rule = "the sampler has the weights before they were rounded to 4 bits, to which the adapters do not belong"
        raise ConfigError(f"{key}.quantize", lora.quantize, rule, f"remove it, {remedy}")


# ---------------------------------------------------------------- runtime


PoolRole = Literal["reference", "value_model", "reward_model", "teacher"]
"""The models that may have train workers of their own; the policy is where the weights go to the engines from."""


class PoolConfig(Config):
    """Train workers of their own for some models of a stage, which then compute while the others do."""

    workers: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    gpus_per_worker: Annotated[float, Field(ge=0, le=1), OPERATIONAL] = 0
    """Number of GPUs per worker, which no engine shares."""
    roles: Annotated[tuple[PoolRole, ...], Field(min_length=1), OPERATIONAL]
    """The models that they hold."""
    zero_stage: Annotated[Literal[0, 1, 2, 3] | None, OPERATIONAL] = None
    """ZeRO stage of these models; None is that of `runtime.trainer`, as below."""
    micro_batch: Annotated[int | None, Field(ge=1), OPERATIONAL] = None
    micro_tokens: Annotated[int | None, Field(ge=0), OPERATIONAL] = None


class RuntimeConfig(Config):
    """The place where engines run. `ray` starts a local Ray or joins `RAY_ADDRESS`; `local` is this process (tests)."""

    type: Annotated[Literal["ray", "local"], OPERATIONAL] = "ray"
    train_workers: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    gpus_per_train_worker: Annotated[float, Field(ge=0, le=1), OPERATIONAL] = 0
    """Number of GPUs per train worker; 0 trains on CPUs. If it and `gpus_per_engine` are fractions with a sum of at
    most 1, a train worker and an engine share a GPU; two train workers or two engines never do."""
    gpus_per_engine: Annotated[float, Field(ge=0), OPERATIONAL] = 0
    """Number of GPUs per engine: whole GPUs, as many as `sampler.tensor_parallel`, or a fraction of one; 0 samples on
    CPUs."""
    cpu_threads: Annotated[int, Field(ge=0), OPERATIONAL] = 0
    """Number of threads per worker; 0 is an equal share of the cores that the run may use. Results depend on it by
    rounding."""
    worker_timeout_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """Deadline, in seconds, of one call to a worker."""
    retries: Annotated[int, Field(ge=0), OPERATIONAL] = 2
    """Number of times a stage that lost its workers resumes in the same run without making progress."""
    execution: Annotated[Literal["inline", "ray-job"], OPERATIONAL] = "inline"
    """Where stages run: `inline` in the flow's process; `ray-job` as jobs of the Ray at `RAY_ADDRESS`, which continue
    if the flow dies, and to which the next run attaches."""
    job_pending_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Time, in seconds, that a job may wait for the cluster before the run gives up."""
    placement_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Time, in seconds, that workers may wait for GPUs that are busy or, in a cluster of `RAY_ADDRESS`, not there yet:
    an autoscaler starts nodes for waiting workers."""
    time_limit_s: Annotated[float, Field(ge=0, le=LONGEST_S), OPERATIONAL] = 0.0
    """Time, in seconds after the start of the allocation (`SLURM_JOB_START_TIME`, else of the run), at which stages
    save and the run ends; leave room for one step and one checkpoint. 0 sets no limit."""
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = VllmSamplerConfig()
    pools: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]*$")], PoolConfig], OPERATIONAL] = (
        added_option({})
    )
    """Train workers of some models alone, by a name of your choice. All others share the `train_workers`."""

    def of(self, role: str) -> Self:
        """Return the configuration of the workers of one role: its pool's as if they were the only ones."""
        return self.in_pool(self.pool_of(role))

    def pool_of(self, role: str) -> str:
        """Return the name of the pool that has a role, "" for the workers of all others."""
        return next((name for name, pool in self.pools.items() if role in pool.roles), "")

    def in_pool(self, name: str) -> Self:
        """Return the configuration of the workers of one pool, as if they were the only ones."""
        if not name:
            return self
        pool = self.pools[name]
        own = {key: getattr(pool, key) for key in ("zero_stage", "micro_batch", "micro_tokens")}
        trainer = {key: value for key, value in own.items() if value is not None} | {"sleep": False}
        workers = {"train_workers": pool.workers, "gpus_per_train_worker": pool.gpus_per_worker, "pools": {}}
        return self.model_copy(update=workers | {"trainer": self.trainer.model_copy(update=trainer)})

    @property
    def shares_gpus(self) -> bool:
        """Return whether a train worker and an engine share each GPU."""
        return 0 < self.gpus_per_train_worker < 1 and 0 < self.gpus_per_engine < 1

    @model_validator(mode="before")
    @classmethod
    def _resolve_gpu_dtypes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        gpus = {"trainer": data.get("gpus_per_train_worker"), "sampler": data.get("gpus_per_engine")}
        return {**data, **{name: dtype_of_gpus(data[name], gpus[name]) for name in gpus if name in data}}

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        train, engine = self.gpus_per_train_worker, self.gpus_per_engine
        if self.shares_gpus and round(train + engine, 4) > 1:
            raise ValueError(
                f"gpus_per_train_worker, gpus_per_engine = {train:g}, {engine:g}: a train worker and an engine with "
                "fractions share one GPU, and their sum is more than 1; make it at most 1, or set both to 1"
            )
        if engine > 1 and engine != int(engine):
            raise ValueError(
                f"gpus_per_engine = {engine:g}: above 1 it must be a whole number; use a whole number, or a fraction below 1"
            )
        parallel = self.sampler.needs().tensor_parallel
        if parallel > max(1.0, engine) and (train > 0 or engine > 0):
            raise ValueError(
                f"sampler.tensor_parallel = {parallel}: runtime.gpus_per_engine = {engine:g} is smaller; give each engine as "
                "many GPUs, which it then does not share"
            )
        return self

    @model_validator(mode="after")
    def _check_head_precision(self) -> Self:
        # A sampler without these options samples in float32.
        dtype = getattr(self.sampler, "dtype", "float32")
        heads = self.trainer.fp32_lm_head, getattr(self.sampler, "fp32_lm_head", False)
        if self.trainer.dtype == dtype == "bfloat16" and heads[0] != heads[1]:
            raise ValueError(
                f"trainer.fp32_lm_head, sampler.fp32_lm_head = {heads[0]}, {heads[1]}: with one head in float32, the "
                "log-probabilities of the two differ more than with none; set both"
            )
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        shares = self.type == "ray" and self.shares_gpus
        if self.trainer.sleep and not shares:
            raise ValueError(
                f"trainer.sleep = true: gpus_per_train_worker = {self.gpus_per_train_worker:g} on {self.type}, and only a "
                "train worker that shares a GPU with an engine has memory to give to it; set it to false, or "
                "gpus_per_train_worker and gpus_per_engine to fractions of one GPU"
            )
        if self.sampler.needs().sleeps and not shares:
            raise ValueError(
                f"sampler.sleep = true: gpus_per_engine = {self.gpus_per_engine:g} on {self.type}, and only an engine that "
                "shares a GPU with a train worker has memory to give back (vLLM cannot sleep on CPU); set it to false, or "
                "gpus_per_engine and gpus_per_train_worker to fractions of one GPU"
            )
        return self

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        held = [role for pool in self.pools.values() for role in pool.roles]
        for name, pool in self.pools.items():
            twice = next((role for role in pool.roles if held.count(role) > 1), None)
            if twice:
                raise ValueError(f"pools.{name}.roles = {twice!r}: another pool has it, too; leave it in one of them")
            if (pool.gpus_per_worker > 0) != (self.gpus_per_train_worker > 0):
                raise ValueError(
                    f"pools.{name}.gpus_per_worker = {pool.gpus_per_worker:g}: gpus_per_train_worker = "
                    f"{self.gpus_per_train_worker:g}, and all models are in the same kind of memory; give both GPUs or none"
                )
            trainer = self.in_pool(name).trainer
            if pool.workers % trainer.ranks_per_share != 0:
                raise ValueError(
                    f"pools.{name}.workers = {pool.workers}: trainer.sequence_parallel, tensor_parallel = "
                    f"{trainer.sequence_parallel}, {trainer.tensor_parallel} do not divide it; use a multiple"
                )
            TrainerConfig.model_validate(trainer.model_dump())  # a ZeRO stage that the pool's parallelism refuses
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.train_workers % self.trainer.ranks_per_share != 0:
            raise ValueError(
                f"trainer.sequence_parallel, tensor_parallel = {self.trainer.sequence_parallel}, "
                f"{self.trainer.tensor_parallel}: does not divide train_workers = {self.train_workers}; use a divisor"
            )
        return self
