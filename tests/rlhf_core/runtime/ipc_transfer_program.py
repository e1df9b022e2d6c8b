"""Run by test_weight_sync.py: `python ipc_transfer_program.py <rank> <folder>`, as two ranks with a made-up GPU each.

Both ranks send through vLLM's own IPC transfer to one engine of both GPUs, first a stream, then a copy that rank 0 has. A
buffer is a file that two processes map. The numbers of rank 1's stream are others, so that it shows from whom a GPU has its weights.
Rank 0 writes what each GPU received, in each chunk, to <folder>/received.pt.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.runtime import weight_sync
from rlhf_core.runtime.train_worker import TrainWorker
from tests.support.made_up_device import CUDA, made_up_device

SHAPES = {"a": (10, 10), "large": (30, 20), "b": (7,), "c": (11, 3)}


class Stream:
    """Weights on the made-up GPU of a rank."""

    def __init__(self, rank: int) -> None:
        self.metadata = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
        self._rank = rank

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(SHAPES.items()):
            yield name, torch.full(shape, float(10 * self._rank + number), device="cuda")


class Engine:
    """An engine of two GPUs: it takes the weights of each GPU from the buffer that is there."""

    def __init__(self) -> None:
        self.received: list[dict[str, dict[str, torch.Tensor]]] = []
        self.transfer = SimpleNamespace(remote=self._transfer)
        self.check_probes = SimpleNamespace(remote=lambda probes: self.received.append({"probes": probes}))

    def _transfer(self, verb: str, info: Any) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        if verb != "update":
            return
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        chunk = {}
        for gpu, (path, size) in info["ipc_handles"].items():
            whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)[: sum(info["tensor_sizes"])]
            parts = unpack_tensor(whole, info["names"], info["shapes"], dtypes, info["tensor_sizes"])
            chunk[gpu] = {name: tensor.clone() for name, tensor in parts}
        self.received.append(chunk)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _: None)
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=f"gpu {rank}")
    torch.cuda.synchronize = torch.cuda.ipc_collect = lambda: None
    torch.cuda.current_stream = lambda: stream
    weight_sync.ray = SimpleNamespace(get=lambda results: results)
    weight_sync.IPC_BUFFER_BYTES = 1000
    engine = Engine()
    worker = TrainWorker(2, 1, TrainerConfig(engine="torch"))
    worker._rank, worker._host = rank, lambda: ""  # type: ignore[method-assign]
    with made_up_device() as devices:

        def share(buffer: torch.Tensor) -> tuple[None, tuple[str, int]]:
            assert devices.holds(buffer)
            path, size = f"{folder}/buffer {rank}", buffer.numel()
            shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            devices.note(shared, CUDA)
            buffer.set_(shared)
            return None, (path, size)

        packed_tensor.reduce_tensor = share
        sent = Stream(rank)
        copy: Any = {name: torch.full(shape, 5.0, device="cpu") for name, shape in SHAPES.items()}
        for weights in (sent, copy if rank == 0 else sent.metadata):
            worker._staged = weights
            worker.send_weights(0, [engine], "ipc", 2)
    if rank == 0:
        torch.save(engine.received, folder / "received.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
