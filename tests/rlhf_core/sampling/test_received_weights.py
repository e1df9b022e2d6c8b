from __future__ import annotations

import pytest
import torch

from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.requests import received_tensors, tensors_of

SENT = {"norm": torch.ones(8), "head": torch.arange(12.0).reshape(3, 4)}


def test_the_tensors_that_were_sent_are_returned() -> None:
    assert received_tensors(Weights(SENT, weights_digest(SENT))) is SENT


def test_other_tensors_than_were_sent_are_refused() -> None:
    changed = SENT | {"norm": torch.zeros(8)}
    with pytest.raises(
        SamplingError, match=r"weights\.digest = .*: the trainer sent .*please report this as a bug in the transfer"
    ):
        received_tensors(Weights(changed, weights_digest(SENT)))


def test_a_payload_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(SamplingError, match=r"weights\.payload = 'list': must map names to tensors; resolve it first"):
        tensors_of(Weights([], ""))
