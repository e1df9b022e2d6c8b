"""Send a trainer's weights to the sampling engines.

Host memory always works: rank 0 packs the full weights into Ray's object store, and engines on the same node map them
(`weights.py`). Between GPUs, vLLM's own weight transfer (`vllm.distributed.weight_transfer`) moves them: by CUDA IPC if
ranks and engines share GPUs, each rank to its own, else by an NCCL broadcast from rank 0. In both cases the digest of
the sent weights is the digest of `Trainer.weights()`, and the engine compares the weights that it then holds with rows
of the sent weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlhf_core.interfaces import Probes, Transfer, TransferVerb, WeightsInParts
from rlhf_core.runtime.ray_settings import ray
from rlhf_core.runtime.worker_group import WorkerGroup


@dataclass(frozen=True)
class StoredWeights:
    """Payload of `Weights` in host memory: one reference per bucket. Inside this object, Ray does not resolve them."""

    refs: tuple[Any, ...]


@dataclass(frozen=True)
class DeviceWeights:
    """Payload of `Weights` that the ranks of `trainers` will send. Only the newest `ticket` can be sent."""

    trainers: WorkerGroup
    ticket: int


StagedWeights: TypeAlias = "Mapping[str, Any] | WeightsInParts"
"""Weights to be sent: a stream of a trainer's weights, or a copy, name -> CPU tensor, of which other ranks than 0 have
the shapes, as meta tensors."""


def described(weights: StagedWeights) -> Mapping[str, Any]:
    """Map name -> tensor, on the meta device for a stream, with the dtype and shape of each weight."""
    return weights if isinstance(weights, Mapping) else weights.metadata


def in_stream_order(pairs: Iterable[tuple[str, Any]], device: str) -> Iterator[tuple[str, Any]]:
    """Yield weights for a consumer that takes them on several streams of a GPU in turn, as vLLM's packing does for NCCL.

    Each stream waits for the one before it, which may still be making the rest of a layer: gathering it from other ranks,
    or splitting fused experts.
    """
    import torch  # with the weights that are sent, it is here already

    for pair in pairs:
        made_on = torch.cuda.current_stream() if device == "cuda" else None
        yield pair
        if made_on is not None:
            torch.cuda.current_stream().wait_stream(made_on)


def choose_transfer(train_gpus: Sequence[str], engine_gpus: Sequence[Sequence[str]]) -> Transfer:
    """Choose the transfer for trainer ranks on `train_gpus`, one each, and engines on `engine_gpus`.

    GPUs are named `node:index`. CUDA IPC needs a rank on every GPU of an engine. By NCCL rank 0 sends, which refuses two ranks
    on one GPU: no engine may have its GPU. Anything else, and anything without GPUs, goes through host memory.

    >>> choose_transfer(["n0:0"], [["n0:1"], ["n0:2"]]), choose_transfer(["n0:0"], [["n0:0"]]), choose_transfer([], [[]])
    ('nccl', 'ipc', '')
    """
    if not train_gpus or not all(engine_gpus):
        return ""
    used = {gpu for gpus in engine_gpus for gpu in gpus}
    if train_gpus[0] not in used:
        return "nccl"
    return "ipc" if used <= set(train_gpus) else ""


def from_rank_0(weights: Mapping[str, Any], device: str) -> Iterator[tuple[str, Any]]:
    """Yield weights on the device of each rank: rank 0 has the tensors, and the others meta tensors like them."""
    import torch

    for name, tensor in weights.items():
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        torch.distributed.broadcast(made, 0)
        yield name, made


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` for several one-process engines (vLLM's own gives all the same NCCL ranks)."""

    def __init__(self, engines: Sequence[Any], *, tensor_parallel: int) -> None:
        self._engines = engines
        self._tensor_parallel = tensor_parallel

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join every engine to the group; engine e takes the NCCL ranks after the ranks of the engines before it."""
        infos = [dict(init_info) for _ in self._engines]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] = init_info["rank_offset"] + index * self._tensor_parallel
        ray.get([engine.transfer.remote("init", info) for engine, info in zip(self._engines, infos, strict=True)])

    def start_weight_update(self) -> None:
        """Prepare every engine."""
        self._all("start", {})

    def update_weights(self, update_info: Any) -> None:
        """Receive weights in every engine."""
        self._all("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Repack the received weights in every engine."""
        self._all("finish", {})

    def check(self, probes: Probes) -> None:
        """Compare the weights of every engine with rows of the sent weights."""
        ray.get([engine.check_probes.remote(probes) for engine in self._engines])

    def _all(self, verb: TransferVerb, info: Any) -> None:
        ray.get([engine.transfer.remote(verb, info) for engine in self._engines])


IPC_BUFFER_BYTES = 1 << 30
"""vLLM's default size of the GPU buffer for sending weights. Each time it is full, the engines are called."""


def ipc_buffer_bytes(tensors: Mapping[str, Any]) -> int:
    """Buffer size for `tensors` in bytes: vLLM refuses a tensor larger than the buffer; a larger buffer is wasted.

    >>> import torch
    >>> ipc_buffer_bytes({"norm": torch.ones(8), "head": torch.ones(4, 8)})
    160
    >>> ipc_buffer_bytes({"embedding": torch.ones(152_064, 3584, dtype=torch.bfloat16, device="meta")})
    1089994752
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    return max(largest_bytes(tensors), min(total, IPC_BUFFER_BYTES))


def largest_bytes(tensors: Mapping[str, Any]) -> int:
    return max((tensor.nbytes for tensor in tensors.values()), default=0)
