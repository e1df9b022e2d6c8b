"""Check the attention kernel and the length of rows against the configuration of an architecture.

Transformers silently drops options that an attention kernel does not support, and two ways of scaling rotary positions
choose their frequencies by the longest row of a batch. Both would change the model's log-probabilities. Tables of
positions and tokens have an end.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.models.packages import refuse_adapter
from rlhf_core.pretrained import load_config

CAPS = ("attn_logit_softcapping", "attention_logit_softcapping")
"""Configuration keys of a cap on attention logits, which sdpa does not apply (Gemma 2, VaultGemma)."""
BY_BATCH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies depend on the longest row of a batch beyond a certain length."""


def check_attention(config: Any, attention: str) -> None:
    """Raise ConfigError for an attention kernel that omits a part of this architecture's attention."""
    if attention == "sdpa" and caps_attention(config):
        rule = f"it ignores the cap that a model of type {config.model_type} puts on the logits of its attention"
        raise ConfigError("runtime.trainer.attention", attention, rule, 'set runtime.trainer.attention = "eager"')


def caps_attention(config: Any) -> bool:
    """Whether this architecture caps its attention logits."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in CAPS)


def implements_sdpa(config: Any) -> bool:
    """True if transformers has scaled dot product attention for decoders with this configuration (Bloom: eager only)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True))


def length_limit(config: Any) -> int | None:
    """The length up to which a row has positions and does not depend on other rows, or None without a limit.

    Models without rotary positions have a table of `max_position_embeddings` (GPT-2, OPT).
    `longrope` switches from its short to its long factors beyond `original_max_position_embeddings`. `dynamic` changes
    its base with each longer batch beyond `max_position_embeddings`. vLLM chooses once, by its `max_model_len`. Trainer
    and sampler agree up to this limit.
    """
    text = config.get_text_config()
    if not getattr(text, "rope_parameters", None):
        return getattr(text, "max_position_embeddings", None)
    limits = [
        rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else text.max_position_embeddings
        for rope in _ropes(text)
        if rope["rope_type"] in BY_BATCH
    ]
    return min(limits) if limits else None


def stated_positions(config: Any) -> int | None:
    """Number of positions that a model with rotary positions was made for, or None if it states none.

    It is `max_position_embeddings`, unless that is still the number before a scaling by a factor:
    - `yarn` makes `original_max_position_embeddings` times the factor, also where only the scaling was added (Qwen).
    - `linear` leaves the number unchanged, except for families with parameters by type of layer (Gemma 3).
    - `llama3` states the number after the scaling, which is not the product (Llama 3.1: 131,072 of 8,192 times 8).
    """
    text = config.get_text_config()
    stated: int | None = getattr(text, "max_position_embeddings", None)
    if stated is None:
        return None
    found = [stated]
    for rope in _ropes(text):
        before = rope.get("original_max_position_embeddings") or stated
        scales = {"yarn": True, "linear": rope is text.rope_parameters, "llama3": before >= stated}
        if scales.get(rope["rope_type"], False):
            found.append(int(before * (rope.get("factor") or 1.0)))
    return max(found)


def padding_id(config: Any) -> int | None:
    """The padding token of a transformers configuration, or None. Some architectures have no such entry."""
    return getattr(config.get_text_config(), "pad_token_id", None)


def read_config(folder: Path) -> Any:
    """Load the transformers configuration of the model in `folder`. Raises ConfigError if it is missing."""
    # Stages import this module with the losses; transformers takes seconds.
    check_folder(folder)
    return load_config(folder)


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder without `config.json`, or with an adapter next to it."""
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        rule, remedy = "must be a model folder with config.json", "check the path, or run prepare_data first"
        raise ConfigError("model.path", str(folder), rule, remedy)


def check_longest(key: str, length: int, folder: Path) -> None:
    """Raise ConfigError, before any computation, if rows of `length` tokens are too long for the model in `folder`."""
    config = read_config(folder)
    limit = length_limit(config)
    if limit is not None and length > limit:
        raise too_long(key, length, config, limit)


def too_long(key: str, length: int, config: Any, limit: int) -> ConfigError:
    """The error for rows of `length` tokens, which exceed `limit`."""
    if not getattr(config.get_text_config(), "rope_parameters", None):
        return ConfigError(key, length, f"the model has {limit} positions", f"set it to {limit} or less")
    types = sorted({rope["rope_type"] for rope in _ropes(config.get_text_config())} & set(BY_BATCH))
    rule = (
        f"beyond {limit} tokens the rotary positions of type {' and '.join(types)} change with the longest row of a batch, "
        "so the log-probabilities of a sample would depend on the other samples"
    )
    return ConfigError(key, length, rule, f"set it to {limit} or less")


def unknown_token(token_id: int, rows: int) -> ConfigError:
    """The error for a token of a tokenizer that has more tokens than the model has embeddings."""
    remedy = "use the tokenizer that belongs to the model, or resize the model's embeddings and train them"
    return ConfigError("tokenizer", f"token {token_id}", f"the model has embeddings for {rows} tokens", remedy)


def _ropes(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters. Some architectures have several, one for each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type"):
            yield rope
