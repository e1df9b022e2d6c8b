from __future__ import annotations

import pickle

import torch

from rlhf_core.models.lora import weights_digest
from rlhf_core.runtime.weights import buckets, pack, unpack


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


def test_buckets_keep_every_tensor_in_order_and_stay_below_the_limit_unless_one_tensor_alone_is_above() -> None:
    sizes = {"a": 3, "b": 4, "huge": 20, "c": 1, "d": 5, "e": 1}
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    parts = list(buckets(tensors, most_bytes=28))
    assert [list(part) for part in parts] == [["a", "b"], ["huge"], ["c", "d", "e"]]
    received = {name: tensor for part in parts for name, tensor in unpack(pack(part)).items()}
    assert weights_digest(received) == weights_digest(tensors)
    assert list(buckets({})) == []
