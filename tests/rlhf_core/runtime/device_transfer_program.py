"""Run by test_weight_sync.py: `python device_transfer_program.py <policy> <other policy> <tensor_parallel> <order|fails> <out>`.

vLLM's own NCCL transfer, both ends in this process and its workers, over TCP in place of NCCL: everything but the wire
is what runs on GPUs. It writes one JSON object.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_core.config.engines import SamplingConfig, TrainerConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.sampling.vllm_sampler import VllmSampler, prepare_environment
from rlhf_core.types import SamplingRequest

REQUESTS = [SamplingRequest((5, 6, 7, 8 + index), seed=index) for index in range(4)]


class Wire:
    """A group over TCP with the interface of vLLM's NCCL communicator."""

    def __init__(self, host: str, port: int, rank: int, world: int, device: object) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self._group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world)

    def broadcast(self, tensor: torch.Tensor, *, src: int, stream: object) -> None:
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self) -> None:
        """Nothing is left to free."""


def without_gpus() -> None:
    """Replace the wire, and what asks for a GPU."""
    from vllm.distributed.weight_transfer import nccl_common

    nccl_common.stateless_init_process_group = Wire
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
    torch.cuda.current_stream = lambda: None


def _engine(kind: Any, extension: str, **settings: Any) -> Any:
    return kind(**(settings | {"worker_extension_cls": extension}))


def main() -> None:
    policy, other, tensor_parallel = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = VllmSamplerConfig(max_model_len=96, kv_cache_gib=0.25, tensor_parallel=tensor_parallel)
    prepare_environment(config, threads=1)
    without_gpus()
    from vllm.v1.executor import multiproc_executor

    from rlhf_core.runtime import vllm_transfer, weight_sync
    from rlhf_core.sampling import vllm_engine
    from rlhf_core.training.trainer import LocalTrainer

    # As on GPUs: on CPUs vLLM starts its workers as fresh processes, each of which imports everything again.
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")

    # Workers import this module for the class below, and so get the other wire, too.
    extension = "tests.rlhf_core.runtime.device_transfer_program.OverTcp"
    vllm_engine.LLM = partial(_engine, vllm_engine.LLM, extension)
    over_nccl = vllm_transfer.init_info
    vllm_transfer.init_info = lambda *args, **keywords: replace(over_nccl(*args, **keywords), packed=False)
    weight_sync.ray = SimpleNamespace(get=lambda results: results)
    sampler = VllmSampler(policy, config, threads=1, transfer="nccl")
    trainer = LocalTrainer(ModelSpec(str(other), "lm", None, 0), None, TrainerConfig(engine="torch"))
    engine: Any = SimpleNamespace(
        transfer=SimpleNamespace(remote=sampler.transfer), check_probes=SimpleNamespace(remote=sampler.check_probes)
    )

    def drawn() -> list[Any]:
        completions = sampler.generate(REQUESTS, SamplingConfig(max_tokens=8))
        return [(one.token_ids.tolist(), one.logprobs.tolist(), one.policy_version) for one in completions]

    stream = trainer.stream()
    settings: dict[str, Any] = {"tensor_parallel": tensor_parallel, "host": "127.0.0.1", "device": "cpu"}
    sender = vllm_transfer.DeviceSender("nccl", [engine], weights=stream, **settings)
    made = {"first": drawn()}
    for name, weights in (("streamed", stream), ("copied", trainer.weights().payload)):
        sender.send(weights)
        sampler._llm.collective_rpc("repack_heads")  # on CPU alone a head is kept in a packed copy
        sampler.adopt(7)
        made[name] = drawn()
    sampler.load_weights(trainer.weights(), version=7)
    made["host"] = drawn()

    class Broken:
        """A stream that fails, or changes its order, in the middle."""

        metadata = stream.metadata

        def __init__(self, wrong: str) -> None:
            self.wrong = wrong

        def __iter__(self) -> Any:
            pairs = list(stream)
            half = len(pairs) // 2
            yield from pairs[:half]
            if self.wrong == "fails":
                raise RuntimeError("the rank was lost")
            yield from reversed(pairs[half:])

    try:
        sender.send(Broken(sys.argv[4]))
    except (RuntimeError, ValueError) as error:
        made["error"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[5]).write_text(json.dumps(made))
    os._exit(0)  # a thread waits in the broken transfer, as vLLM documents


if __name__ == "__main__":
    main()
else:
    from rlhf_core.sampling.vllm_worker import WeightReload

    without_gpus()

    class OverTcp(WeightReload):
        """What a worker of these tests has."""
