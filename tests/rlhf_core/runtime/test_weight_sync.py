"""How weights travel: packed through the object store, or from GPU to GPU."""

import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_core.config.models import InitModel
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.lora import weights_digest
from rlhf_core.runtime.weight_sync import choose_transfer, in_stream_order
from rlhf_core.runtime.weights import buckets, pack_weights, unpack_weights
from tests.support.warm_programs import ROOT, start_program


@pytest.mark.parametrize(
    ("train", "engines", "transfer"),
    [
        ([], [[]], ""),  # all on CPUs
        (["a:0"], [[]], ""),  # the engine has no GPU
        (["a:0"], [["a:0"]], "ipc"),  # one shared GPU
        (["a:0"], [["a:1"], ["b:0"]], "nccl"),
        (["a:0", "a:1"], [["a:1"]], "nccl"),  # only rank 0 sends, and it is alone on its GPU
        (["a:0"], [["a:0"], ["a:1"]], ""),  # neither reaches both engines
        (["a:0"], [["a:0", "a:1"]], ""),  # half of a tensor-parallel engine shares the sender's GPU
        (["a:0", "a:1", "b:0"], [["a:1", "a:0"], ["b:0"]], "ipc"),  # each rank sends to its own GPU
    ],
)
def test_the_placement_chooses_the_transfer(train, engines, transfer):
    assert choose_transfer(train, engines) == transfer


@pytest.mark.engine
@pytest.mark.slow
def test_each_rank_sends_to_its_own_gpu_of_an_engine_of_two(tmp_path):
    """Of a copy, which rank 0 alone has, both send the same."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    program, environment = Path(__file__).parent / "ipc_transfer_program.py", os.environ | {"PYTHONPATH": str(ROOT)}
    running = [
        start_program("vllm", [program, rank, tmp_path], environment, tmp_path / f"of {rank}") for rank in (0, 1)
    ]
    said = [one.communicate(timeout=300)[1][-3000:] for one in running]
    assert [one.returncode for one in running] == [0, 0], said
    chunks = torch.load(tmp_path / "received.pt")
    # A buffer holds the 2,400 bytes of the largest tensor, which are more than vLLM's own: of 400, 2400, 28 and 132.
    values = [
        {gpu: {name: float(one.mean()) for name, one in weights.items()} for gpu, weights in chunk.items()}
        for chunk in chunks
        if "b" not in chunk
    ]
    streamed = [{"a": 0.0}, {"large": 1.0}, {"b": 2.0, "c": 3.0}]
    for of_gpu, first in (("gpu 0", 0), ("gpu 1", 10)):
        assert [one[of_gpu] for one in values[:3]] == [
            {name: first + number for name, number in one.items()} for one in streamed
        ]
        assert [one[of_gpu] for one in values[3:]] == [dict.fromkeys(one, 5.0) for one in streamed]


class Stream:
    """What the streams of a GPU are asked to do, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "Stream") -> None:
        if other is not self:
            self._log.append(f"{self.name} waits for {other.name}")


def test_the_rest_of_a_layer_that_one_stream_makes_is_taken_by_the_next_stream_when_it_is_made(monkeypatch):
    log: list[str] = []
    streams = [Stream("first", log), Stream("second", log)]
    now = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])

    def layers() -> Iterator[tuple[str, int]]:
        for layer in range(2):
            log.append(f"{now[0].name} makes layer {layer}")
            for name in ("up", "down"):
                log.append(f"{now[0].name} yields {name}")
                yield name, layer

    pairs = in_stream_order(layers(), "cuda")
    for stream in (0, 1, 1, 0):  # a buffer may be full in the middle of a layer
        now[0] = streams[stream]
        next(pairs)
    assert log == [
        "first makes layer 0",
        "first yields up",
        "second waits for first",
        "second yields down",
        "second makes layer 1",
        "second yields up",
        "first waits for second",
        "first yields down",
    ]


def test_packed_weights_come_back_bit_for_bit_with_dtype_shape_and_order():
    tensors = {
        "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),  # not contiguous
        "scalar": torch.tensor(2.5),
    }
    received = unpack_weights(pack_weights(tensors))
    assert list(received) == ["b", "a", "scalar"]
    assert weights_digest(received) == weights_digest(tensors)
    assert received["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_packed_weights_leave_the_pickle_stream():
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(pack_weights({"w": torch.zeros(1000, 1000)}), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 2000  # the 4 MB travel out of band, which is what lets readers map them
    assert sum(len(buffer.raw()) for buffer in buffers) == 4_000_000


def test_buckets_keep_every_tensor_in_order_and_stay_below_the_limit_unless_one_tensor_alone_is_above():
    sizes = {"a": 3, "b": 4, "huge": 20, "c": 1, "d": 5, "e": 1}
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    parts = list(buckets(tensors.items(), most_bytes=28))
    assert [list(part) for part in parts] == [["a", "b"], ["huge"], ["c", "d", "e"]]
    received = {name: tensor for part in parts for name, tensor in unpack_weights(pack_weights(part)).items()}
    assert weights_digest(received) == weights_digest(tensors)
    assert list(buckets([])) == []


SHAPE = InitModel(
    vocab_size=320, hidden_size=128, layers=1, heads=2, kv_heads=2, intermediate_size=192, max_positions=96
)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor_parallel", "wrong", "error"),
    [
        (
            1,
            "order",
            r"ValueError: WeightSource metadata\(\) disagrees with iteration at index 5: declared 'model\.layers\.0",
        ),
        (2, "fails", "RuntimeError: the rank was lost"),
    ],
)
def test_vllms_own_transfer_takes_the_stream_of_a_trainer(tmp_path, tensor_parallel, wrong, error):
    """Over TCP in place of NCCL, which needs GPUs; a break in the middle is an error, and nobody waits for the rest."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folders = [tmp_path / "policy", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        train_tokenizer(["What is 12 + 30? It is 42."] * 5, vocab_size=320, folder=folder)
        initialize_llama(SHAPE, folder, seed=seed)
    program, out = Path(__file__).parent / "device_transfer_program.py", tmp_path / "made.json"
    words = [program, *folders, tensor_parallel, wrong, out]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = start_program("vllm", words, environment, tmp_path / "said")
    _, errors = running.communicate(timeout=550)
    assert running.returncode == 0, errors[-4000:]
    made = json.loads(out.read_text())
    assert made["streamed"] == made["copied"] == made["host"] != made["first"]
    assert re.match(error, made["error"])
