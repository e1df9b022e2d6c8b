"""Open the trainer's side of vLLM's weight transfer. Imports vLLM, so only ranks that send to GPUs import this."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlhf_core.interfaces import Probes, Transfer
from rlhf_core.runtime.cluster import free_port
from rlhf_core.sampling.vllm_worker import probe_weights


class StagedSource(WeightSource):
    """vLLM's source of weights over a stream, or a copy of one, that is set before each send; they reach `device` one by one.

    `probes` are rows of the tensors of the last pass, with which an engine checks its weights.
    """

    def __init__(self, device: str) -> None:
        self.pairs: Iterable[tuple[str, Any]] = ()
        self.described: Mapping[str, Any] = {}
        """Name -> tensor of the dtype and shape of each weight."""
        self.probes: Probes = {}
        self._device = device

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.described.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.probes = probes = dict[str, Any]()
        for name, tensor in self.pairs:
            probes |= probe_weights({name: tensor})
            yield name, tensor.to(self._device)


def init_info(transfer: Transfer, *, rank: int, world: int, host: str, buffer_bytes: int) -> Any:
    """Return the initial settings of vLLM's trainer side. With NCCL, chunks grow as needed, without `buffer_bytes`."""
    if transfer == "ipc":
        return IPCTrainerInitInfo(packed=True, rank=rank, packed_buffer_size_bytes=buffer_bytes)
    return NCCLTrainerInitInfo(master_address=host, master_port=free_port(), world_size=world, packed=True, rank=rank)


def open_transfer(info: Any, *, client: Any, source: StagedSource) -> Any:
    """Return vLLM's trainer side, with the engines of `client` joined to it."""
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
