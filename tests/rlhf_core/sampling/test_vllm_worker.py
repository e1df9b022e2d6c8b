from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from rlhf_core.sampling.vllm_worker import WeightReload, probe_weights


class Held(nn.Module):
    """A norm as it came, an embedding padded from 70 to 72 rows, and a fused projection of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.arange(6.0))
        self.embed_tokens = nn.Parameter(torch.arange(72.0 * 2).reshape(72, 2))
        self.proj = nn.Parameter(torch.zeros(4, 2))


def worker(model: nn.Module) -> WeightReload:
    probe = WeightReload()
    probe.model_runner = SimpleNamespace(get_model=lambda: model)
    return probe


def sent() -> dict[str, torch.Tensor]:
    return {"norm": torch.arange(6.0), "embed_tokens": torch.arange(70.0 * 2).reshape(70, 2), "proj": torch.ones(2, 2)}


def test_what_the_engine_holds_as_it_was_sent_matches() -> None:
    assert worker(Held()).mismatched_weights(probe_weights(sent())) == []


def test_a_stale_norm_and_a_stale_embedding_are_named() -> None:
    tensors = sent()
    tensors["norm"][3] += 0.5
    tensors["embed_tokens"][69] += 1
    assert worker(Held()).mismatched_weights(probe_weights(tensors)) == ["norm", "embed_tokens"]


def test_weights_are_compared_in_the_precision_of_the_engine() -> None:
    tensors = sent()
    tensors["norm"] += 1e-4  # 3 + 1e-4 is 3 in bfloat16
    tensors["norm"][0] = 0
    assert worker(Held().bfloat16()).mismatched_weights({"norm": probe_weights(tensors)["norm"]}) == []
