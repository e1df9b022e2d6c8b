"""Configure the parts that several stages share: optimizer, trainer and sampling."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_core.config.models import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import OPERATIONAL, Config, added_option

# ---------------------------------------------------------------- precision

CPU_INFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply bfloat16: AVX-512, AMX and Arm."""


@cache
def multiplies_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Whether this machine's processor multiplies bfloat16 natively; False if unknown."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not NATIVE_BFLOAT16.isdisjoint(next(flags, []))


def native_dtype(value: Any) -> Any:
    """Resolve `auto` to the precision of this machine; other values stay unchanged.

    >>> native_dtype("float32")
    'float32'
    """
    if value != "auto":
        return value
    return "bfloat16" if multiplies_bfloat16() else "float32"


Precision = Literal["float32", "bfloat16"]
DType = Annotated[
    Precision, BeforeValidator(native_dtype, json_schema_input_type=Literal["auto", "float32", "bfloat16"])
]
"""Precision; `auto` is replaced when the configuration is read, so plans and keys contain the resolved precision."""

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
    """Attention kernel. `flash_attention_2` needs the extra `flash-attn` and a GPU. `sdpa` is refused for architectures with an attention cap or sinks (Gemma 2, gpt-oss)."""
    liger: bool = False
    """Whether to use Liger's kernels for norms, rotations and MLPs; needs the extra `kernels` and a GPU."""
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
        """The number of neighboring train workers that get the same samples."""
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
        """The first setting by which tokens are not sampled from the policy's full distribution, or ""."""
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | NO_PENALTIES
        return next(
            (f"{name} = {getattr(self, name)}" for name, one in whole.items() if getattr(self, name) != one), ""
        )

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are set, by name."""
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

    >>> EngineNeeds(engines=2)
    EngineNeeds(engines=2, tensor_parallel=1, sleeps=False, device_transfer=False, adapters=False)
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
    """Whether the engine accepts the adapters of a policy alone, without its other weights."""


class BaseSamplerConfig(Config):
    """Base class of sampler configurations. It names the module that opens the sampler, so planning imports no engine.

    docs/add_a_sampler.md shows a complete example.
    """

    module: ClassVar[str]
    """Dotted path of the module; its `ENGINE` is a `rlhf_core.interfaces.SamplerEngine`."""
    type: str
    """Name of the sampler in profiles; for a class of your own its path, `package.module:Class`."""

    def needs(self) -> EngineNeeds:
        """The resources that the sampler needs: by default one process that gets weights through host memory."""
        return EngineNeeds()

    def records_experts(self) -> bool:
        """Whether completions have the `routed_experts` that a request asks for, which `ppo.router_replay` needs."""
        return False


def check_lora_sync(lora: LoraConfig | None, *, key: str) -> None:
    """Raise ConfigError for adapters that cannot be sent alone to a sampler (`lora_sync = "adapter"`).

    `key` is the key of `lora`, in the stage that trains the adapters.
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
    if lora.target_parameters:
        rule = "vLLM is sent adapters of linear modules only"
        raise ConfigError(f"{key}.target_parameters", lora.target_parameters, rule, f"remove it, {remedy}")


def check_lora(lora: LoraConfig | None, trainer: TrainerConfig, *, key: str) -> None:
    """Raise ConfigError for 4-bit weights under ZeRO 3, and adapters of experts with Liger.

    `key` is the key of `lora`.
    """
    if lora is not None and lora.quantize and trainer.zero_stage == 3:
        rule, remedy = "ZeRO 3 cannot partition 4-bit weights", "use runtime.trainer.zero_stage <= 2, or remove it"
        raise ConfigError(f"{key}.quantize", lora.quantize, rule, remedy)
    if lora is not None and lora.target_parameters and trainer.liger:
        rule, remedy = "Liger computes experts without adapters", "set runtime.trainer.liger = false, or remove it"
        raise ConfigError(f"{key}.target_parameters", lora.target_parameters, rule, remedy)
