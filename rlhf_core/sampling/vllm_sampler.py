"""Sampling with vLLM, the engine core in the calling process. The only module that imports vLLM's engine.

The engine core lives in-process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): no second import of torch and no child to leak;
whoever wants isolation runs this class in a Ray actor. Prefix caching and asynchronous scheduling are off, so the same
requests make the same batches and hence, on CPU, bitwise the same completions after a restart. The engine has no
tokenizer: token ids go in and come out, text is decoded here, once, with the policy's tokenizer.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.engines import SamplingConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError, SamplingError, explain
from rlhf_core.interfaces import Weights
from rlhf_core.sampling.requests import check_logprobs, check_requests, finish_reason, stop_token_ids
from rlhf_core.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

GIB = 1 << 30

NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
}
"""Keys of a config that a re-export may change and that the engine does not read, or gets from us."""

TransferVerb = Literal["init", "start", "update", "finish"]


class VllmSampler:
    """A `Sampler` over one vLLM engine (tensor parallel over `config.tensor_parallel` GPUs).

    `threads` is the number of OpenMP threads on CPU; it is part of what makes CPU results reproducible. `transfer` names
    the backend of vLLM's weight transfer (`nccl`, `ipc`), "" when weights come through host memory.

    >>> sampler = VllmSampler(Path("policy"), VllmSamplerConfig(), threads=2, transfer="")  # doctest: +SKIP
    >>> sampler.generate([SamplingRequest((1, 2, 3), seed=7)], SamplingConfig())            # doctest: +SKIP
    """

    def __init__(self, policy: Path, config: VllmSamplerConfig, *, threads: int, transfer: str) -> None:
        prepare_environment(config, threads=threads)
        self.config = config
        self.version = 0
        self._adopt(policy)
        self._check_positions(policy)
        self._llm: Any = _start_engine(policy, config, transfer=transfer)

    # ------------------------------------------------------------ Sampler

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order. Raises SamplingError naming a request that does not fit."""
        if not requests:
            return []
        check_requests(
            requests,
            vocab_size=self._vocab_size,
            max_tokens=sampling.max_tokens,
            max_model_len=self.config.max_model_len,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt_ids)} for request in requests],
            [self._sampling_params(request.seed, sampling) for request in requests],
            use_tqdm=False,
        )
        return [self._completion(request, output.outputs[0]) for request, output in zip(requests, outputs, strict=True)]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace the policy by `weights` (payload: name -> CPU tensor, Hugging Face names); completions carry `version`.

        Raises SamplingError if what arrived is not what the trainer sent, or if the engine refuses it.
        """
        from rlhf_core.sampling.vllm_worker import probe_weights

        tensors = weights.payload
        if not isinstance(tensors, Mapping):
            raise SamplingError(
                explain("weights.payload", type(tensors).__name__, "must map names to tensors", "resolve it first")
            )
        self._check_digest(tensors, weights.digest)
        self._reload(weights_iterator=list(tensors.items()))
        self.check_probes(probe_weights(tensors))
        self.version = version

    # ------------------------------------------------------------ warm engine

    def accepts(self, policy: Path) -> bool:
        """Return whether `policy` has this engine's architecture and vocabulary, so that its weights can be loaded in place."""
        return _architecture(policy) == self._architecture

    def load_policy(self, policy: Path) -> None:
        """Load the safetensors of another policy that this engine `accepts`; its completions carry version 0."""
        self._reload(weights_path=str(policy))
        self._adopt(policy)
        self.version = 0

    def _adopt(self, policy: Path) -> None:
        from rlhf_core.models.loading import load_tokenizer

        self.policy = policy
        self._architecture = _architecture(policy)
        self._tokenizer = load_tokenizer(policy)
        self._stops = stop_token_ids(policy, tokenizer_eos=self._tokenizer.eos_token_id)
        self._vocab_size = int(_text_config(policy)["vocab_size"])

    def _reload(self, **source: Any) -> None:
        try:
            self._llm.collective_rpc("reload_weights", kwargs=source)
            self._llm.collective_rpc("repack_heads")
        except Exception as error:
            raise SamplingError(
                explain("weights", type(error).__name__, str(error), "the policy must have the engine's architecture")
            ) from error
        self._llm.reset_prefix_cache()

    def _check_digest(self, tensors: Mapping[str, Any], expected: str) -> None:
        from rlhf_core.models.export import weights_digest

        received = weights_digest(tensors)
        if received != expected:
            rule = f"the trainer sent {expected[:12]}"
            raise SamplingError(explain("weights.digest", received[:12], rule, "report this: the transfer is broken"))

    def check_probes(self, probes: Any) -> None:
        """Raise SamplingError if the engine holds other values than `probes` (of `vllm_worker.probe_weights`)."""
        for wrong in self._llm.collective_rpc("mismatched_weights", args=(probes,)):
            if wrong:
                rule = "the engine still holds other values than were sent"
                raise SamplingError(explain("weights", wrong[:3], rule, "report this: the reload is broken"))

    def _check_positions(self, policy: Path) -> None:
        positions = _text_config(policy).get("max_position_embeddings")
        if positions is not None and self.config.max_model_len > positions:
            raise ConfigError(
                explain(
                    "runtime.sampler.max_model_len",
                    self.config.max_model_len,
                    f"the policy has {positions} positions",
                    f"set it to {positions} or less",
                )
            )

    # ------------------------------------------------------------ one request

    def _sampling_params(self, seed: int, sampling: SamplingConfig) -> Any:
        from vllm import SamplingParams

        greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=None if greedy else seed,
            logprobs=0,  # the sampled token's log-probability and no other
            stop_token_ids=list(self._stops),
            detokenize=False,
        )

    def _completion(self, request: SamplingRequest, output: Any) -> Completion:
        token_ids = tuple(output.token_ids)
        if not token_ids:
            raise SamplingError(
                explain(f"request (seed {request.seed})", output.finish_reason, "no token", "see the log")
            )
        logprobs = tuple(entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True))
        check_logprobs(request, logprobs)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=finish_reason(token_ids[-1], self._stops),
            policy_version=self.version,
            seed=request.seed,
        )

    # ------------------------------------------------------------ device transfer

    def transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        """Take one step of vLLM's weight transfer (`rlhf_core.runtime.weight_sync` drives it from the trainer)."""
        if verb == "init":
            self._llm.init_weight_transfer_engine({"init_info": info})
        elif verb == "start":
            self._llm.start_weight_update()
        elif verb == "update":
            self._llm.update_weights({"update_info": info})
        else:
            self._llm.finish_weight_update()
            self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Shut the engine down and free its KV cache."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()


