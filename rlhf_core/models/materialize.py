"""Write the policy folder of a pretrained model: a folder, a package, a Hub name or a GGUF file."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, Mxfp4Config
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from rlhf_core.config.models import PretrainedModel
from rlhf_core.errors import ConfigError
from rlhf_core.models.architecture import check_folder
from rlhf_core.models.loading import INDEX_FILE, REPORT, check_type, check_weights, export_model, note_tying
from rlhf_core.models.packages import local_folder, scalar_head
from rlhf_core.models.parameter_sources import OpenFiles
from rlhf_core.models.parts import ModelParts, open_stored, weights_of
from rlhf_core.pretrained import load_part

logger = logging.getLogger(__name__)

PAD_CANDIDATES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
"""Tokens to use as padding if a model has no padding token, in order of preference."""
ONE_FILE = "model.safetensors"
STORED = (ONE_FILE, "model-*.safetensors", INDEX_FILE, "config.json", "generation_config.json", "adapter_config.json")
"""Files of a Hub model that transformers reads, too."""


def materialize(
    config: PretrainedModel, folder: Path, *, chat_template: str | None = None, add_bos: bool = False
) -> None:
    """Write the model of `config` to `folder` in Hugging Face layout: safetensors, tokenizer, chat template.

    `chat_template` replaces the tokenizer's own template, or supplies a missing one. With `add_bos` it begins with the
    token that the tokenizer puts before every text (BOS), if any: rendered conversations are tokenized without it, and
    the model was trained with it.

    Ensures that the padding token differs from the end token, because a reward is read at the last token that is not
    padding. Raises ConfigError for a missing folder, package or Hub model, a Hub name without a revision, a model that
    is no decoder, weights that are missing or not safetensors or GGUF, and a tokenizer without a chat template.

    Memory holds one weight at a time, or one layer of experts. A model is loaded whole if its files need more than renaming,
    stacking and concatenating, or if a new padding token needs an embedding.
    """
    source, options = _source(config)
    tokenizer = _fetch(AutoTokenizer, config, source, options)
    if chat_template is not None:
        tokenizer.chat_template = (_opening(tokenizer) if add_bos else "") + chat_template
    if not tokenizer.chat_template:
        rule = "its tokenizer has no chat template"
        raise ConfigError("model.path", config.path, rule, "set prepare_data.chat_template")
    found = _fetch(AutoConfig, config, source, options)
    check_type(found, config.path, lm=True)
    if any(name.endswith("ForSequenceClassification") for name in found.architectures or ()):
        raise scalar_head(config.path)  # with a tied LM head, no weight would be missing
    if config.chat_template_kwargs:
        tokenizer.chat_template = with_variables(tokenizer.chat_template, config.chat_template_kwargs)
    grows = _choose_padding(config, tokenizer, rows=found.get_text_config().vocab_size)
    parts = None if grows or config.gguf_file else _stored(config, found, source)
    model: Any = _whole(config, found, source, options) if parts is None else parts.module
    note_tying(model)
    if grows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    with OpenFiles() as files:
        stream = None if parts is None else weights_of(parts, files)
        export_model(model, folder, tokenizer_from=folder, stream=stream)


def with_variables(template: Any, values: Mapping[str, bool | int | float | str]) -> str:
    """Fix the values of variables in a chat template, regardless of the values that a caller passes.

    Raises ConfigError for a variable that the template does not read, and for several templates by name.

    >>> with_variables("{% if enable_thinking %}<think>{% endif %}", {"enable_thinking": False})
    '{%- set enable_thinking = false %}{% if enable_thinking %}<think>{% endif %}'
    """
    key = "model.chat_template_kwargs"
    if not isinstance(template, str):
        rule, remedy = "the tokenizer has several templates by name", "give one of them as prepare_data.chat_template"
        raise ConfigError(key, sorted(values), rule, remedy)
    for name in values:
        if not re.search(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", template):
            raise ConfigError(f"{key}.{name}", values[name], "the chat template reads no such variable", "remove it")
    before, rest = _written_variables(template)  # of an export that is imported again: the later one would win
    settings = [
        f"{{%- set {name} = {json.dumps(one, ensure_ascii=False)} %}}"
        for name, one in sorted((before | dict(values)).items())
    ]
    return "".join(settings) + rest


def _written_variables(template: str) -> tuple[dict[str, Any], str]:
    """Parse the variables that a template begins with, and the rest."""
    found: dict[str, Any] = {}
    while match := re.match(r"\{%- set (\w+) = ", template):
        try:
            value, end = json.JSONDecoder().raw_decode(template, match.end())
        except ValueError:
            break
        if not template.startswith(" %}", end):
            break
        found[match[1]], template = value, template[end + 3 :]
    return found, template


# ---------------------------------------------------------------- sources


def _source(config: PretrainedModel) -> tuple[str, dict[str, Any]]:
    """The name of the model for transformers, and the options that locate it."""
    options: dict[str, Any] = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    folder = local_folder(config)
    if folder is not None:
        if not config.gguf_file:
            check_folder(folder)
            if not any(folder.glob("*.safetensors")):
                remedy = "convert the weights, or set model.gguf_file"
                raise ConfigError("model.path", config.path, "has no .safetensors file", remedy)
        return str(folder), options
    return config.path, options | {"revision": config.revision}


def _stored(config: PretrainedModel, found: Any, source: str) -> ModelParts | None:
    """Open the model without its weights, or return None if it must be loaded whole; the log has the reason."""
    with _config_errors(config, source):
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(source, revision=config.revision, allow_patterns=list(STORED)))
        reason = _not_plain(found, folder)
        parts = None if reason else open_stored(found, folder)
    if parts is None:
        reason = reason or "transformers does more than rename, stack and concatenate its tensors"
        logger.info("%s is loaded whole: %s", config.path, reason)
    return parts


def _not_plain(found: Any, folder: Path) -> str:
    """Why transformers would not read exactly the weights of all files in `folder`; "" if it would."""
    if getattr(found, "quantization_config", None) is not None:
        return "its weights are quantized"
    if found.dtype is None:
        return "its config.json has no dtype"
    if (folder / "adapter_config.json").exists():
        return "an adapter is in its folder"
    if (folder / ONE_FILE).exists():
        read = {ONE_FILE}
    elif (folder / INDEX_FILE).exists():
        read = set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    else:
        return f"it has neither {ONE_FILE} nor {INDEX_FILE}"
    return "" if {file.name for file in folder.glob("*.safetensors")} == read else "it has other .safetensors files"


def _whole(config: PretrainedModel, found: Any, source: str, options: dict[str, Any]) -> Any:
    """Load the model whole, with quantized weights in a dtype that can be trained."""
    quantized = getattr(found, "quantization_config", None) or {}
    in_blocks = not config.gguf_file and quantized.get("quant_method") == "mxfp4"
    weights: dict[str, Any] = {"use_safetensors": True, "dtype": "auto"}
    if config.gguf_file:
        weights = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    elif in_blocks:
        weights["quantization_config"] = Mxfp4Config(dequantize=True)  # the default only where its kernels are missing
    model, loading = _fetch(AutoModelForCausalLM, config, source, options | weights | REPORT)
    check_weights(loading, config.path)
    if hasattr(model, "peft_config"):
        rule = "is an adapter, which transformers has put on its base model, and only whole models are read"
        raise ConfigError("model.path", config.path, rule, "merge it (merge_and_unload of peft), and use that")
    if in_blocks:  # an export undoes the renaming on load, and would write the weights under the names of their blocks
        model._weight_conversions = [rule for rule in model._weight_conversions if not _dequantizes(rule)]
    return model


def _dequantizes(rule: Any) -> bool:
    return any(isinstance(operation, Mxfp4Dequantize) for operation in getattr(rule, "operations", ()))


def _fetch(auto: Any, config: PretrainedModel, source: str, options: Mapping[str, Any]) -> Any:
    with _config_errors(config, source):
        return load_part(auto, source, options)


@contextmanager
def _config_errors(config: PretrainedModel, source: str) -> Iterator[None]:
    """Raise ConfigError for files that cannot be read inside."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError) as error:
        remedy = "check the name, the revision and the network connection"
        if Path(source).is_dir():
            remedy = "check the files in it; `git lfs pull` fetches those that pointers stand for"
        if isinstance(error, ImportError) and config.gguf_file:
            remedy = "pip install gguf"
        reason = str(error).strip().splitlines()[0]
        raise ConfigError("model.path", config.path, f"could not be loaded ({reason})", remedy) from error


