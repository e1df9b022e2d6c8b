from __future__ import annotations

import pytest

from rlhf_core.runtime.weight_sync import choose_transfer


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
        (["a:0", "a:1"], [["a:0"]], ""),  # several ranks beside a shared GPU
    ],
)
def test_the_placement_chooses_the_transfer(train: list[str], engines: list[list[str]], transfer: str) -> None:
    assert choose_transfer(train, engines) == transfer
