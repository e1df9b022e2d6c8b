"""Tiny models with random weights and the architecture, tokenizer and chat template of a pretrained model."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from rlhf_core.config.models import PretrainedModel
from rlhf_core.errors import ConfigError
from rlhf_core.models.packages import local_folder
from rlhf_core.pretrained import load_part

HEADS, HEAD_DIM, LAYERS = 4, 32, 2
"""vLLM on a CPU needs heads of width 32, 64 or more."""
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HEADS * HEAD_DIM),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "intermediate_size_mlp",
        ),
        256,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "decoder_sparse_step",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "q_lora_rank",
        ),
        HEAD_DIM,
    ),
    "kv_lora_rank": HEAD_DIM,
    "max_window_layers": LAYERS,
}
"""Entries of configurations of transformers, and their values in a tiny model."""
SEED = 17


def write_tiny_policy(
    model: PretrainedModel,
    folder: Path,
    *,
    key: str,
) -> PretrainedModel:
    """Write a tiny language model to `folder`. Raises ConfigError if configuration or tokenizer cannot be read."""
    source = local_folder(model)
    options: dict[str, Any] = {"gguf_file": model.gguf_file} if model.gguf_file else {}
    if source is None:
        options["revision"] = model.revision
    try:
        write_tiny(
            str(source or model.path),
            folder,
            AutoModelForCausalLM,
            options,
        )
    except (OSError, ValueError, ImportError) as error:
        rule = f"could not be read ({str(error).strip().splitlines()[0]})"
        raise ConfigError(
            f"{key}.path",
            model.path,
            rule,
            "check the name, the revision and the files",
        ) from error
    return PretrainedModel(path=str(folder), chat_template_kwargs=model.chat_template_kwargs)


def write_tiny_reward_model(source: str, folder: Path) -> str:
    """Write a tiny sequence classifier with one output to `folder`, and return its path."""
    write_tiny(
        str(Path(source).expanduser()),
        folder,
        AutoModelForSequenceClassification,
        {},
    )
    return str(folder)


def write_tiny(
    source: str,
    folder: Path,
    kind: Any,
    options: dict[str, Any],
) -> None:
    """Write a model of `kind` with the small sizes, and the tokenizer of `source`."""
    config = load_part(AutoConfig, source, options)
    tokenizer = load_part(AutoTokenizer, source, options)
    shrink(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = kind.from_config(config, trust_remote_code=False).float()
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrink(config: PretrainedConfig) -> None:
    """Set the small sizes in a configuration. Vocabulary, context, rotations and kinds of layers stay."""
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        any_part: Any = part
        shared = getattr(any_part, "num_key_value_heads", None)
        whole = getattr(any_part, "num_attention_heads", None)
        for name, size in SIZES.items():
            if isinstance(getattr(any_part, name, None), int):
                setattr(any_part, name, size)
        if shared:
            any_part.num_key_value_heads = HEADS if shared == whole else min(shared, HEADS // 2)
        kinds = getattr(any_part, "layer_types", None)
        if kinds:
            # One layer of each kind, as far as two layers have room for them.
            different = list(dict.fromkeys(kinds))[:LAYERS]
            any_part.layer_types = (different + list(kinds))[:LAYERS]
        any_part.dtype = torch.float32
        if getattr(any_part, "quantization_config", None) is not None:
            del any_part.quantization_config