def _opening(tokenizer: Any) -> str:
    """The tokens that `tokenizer` puts before each text, as the beginning of a chat template; "" if it adds none."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return "".join("{{ " + json.dumps(token) + " }}" for token in tokenizer.convert_ids_to_tokens(whole[:start]))


def _choose_padding(config: PretrainedModel, tokenizer: Any, *, rows: int) -> bool:
    """Choose a padding token that is not the end token, among the `rows` embeddings. True if it needs a new one."""
    vocabulary = tokenizer.get_vocab()
    unknown = sorted((t for t in vocabulary if vocabulary[t] >= rows and t != tokenizer.pad_token), key=vocabulary.get)
    if unknown:
        logger.warning("%s has no embeddings for the tokens %s: texts that have them are refused", config.path, unknown)
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and tokenizer.pad_token_id < rows:
        return False
    others = (tokenizer.eos_token, tokenizer.bos_token)
    chosen = [t for t in PAD_CANDIDATES if t not in others and vocabulary.get(t, rows) < rows]
    if chosen:
        tokenizer.pad_token = chosen[0]
    elif unknown:
        rule = (
            f"its tokenizer has {len(tokenizer)} tokens, among them no padding token, and the model {rows} embeddings"
        )
        raise ConfigError("model.path", config.path, rule, "resize the model's embeddings and save it")
    else:
        own = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token
        tokenizer.add_special_tokens({"pad_token": own or PAD_CANDIDATES[0]})
    logger.info("the padding token of %s is now %s", json.dumps(config.path), tokenizer.pad_token)
    return not chosen and len(tokenizer) > rows
