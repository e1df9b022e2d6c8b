"""A pretrained model becomes a policy folder weight by weight, or whole where its files need more, with equal bytes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from benchmarks.moving_weights import above
from rlhf_core.config.models import PretrainedModel
from rlhf_core.models import materialize as module
from rlhf_core.models.materialize import materialize
from rlhf_core.pretrained import load_tokenizer
from tests.rlhf_core.models.conftest import IDS, loaded
from tests.rlhf_core.models.test_lora import FAMILIES

WHOLE = "is loaded whole: "
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gpt_oss", "qwen3_moe", "deepseek_v3", "jamba"])
def test_one_weight_at_a_time_gives_the_bytes_of_the_whole_model(family, dtype, made, tmp_path, monkeypatch, caplog):
    options = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "gpt_oss" else FAMILIES.get(family, {})
    folder = made(family, **options)
    if dtype == "bfloat16":  # the files stay in float32
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    model = PretrainedModel(path=str(folder))
    with caplog.at_level("INFO"):
        materialize(model, tmp_path / "parts")
    assert WHOLE not in caplog.text
    monkeypatch.setattr(module, "_stored", lambda *_: None)
    materialize(model, tmp_path / "whole")
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert GenerationConfig.from_pretrained(tmp_path / "parts").temperature == 0.5


def test_experts_do_not_fill_the_memory(made, tmp_path):
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "moe_intermediate_size": 256, "num_experts": 16}
    folder = made("qwen3_moe", **sizes, num_experts_per_tok=2)
    small = made("llama")
    materialize(PretrainedModel(path=str(small)), tmp_path / "warm")  # imports
    most, _ = above(lambda: materialize(PretrainedModel(path=str(folder)), tmp_path / "out"))
    written = (tmp_path / "out/model.safetensors").stat().st_size / 2**20
    # A layer is an eighth: 16 experts of three matrices of 256 x 256 are 12 MiB, stacked and then split again. What the
    # allocator keeps for itself depends on the tests before: 17 MiB in all if this file runs alone, 45 after a hundred others.
    assert written > 96 and most < 80


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("other file", "it has other .safetensors files"),
        ("dtype", "its config.json has no dtype"),
        ("tied", "transformers does more than rename, stack and concatenate its tensors"),
    ],
)
def test_the_log_has_the_reason_why_a_model_is_loaded_whole(change, reason, made, tmp_path, caplog):
    folder = made("llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    if change == "other file":
        shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    elif change == "dtype":
        del config["dtype"]
    else:
        config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        materialize(PretrainedModel(path=str(folder)), tmp_path / "out")
    assert f"{folder} {WHOLE}{reason}" in caplog.text
    assert torch.equal(loaded(tmp_path / "out")(input_ids=IDS).logits, loaded(folder)(input_ids=IDS).logits)


def test_a_padding_token_that_is_the_end_token_gets_an_embedding_where_no_other_can_replace_it(made, tmp_path):
    folder = made("llama", vocab_size=301)  # as many as the tokenizer has
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    written = json.dumps(vocabulary)
    for name in module.PAD_CANDIDATES:
        written = written.replace(json.dumps(name), json.dumps(f"<other {name}>"))
    (folder / "tokenizer.json").write_text(written)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": config["eos_token"]}))
    materialize(PretrainedModel(path=str(folder)), tmp_path / "out")
    tokenizer, model = load_tokenizer(tmp_path / "out"), loaded(tmp_path / "out")
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token_id == model.config.pad_token_id == 301
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 302


def test_weights_in_mxfp4_are_read_in_bfloat16(made, tmp_path):
    """gpt-oss on the Hub: blocks of 32 numbers of 4 bits with a power of two."""
    folder = made("gpt_oss", intermediate_size=64, num_local_experts=2, num_experts_per_tok=2)
    weights, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outer, inner // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
        scaled = numbers * 2.0 ** (scales.float() - 127)[..., None]
        expected[name] = scaled.flatten(-2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config))
    materialize(PretrainedModel(path=str(folder)), tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert len(expected) == 4 and not [name for name in found if name.endswith(("_blocks", "_scales"))]
    for name, want in expected.items():
        assert torch.equal(found[name].float(), want), name  # two bits of fraction
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert loaded(tmp_path / "out", dtype="bfloat16", attention="eager")(input_ids=IDS).logits.isfinite().all()
