from __future__ import annotations

import pickle

import torch

from rlhf_core.models.export import weights_digest
from rlhf_core.runtime.weights import pack, unpack


def test_packed_weights_come_back_bit_for_bit_with_dtype_shape_and_order() -> None:
    tensors = {
        "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),  # not contiguous
        "scalar": torch.tensor(2.5),
    }
    received = unpack(pack(tensors))
    assert list(received) == ["b", "a", "scalar"]
    assert weights_digest(received) == weights_digest(tensors)
    assert received["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_packed_weights_leave_the_pickle_stream() -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(pack({"w": torch.zeros(1000, 1000)}), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 2000  # the 4 MB travel out of band, which is what lets readers map them
    assert sum(len(buffer.raw()) for buffer in buffers) == 4_000_000
