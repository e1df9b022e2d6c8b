"""Create a language model from scratch: a byte-level BPE tokenizer trained on the task's texts, and a small Llama."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.config.models import InitModel
from rlhf_core.errors import ConfigError
from rlhf_core.models.loading import export_model
from rlhf_core.pretrained import load_tokenizer

PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, SYSTEM, END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Chat template: a turn is its role token, its text and the end token. Prompts end with the assistant's role token."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, folder: Path) -> None:
    """Write to `folder` a byte-level BPE tokenizer of at most `vocab_size` tokens trained on `texts`.

    Every digit is a separate token (arithmetic needs columns), no text is unknown, and no BOS is added. The same texts
    in the same order give the same bytes. Raises ConfigError if `vocab_size` cannot hold the 256 bytes.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        rule = f"must be >= {smallest}"
        raise ConfigError("model.vocab_size", vocab_size, rule, "bytes and special tokens need as many")
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    wrapped.save_pretrained(folder)


def initialize_llama(config: InitModel, folder: Path, *, seed: int) -> None:
    """Write a Llama with the shape of `config` and weights drawn from `seed` to `folder`, next to its tokenizer.

    Embeddings are tied. The same seed gives the same bytes. A head is hidden_size / heads wide. vLLM on a CPU needs 32,
    64 or certain larger widths, so 256 / 4 works. Raises ConfigError if the tokenizer has more tokens than
    `vocab_size`, or if the hidden size cannot be divided into heads of an even width.
    """
    tokenizer = load_tokenizer(folder)
    _check_shape(config, len(tokenizer))
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    export_model(model, folder, tokenizer_from=folder)


def _check_shape(config: InitModel, tokens: int) -> None:
    if tokens > config.vocab_size:
        rule = f"the tokenizer has {tokens} tokens"
        raise ConfigError("model.vocab_size", config.vocab_size, rule, f"set it to >= {tokens}")
    if config.hidden_size % (2 * config.heads) != 0:
        rule = "must be an even multiple of heads"
        raise ConfigError("model.hidden_size", config.hidden_size, rule, f"use {64 * config.heads}")
    if config.heads % config.kv_heads != 0:
        rule = f"must divide heads = {config.heads}"
        raise ConfigError("model.kv_heads", config.kv_heads, rule, "use heads")