def prepare_environment(config: VllmSamplerConfig, *, threads: int) -> None:
    """Set what vLLM reads at import. Must run before the first `import vllm` of the process."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve whoever shares the cores
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads),
        }
    )
    if config.enforce_eager:
        # vLLM compiles a helper of its logprobs even then: half a minute, and a C++ compiler, for nothing.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _start_engine(policy: Path, config: VllmSamplerConfig, *, transfer: str) -> Any:
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    place: dict[str, Any] = (
        {"gpu_memory_utilization": config.gpu_memory_fraction}
        if on_gpu
        else {"kv_cache_memory_bytes": int(config.kv_cache_gib * GIB)}
    )
    if transfer:
        place["weight_transfer_config"] = {"backend": transfer}
    try:
        return LLM(
            model=str(policy),
            skip_tokenizer_init=True,
            generation_config="vllm",  # the policy's own sampling defaults would override SamplingConfig
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel,
            distributed_executor_backend="mp" if config.tensor_parallel > 1 else "uni",
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=False,
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            seed=0,
            worker_extension_cls="rlhf_core.sampling.vllm_worker.WeightReload",
            **place,
        )
    except Exception as error:
        raise SamplingError(
            explain("policy", str(policy), f"vLLM could not start: {error}", "see the worker's log for the first error")
        ) from error


def _read_config(policy: Path) -> dict[str, Any]:
    file = policy / "config.json"
    if not file.is_file():
        raise ConfigError(explain("policy", str(policy), "no config.json", "point at a Hugging Face model folder"))
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def _text_config(policy: Path) -> dict[str, Any]:
    """Return the language model's part of the config: multimodal models nest it."""
    config = _read_config(policy)
    nested: dict[str, Any] = config["text_config"] if "text_config" in config else config
    return nested


def _architecture(policy: Path) -> dict[str, Any]:
    """Return what two policies must share to be served by one engine."""
    return {key: value for key, value in _read_config(policy).items() if key not in NOT_ARCHITECTURE}
