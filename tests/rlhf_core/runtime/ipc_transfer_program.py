"""Run by test_weight_sync.py: `python ipc_transfer_program.py <rank> <folder>`, as two ranks with a made-up GPU each.

Both ranks send through vLLM's own IPC transfer to one engine of both GPUs, first a stream, then a copy that rank 0 has. A
buffer is a file that two processes map. Rank 1 streams other numbers, so that it shows from whom a GPU has its weights.
Rank 0 writes what each GPU received, chunk by chunk, to <folder>/received.pt.
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

    metadata = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}

    def __init__(self, first: float) -> None:
        self._first = first

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(SHAPES.items()):
            yield name, torch.full(shape, self._first + number, device="cuda")


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    from vllm.distributed.weight_transfer import packed_tensor

    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=f"gpu {rank}")
    torch.cuda.synchronize = torch.cuda.ipc_collect = lambda: None
    torch.cuda.current_stream = lambda: SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _: None)
    weight_sync.ray = SimpleNamespace(get=lambda results: results)
    weight_sync.IPC_BUFFER_BYTES = 1000
    received = []

    def mapped(gpu: str, size: int) -> torch.Tensor:
        return torch.from_file(f"{folder}/{gpu}", shared=True, size=size, dtype=torch.uint8)

    def receive(verb: str, info: Any) -> None:
        if verb == "update":
            kinds = [getattr(torch, name) for name in info["dtype_names"]]
            sizes = info["tensor_sizes"]
            parts = {
                gpu: packed_tensor.unpack_tensor(
                    mapped(*where)[: sum(sizes)], info["names"], info["shapes"], kinds, sizes
                )
                for gpu, where in info["ipc_handles"].items()
            }
            received.append({gpu: {name: one.clone() for name, one in weights} for gpu, weights in parts.items()})

    calls = {"transfer": receive, "check_probes": lambda probes: received.append(probes)}
    engine = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})
    worker: Any = TrainWorker(2, 1, TrainerConfig(engine="torch"))
    worker._rank, worker._host = rank, lambda: ""
    with made_up_device() as devices:

        def share(buffer: torch.Tensor) -> tuple[None, tuple[str, int]]:
            assert devices.holds(buffer)
            shared = mapped(f"gpu {rank}", buffer.numel())
            devices.note(shared, CUDA)
            buffer.set_(shared)
            return None, (f"gpu {rank}", buffer.numel())

        packed_tensor.reduce_tensor = share
        copy = {name: torch.full(shape, 5.0, device="cpu") for name, shape in SHAPES.items()}
        for weights in (Stream(10.0 * rank), copy if rank == 0 else Stream.metadata):
            worker._staged = weights
            worker.send_weights(0, [engine], "ipc", 2)
        assert worker._sender.fits({"a": torch.empty(600)})
        assert not worker._sender.fits({"a": torch.empty(601)}), "a larger model needs a larger buffer"
    if rank == 0:
        torch.save(received, folder / "received.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
