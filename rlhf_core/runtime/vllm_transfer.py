"""Open the trainer's side of vLLM's weight transfer. Imports vLLM, so only a rank that sends to GPUs imports this."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlhf_core.interfaces import Probes, Transfer
from rlhf_core.runtime.cluster import free_port
from rlhf_core.sampling.vllm_worker import probe_weights


class MappingSource(WeightSource):
    """vLLM's source of weights over a mapping that is set before each send; tensors go to the GPU one by one."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Any] = {}

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to("cuda")

    def probes(self) -> Probes:
        """Return rows of the tensors, with which an engine checks its weights."""
        return probe_weights(self.tensors)


def init_info(transfer: Transfer, *, world: int, host: str, buffer_bytes: int) -> Any:
    """Return the initial settings of vLLM's trainer side. With NCCL, chunks grow as needed, without `buffer_bytes`."""
    if transfer == "ipc":
        return IPCTrainerInitInfo(packed=True, rank=0, packed_buffer_size_bytes=buffer_bytes)
    return NCCLTrainerInitInfo(master_address=host, master_port=free_port(), world_size=world, packed=True, rank=0)


def open_transfer(info: Any, *, client: Any, source: MappingSource) -> Any:
    """Return vLLM's trainer side, with the engines of `client` joined to it."""
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
