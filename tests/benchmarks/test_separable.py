"""The architectures that may pack samples are proven to keep them apart, and those that are known to leak are refused."""

from typing import Any

import pytest
import torch

from benchmarks.separable import REACH, ROUNDING, ROW, WINDOW, build, configs, examine, families, samples, tiny_config
from rlhf_core.errors import ConfigError
from rlhf_core.models.batches import SEPARABLE, check_packing, collate, keeps_apart
from rlhf_core.models.forward import token_logprobs

LEAKING = (
    *("bamba", "falcon", "falcon_h1", "gpt_oss", "jamba", "lfm2", "minimax", "nemotron_h", "opt"),
    *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2"),
)


@pytest.mark.parametrize("family", sorted(SEPARABLE))
def test_a_listed_architecture_keeps_samples_apart(family: str) -> None:
    # One kernel suffices here, since all read one mask; `python -m benchmarks.separable` tries both.
    verdict = examine(family, ("sdpa",))
    assert verdict.separable, verdict
    assert all(keeps_apart(config) for _, config in configs(family))


@pytest.mark.parametrize(
    ("family", "attention"),
    [("lfm2", "sdpa"), ("opt", "sdpa"), ("falcon", "sdpa"), ("gpt_oss", "eager"), ("recurrent_gemma", "sdpa")],
)
def test_a_leak_is_seen(family: str, attention: str) -> None:
    verdict = examine(family, (attention,))
    assert not verdict.problem
    assert max(verdict.packed.values()) > 100 * ROUNDING and max(verdict.padded.values()) <= ROUNDING


@pytest.mark.parametrize("family", LEAKING)
def test_an_architecture_that_leaks_is_refused(family: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=f"of type {family} is not known to keep packed .* train without packing"):
        check_packing(AutoConfig.for_model(family))


def test_packing_is_refused_where_it_is_computed_too() -> None:
    model = build(tiny_config("opt"), "sdpa")
    with pytest.raises(ConfigError, match="train without packing"):
        token_logprobs(model, collate(samples(), pad_id=0, pack_to=ROW), temperature=1.0, with_entropy=False)


def test_a_listed_architecture_with_another_type_of_layer_is_refused() -> None:
    config = tiny_config("qwen3")
    assert keeps_apart(config)
    config.layer_types = ["full_attention", "linear_attention"]
    assert not keeps_apart(config)


def test_the_list_holds_nothing_that_transformers_does_not_have() -> None:
    assert set(families()) >= SEPARABLE


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "variant", "wide"),
    [
        ("mistral", "", {"sliding_window": 64}),
        ("gemma2", "", {"sliding_window": 64}),
        ("gemma3_text", "", {"sliding_window": 64}),
        ("phi3", "", {"sliding_window": 64}),
        ("qwen2", "window", {"sliding_window": 64}),
    ],
)
def test_the_windows_that_are_tried_are_shorter_than_the_samples(family: str, variant: str, wide: Any) -> None:
    config = dict(configs(family))[variant]
    batch = collate(samples(), pad_id=0)
    narrow_BL, wide_BL = (
        token_logprobs(build(one, "sdpa"), batch, temperature=1.0, with_entropy=False)[0]
        for one in (config, type(config)(**{**config.to_dict(), **wide}))
    )
    assert config.sliding_window == WINDOW
    assert (narrow_BL - wide_BL).abs().max() > REACH
