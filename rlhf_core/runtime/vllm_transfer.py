"""Send weights by vLLM's weight transfer. Imports vLLM, which takes 15 to 40 s, so only ranks that send to GPUs import this."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlhf_core.interfaces import Probes, Transfer
from rlhf_core.runtime.cluster import free_port
from rlhf_core.runtime.weight_sync import (
    EngineClient,
    StagedWeights,
    described,
    from_rank_0,
    in_stream_order,
    ipc_buffer_bytes,
    largest_bytes,
)
from rlhf_core.sampling.vllm_worker import probe_weights


class DeviceSender(WeightSource):
    """A rank's end of the transfer; opened at the first `send` and kept, since an NCCL group takes seconds to form.

    By NCCL rank 0 sends alone (`ranks` = 1). By IPC all `ranks` of torch.distributed's group do, and rank 0 calls the engines.
    The buffer is sized for `weights`, the first that will be sent. vLLM iterates this, and weights reach the `device` one by one.
    """

    def __init__(
        self,
        transfer: Transfer,
        engines: Sequence[Any],
        *,
        tensor_parallel: int,
        host: str,
        weights: StagedWeights,
        rank: int = 0,
        ranks: int = 1,
        device: str = "cuda",
    ) -> None:
        self._client = EngineClient(engines, tensor_parallel=tensor_parallel)
        self._device, self._rank, self._ranks = device, rank, ranks
        self._weights: StagedWeights = {}
        self._probes: Probes = {}
        """Rows of the tensors of the last pass, with which an engine checks its weights."""
        self._buffer_bytes = ipc_buffer_bytes(described(weights)) if transfer == "ipc" else 0
        world = 1 + len(engines) * tensor_parallel
        info = init_info(transfer, rank=rank, world=world, host=host, buffer_bytes=self._buffer_bytes)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self)

    def fits(self, weights: StagedWeights) -> bool:
        """Whether the buffer is large enough for `weights`. NCCL uses none: chunks grow with their tensors."""
        return not self._buffer_bytes or largest_bytes(described(weights)) <= self._buffer_bytes

    def send(self, weights: StagedWeights) -> None:
        """Send weights to all engines, which check them, one at a time. Raises SamplingError if one differs."""
        self._weights = weights
        try:
            self._engine.send_weights()
            if self._rank == 0:
                self._client.check(self._probes)
        finally:
            self._weights, self._probes = {}, {}

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in described(self._weights).items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self._probes = {}
        pairs: Iterable[tuple[str, Any]] = self._weights  # type: ignore[assignment]  # a stream
        if isinstance(self._weights, Mapping):
            pairs = self._weights.items() if self._ranks == 1 else from_rank_0(self._weights, self._device)
        for name, tensor in in_stream_order(pairs, self._device):
            self._probes |= probe_weights({name: tensor})
            yield name, tensor.to(self._device)


def init_info(transfer: Transfer, *, rank: int, world: int, host: str, buffer_bytes: int) -> Any:
    """Initial settings of vLLM's trainer side. With NCCL, chunks grow as needed, without `buffer_bytes`."""
    if transfer == "ipc":
        return IPCTrainerInitInfo(packed=True, rank=rank, packed_buffer_size_bytes=buffer_bytes)
    return NCCLTrainerInitInfo(master_address=host, master_port=free_port(), world_size=world, packed=True, rank=rank)
