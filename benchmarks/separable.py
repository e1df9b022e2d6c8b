"""Test which transformers architectures isolate samples that share a row, for all causal language models.

    python -m benchmarks.separable                      # all families: a table, and the resulting list
    python -m benchmarks.separable llama mistral opt    # some

Each family is built with random weights at a tiny size, with attention windows and chunks shorter than the samples, and
with every layer type of its default configuration. Four numbers are measured with the trainer's forward pass, each the
largest difference of a log-probability in float32:

    packed    samples that share a row, compared with each sample alone, without padding
    padded    samples in rows that are padded on the right, compared with the same
    prefixed  samples with a common prefix that is computed once, with a custom mask, compared with each alone; only
              under sdpa and without attention windows
    reach     another previous token in a single sample: the size that a leak would have

A family is separable if `reach` exceeds rounding errors but the others do not, under each attention that it supports.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from rlhf_core.models import forward
from rlhf_core.models.batches import SEPARABLE, collate, sees_whole_rows, shared_rows, unpack_rows
from rlhf_core.types import TokenSample, ids, mask

ROUNDING = 1e-4
"""Differences up to here are rounding: log-probabilities of size 10 have an fp32 ulp of 1e-6, and some tens of sums
follow each other: up to 3e-5 was seen. The smallest observed leak, of roberta-prelayernorm, is 1e-3.
"""
REACH = 1e-2
WINDOW = 4
LENGTHS = (11, 7, 13, 5, 9, 12, 6)
"""Longer than the window. Several fit into a row, at offsets that are not multiples of the window."""
ROW = 26
VOCABULARY = 97
LARGEST = 20_000_000
"""Maximum parameters of a tiny model; larger ones are not built."""

NUMBERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    # mixtures of experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # attention to a part of the row
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "attention_chunk_size": WINDOW,
    "keep_window_size": WINDOW,
    "max_window_layers": 2,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # state-space models
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # other names
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "encoder_layers": 1,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MIXED = {"layer_types": ["conv", "full_attention"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": {"vision_config": VISION},
    "gemma3n_text": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": MIXED,  # by default, all layers would be attention
    "lfm2_moe": MIXED,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
}
"""Additional settings that some families need."""
WINDOWED = {"window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}}
WINDOWLESS = {"full": {"sliding_window": None}}
FURTHER: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"), WINDOWLESS),
    "qwen2": WINDOWED,
    "qwen2_moe": WINDOWED,
    "qwen3": WINDOWED,
    "qwen3_moe": WINDOWED,
    "gpt_neox": {"sequential": {"use_parallel_residual": False}},
    "stablelm": {"parallel": {"use_parallel_residual": True, "use_qkv_bias": True}},
}
"""Variants of a family in addition to the one from `NUMBERS`."""


@dataclass(frozen=True)
class Verdict:
    """Measurements of a family; `problem` if it could not be built or run."""

    family: str
    packed: dict[str, float] = field(default_factory=dict)
    padded: dict[str, float] = field(default_factory=dict)
    prefixed: dict[str, float] = field(default_factory=dict)
    reach: float = 0.0
    problem: str = ""

    @property
    def separable(self) -> bool:
        differences = [*self.packed.values(), *self.padded.values(), *self.prefixed.values()]
        worst = max(differences, default=float("inf"))
        return not self.problem and worst <= ROUNDING and self.reach >= REACH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of transformers if there are none")
    chosen = parser.parse_args().families or families()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verdicts = []
    for family in chosen:
        verdicts.append(examine(family))
        print(line(verdicts[-1]), flush=True)
    separable = {verdict.family for verdict in verdicts if verdict.separable}
    print(f"\nseparable: {', '.join(sorted(separable))}")
    print(f"separable and not listed: {', '.join(sorted(separable - SEPARABLE)) or 'none'}")
    wrong = sorted((SEPARABLE & set(chosen)) - separable)
    print(f"listed and not separable: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def families() -> list[str]:
    """The model types that `AutoModelForCausalLM` supports."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def line(verdict: Verdict) -> str:
    """A row of the table."""
    said = verdict.problem or "  ".join(
        f"{name}: packed {verdict.packed[name]:.0e} padded {verdict.padded[name]:.0e}" for name in verdict.packed
    )
    said += "  prefixed " + " ".join(f"{worst:.0e}" for worst in verdict.prefixed.values()) if verdict.prefixed else ""
    sign = "separable" if verdict.separable else "not proven" if verdict.problem else "LEAKS"
    listed = "listed" if verdict.family in SEPARABLE else ""
    return f"{verdict.family:26} {sign:10} {listed:7} reach {verdict.reach:.0e}  {said}"


def examine(family: str, attentions: Sequence[str] = ("sdpa", "eager")) -> Verdict:
    """Build and measure a family in all its variants."""
    verdict = Verdict(family)
    try:
        for name, config in configs(family):
            for attention in attentions:
                verdict = _measured(verdict, config, attention, name)
    except Exception as error:  # a family may fail in any way, and is then not proven
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        verdict = replace(verdict, problem=f"{type(error).__name__}: {reason[:150]}")
    gc.collect()
    return verdict


def configs(family: str) -> Iterator[tuple[str, Any]]:
    """Yield the variants of a family with their names."""
    for name, further in {"": {}, **FURTHER.get(family, {})}.items():
        yield name, tiny_config(family, **OWN.get(family, {}), **further)


