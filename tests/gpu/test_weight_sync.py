"""Trained weights reach engines on other GPUs by NCCL. By CUDA IPC on one GPU: `sync` of test_steps.py."""

import pytest
import torch

from benchmarks.gpu.steps import EXACT, Place, synced


@pytest.mark.parametrize("engines", [1, 2])
def test_nccl_between_gpus(policy, engines):
    if torch.cuda.device_count() < 1 + engines:
        pytest.skip(f"needs {1 + engines} CUDA devices")
    made = synced(policy, Place("cuda", policy), transfer="nccl", gpus=1, engines=engines)
    assert made["largest difference"] < EXACT
