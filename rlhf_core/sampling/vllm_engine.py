"""Start and call vLLM's engine. The only module that imports vLLM's engine; `vllm_sampler` sets its variables before."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Transfer
from rlhf_core.sampling.requests import further_options, most_tokens
from rlhf_core.types import SamplingRequest

GIB = 1 << 30  # bytes


def platform() -> str:
    """The device type that the installed vLLM is built for."""
    return str(current_platform.device_type)


def sampling_params(
    request: SamplingRequest, sampling: SamplingConfig, *, stops: Sequence[int], when_done: bool
) -> SamplingParams:
    """vLLM's parameters of a request; with `when_done`, the engine returns its output only when it is complete."""
    greedy = sampling.temperature == 0
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        max_tokens=most_tokens(request, sampling.max_tokens),
        seed=None if greedy else request.seed,
        logprobs=0,  # the sampled token's log-probability only
        stop_token_ids=list(stops),
        detokenize=False,
        **further_options(sampling),
        output_kind=RequestOutputKind.FINAL_ONLY if when_done else RequestOutputKind.CUMULATIVE,
    )


def adapter(number: int) -> LoRARequest:
    """The LoRA request for an adapter that the workers have loaded as `number`; it has no file."""
    return LoRARequest(f"load-{number}", number, "in memory")


def start(policy: Path, config: VllmSamplerConfig, *, transfer: Transfer) -> LLM:
    """Start an engine of `policy` in this process. Raises SamplingError if vLLM refuses it."""
    on_gpu = torch.cuda.is_available()
    place: dict[str, Any] = (
        {"gpu_memory_utilization": config.gpu_memory_fraction}
        if on_gpu
        # A prompt that is split between two passes resets its generator, which torch's CPU generators cannot do.
        else {"kv_cache_memory_bytes": int(config.kv_cache_gib * GIB), "enable_chunked_prefill": False}
    )
    if config.lora_sync == "adapter":
        place |= {"enable_lora": True, "max_lora_rank": config.max_lora_rank, "max_loras": 1}
    if config.routed_experts and on_gpu:
        # vLLM 0.32 keeps the experts in the blocks of its prefix cache.
        place |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if transfer:
        place["weight_transfer_config"] = {"backend": transfer}
    place.setdefault("enable_prefix_caching", config.prefix_caching)
    try:
        if config.tensor_parallel == 1:  # else other processes run the model
            _import_model(policy)
        llm = LLM(
            model=str(policy),
            skip_tokenizer_init=True,
            generation_config="vllm",  # the policy's own sampling defaults would override SamplingConfig
            dtype=config.dtype,
            hf_overrides={"head_dtype": "float32"} if config.fp32_lm_head else {},
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel,
            distributed_executor_backend="mp" if config.tensor_parallel > 1 else "uni",
            enforce_eager=config.enforce_eager,
            enable_sleep_mode=config.sleep,
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            seed=0,
            worker_extension_cls="rlhf_core.sampling.vllm_worker.WeightReload",
            **place,
        )
        if config.routed_experts and not on_gpu:
            llm.collective_rpc("record_experts")
    except Exception as error:
        rule = f"vLLM could not start: {error}"
        raise SamplingError("policy", str(policy), rule, "see the worker's log for the first error") from error
    return llm


def _import_model(policy: Path) -> None:
    """Import the model class of `policy`, which the engine runs in this process.

    Otherwise vLLM first starts a process that imports vLLM and the class only to describe it, unless the user's cache
    has the description.
    """
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    for name in config.get("architectures", ()):
        if name in ModelRegistry.models:  # the others are vLLM's to refuse
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