def tiny_config(family: str, **own: Any) -> Any:
    """A small configuration with all layer types of the default configuration."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[family]
    text = inspect.signature(made).parameters.get("text_config")
    if text is not None and "text_config" not in own:
        inner = made().get_text_config().model_type
        own = {"text_config": tiny_config(inner).to_dict()} | own
    wanted: dict[str, Any] = {name: value for name, value in NUMBERS.items() if _takes(made, name)}
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]  # latent attention has a key for each head
    wanted |= own
    whole = _layer_types(made())
    for layers in (4, 6, 8, 12):
        config = made(**wanted)
        if whole <= _layer_types(config) or "num_hidden_layers" in own or "num_hidden_layers" not in wanted:
            return config
        wanted["num_hidden_layers"] = layers
    raise ValueError(f"12 layers do not hold all of {sorted(whole)}")


def build(config: Any, attention: str) -> Any:
    """Build a model with random weights large enough that every part affects the output."""
    from transformers import AutoModelForCausalLM

    config = deepcopy(config)
    for owner in {id(one): one for one in (config, config.get_text_config())}.values():
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(owner, name, 0.0)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    size = sum(parameter.numel() for parameter in empty.parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are not tiny")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.ndim > 1:
                # Large enough to show a leak, and small enough that rounding does not grow from layer to layer.
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def samples(lengths: Sequence[int] = LENGTHS) -> list[TokenSample]:
    """Samples that train on all tokens but the first."""
    draw = torch.Generator().manual_seed(11)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return [TokenSample(ids(one), mask([0] + [1] * (len(one) - 1))) for one in drawn]


def _measured(verdict: Verdict, config: Any, attention: str, variant: str) -> Verdict:
    try:
        model = build(config, attention)
    except (ValueError, ImportError) as error:
        if "does not support" in str(error) and attention == "sdpa":
            return verdict
        raise
    rules = replace(forward.model_rules(model), keeps_apart=True)
    apart, prefixes = (replace(rules, prefix_width=width) for width in (0, config.get_text_config().hidden_size))
    with patch.object(forward, "model_rules", lambda model: apart), torch.no_grad():
        packed, padded, reach = measure(model)
    name = f"{attention} {variant}".strip()
    prefixed = {}
    if attention == "sdpa" and sees_whole_rows(config):
        with patch.object(forward, "model_rules", lambda model: prefixes), torch.no_grad():
            prefixed[name] = measure_prefixes(model)
    return replace(
        verdict,
        packed=verdict.packed | {name: packed},
        padded=verdict.padded | {name: padded},
        prefixed=verdict.prefixed | prefixed,
        reach=reach if not verdict.packed else min(reach, verdict.reach),
    )


def measure(model: Any) -> tuple[float, float, float]:
    """Measure the largest differences of log-probabilities: packed, padded, and with another previous token."""
    some = samples()
    with patch.object(forward, "shared_rows", lambda batch, prefixes_of: None):
        alone = [_logprobs(model, [sample], None)[0] for sample in some]
        padded = _logprobs(model, some, None)
        before = [
            replace(s, token_ids=ids([*s.token_ids[:-2], s.token_ids[-2] - 1, s.token_ids[-1]])) for s in some[:3]
        ]
        moved = [float((_logprobs(model, [b], None)[0][-1] - a[-1]).abs()) for b, a in zip(before, alone)]
    layouts = [_logprobs(model, some, ROW), _logprobs(model, some, sum(LENGTHS))]
    flat = replace(forward.model_rules(model), is_flash=True)
    with patch.object(forward, "model_rules", lambda model: flat):
        layouts.append(_logprobs(model, some, ROW))
    layouts.append(_logprobs(model, some, None))  # rows are shared if that saves padding
    packed = max(_difference(layout, alone) for layout in layouts)
    return packed, _difference(padded, alone), max(moved)


def measure_prefixes(model: Any) -> float:
    """Largest difference of log-probabilities between samples with a shared prefix and each sample alone."""
    prompts = samples((9, 14))
    ends = samples((3, 8, 5, 1, 6))
    some = [
        TokenSample(prompt.token_ids + end.token_ids, prompt.loss_mask + mask([1] * len(end.token_ids)))
        for prompt in prompts
        for end in ends
    ]
    with patch.object(forward, "shared_rows", lambda batch, prefixes_of: None):
        alone = [_logprobs(model, [sample], None)[0] for sample in some]
    layout = shared_rows(collate(some, pad_id=0), prefixes_of=model.config.get_text_config().hidden_size)
    assert layout is not None
    assert layout.mask_R1LL is not None
    return _difference(_logprobs(model, some, None), alone)


def _logprobs(model: Any, some: Sequence[TokenSample], pack_to: int | None) -> list[Any]:
    batch = collate(some, pad_id=0, pack_to=pack_to)
    logprobs_BL, _ = forward.token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    return unpack_rows(logprobs_BL, batch)


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    differences = torch.stack([(a - b).abs().max() for a, b in zip(one, other, strict=True)])
    return float("inf") if bool(differences.isnan().any()) else float(differences.max())


def _takes(made: Any, name: str) -> bool:
    return name in inspect.signature(made).parameters or name in made.attribute_map


def _layer_types(config: Any) -> set[str]:
    text = config.get_text_config()
    return set(getattr(text, "layer_types", None) or ())


if __name__ == "__main__":
    sys.exit(main())
