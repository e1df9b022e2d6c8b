"""A tokenizer and a Llama from nothing: what they contain, and that the same seed gives the same bytes."""

from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.pretrained import load_tokenizer
from tests.rlhf_core.models.conftest import TEXTS, TINY, make_tiny_llama


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_a_conversation_is_rendered_with_role_and_end_tokens(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Be brief.<|end|><|user|>1+1?<|end|><|assistant|>"
    assert text.startswith(prompt)


def test_special_tokens_are_single_tokens_and_end_and_pad_differ(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    ids = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])
    assert ids == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 4, None)
    assert tokenizer("<|user|>a<|end|>").input_ids[0] == 1
    assert len(tokenizer("<|user|>a<|end|>").input_ids) == 3


def test_every_digit_is_a_token_of_its_own(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    pieces = [tokenizer.decode([i]) for i in tokenizer("12 30").input_ids]
    assert [piece.strip() for piece in pieces if piece.strip()] == ["1", "2", "3", "0"]


@pytest.mark.parametrize("text", ["Hello , world !  two  spaces", "naïve 😀 \n\ttab", "x = 3.14159;", "it 's  fine ."])
def test_any_text_comes_back_unchanged(tiny_llama, text):
    tokenizer = load_tokenizer(tiny_llama)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_frequent_words_are_merged_and_the_size_is_kept(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    assert 261 < len(tokenizer) <= 320
    assert len(tokenizer(" colour").input_ids) == 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path):
    one, two, other = (make_tiny_llama(tmp_path / name, seed) for name, seed in (("1", 7), ("2", 7), ("3", 8)))
    assert files(one) == files(two)
    assert {name for name in files(one) if files(one)[name] != files(other)[name]} == {"model.safetensors"}
    assert set(files(one)) >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}


def test_initialising_leaves_the_global_random_state_alone(tmp_path):
    import torch

    train_tokenizer(TEXTS, vocab_size=320, folder=tmp_path)
    before = torch.random.get_rng_state()
    initialize_llama(TINY, tmp_path, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_model_knows_its_tokens_and_has_tied_embeddings(tiny_llama):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == (0, 4, None)
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 4)
    assert model.config.head_dim == 16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(tiny_llama / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in set(tensors.keys())


def test_a_tokenizer_larger_than_the_model_or_smaller_than_the_bytes_is_refused(tmp_path):
    words = [f"{a}{b}{c} word" for a in "abcdefgh" for b in "ijklmnop" for c in "qrst"]
    train_tokenizer(words, vocab_size=400, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"model.vocab_size = 320: the tokenizer has \d+ tokens"):
        initialize_llama(TINY, tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"must be >= 261"):
        train_tokenizer(words, vocab_size=200, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": 100, "heads": 8, "kv_heads": 8}, "hidden_size"), ({"kv_heads": 3}, "kv_heads")],
)
def test_a_shape_that_does_not_divide_is_refused(tiny_llama, change, message):
    with pytest.raises(ConfigError, match=message):
        initialize_llama(TINY.model_copy(update=change), tiny_llama, seed=1)
