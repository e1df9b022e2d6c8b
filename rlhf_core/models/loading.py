"""Load a model with the head of its role from a policy folder, and export it."""

import json
import logging
import re
import shutil
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import is_flash_attn_2_available

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.architecture import check_attention, check_folder, padding_id, read_config
from rlhf_core.models.forward import (
    ValueModel,
    backbone_of,
    check_head,
    check_rows,
    with_head,
)
from rlhf_core.models.lora import (
    VALUE_HEAD,
    WeightStream,
    apply_lora,
    check_adapters,
    check_quantizer,
    has_lora,
    save_adapter,
)
from rlhf_core.models.packages import VALUE_HEAD_FILE
from rlhf_core.models.weight_files import WeightFile
from rlhf_core.pretrained import load_config, load_tokenizer

logger = logging.getLogger(__name__)

SHARD_SIZE = "5GB"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that a tokenizer may consist of (most have the first two), copied byte for byte so that its digest stays."""
REPORT = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options with which transformers reports missing and unexpected weights, for `check_weights`."""


def load_model(spec: ModelSpec, *, dtype: str, attention: str, gradient_checkpointing: bool, device: str) -> nn.Module:
    """Load the model of `spec` on `device` without dropout, in evaluation mode.

    The head `lm` gives a causal LM; `score` a sequence classifier with one output, or a
    `ValueModel` where transformers has no such class; `value` a `ValueModel`. Scores and values are float32. A missing `score` or `value` head is drawn from N(0, 1/(hidden + 1)) with `spec.seed`. A
    value model made from a reward model starts from its head. With `spec.lora`, the adapters and a `score` or `value` head
    are trained, and nothing else. Raises ConfigError if the folder is not a decoder or lacks
    weights, if its rows would need an attention mask, or if `attention` omits a part of the architecture's computation.
    """
    folder = Path(spec.path)
    config = checked_config(spec, attention)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    model: Any = _from_pretrained(spec.head, folder, config, options)
    if spec.head != "lm":
        model = with_head(model, folder, seed=spec.seed, dtype=options["dtype"])
    adapted = model if spec.head == "lm" else backbone_of(model)  # other heads begin at random, and are trained whole
    if spec.lora is not None:
        apply_lora(adapted, spec.lora, seed=spec.seed)
    model = without_dropout(model).to(device)
    check_computation(model, spec)
    if spec.lora is not None:
        check_adapters(adapted, spec.lora)
    if gradient_checkpointing:
        checkpoint_activations(model)
    return model


def checked_config(spec: ModelSpec, attention: str) -> Any:
    """Load the configuration of the model of `spec`, without dropout. Raises ConfigError as `load_model` does."""
    folder = Path(spec.path)
    check_folder(folder)
    if spec.lora is not None and spec.lora.quantize:
        check_quantizer()
    config = _config_without_dropout(folder)
    check_type(config, str(folder), lm=spec.head == "lm")
    check_attention(config, attention)
    return config


def without_dropout(model: Any) -> Any:
    """Put `model` in evaluation mode, and remove dropout from every mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def check_computation(model: nn.Module, spec: ModelSpec) -> None:
    """Check on a few tokens that `model` fits `rlhf_core.models.forward`. Raises ConfigError if not."""
    check_rows(model)
    if spec.head == "lm":
        check_head(model)


# ---------------------------------------------------------------- heads


def model_class(head: str, config: Any, folder: Path) -> tuple[Any, set[str]]:
    """The transformers class of a model with this head, and the weights that its files may lack."""
    if head == "lm":
        return AutoModelForCausalLM, set()
    if head == "value" or type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModel, set()
    config.num_labels = 1
    if padding_id(config) is None:  # classifiers of transformers need one
        config.get_text_config().pad_token_id = load_tokenizer(folder).pad_token_id
    return AutoModelForSequenceClassification, {"score.weight"}


def _from_pretrained(head: str, folder: Path, config: Any, options: dict[str, Any]) -> nn.Module:
    auto, allowed_missing = model_class(head, config, folder)
    # transformers draws missing weights from the global generator, which must not advance. The caller sets the weights.
    with torch.random.fork_rng(devices=[]):
        try:
            model, loading = auto.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                **options,
                **REPORT,
            )
        except ValueError as error:
            if "does not support" not in str(error) or "attention" not in str(error):
                raise
            # sdpa does not support attention sinks (gpt-oss), for example.
            rule = f"transformers does not implement it for models of type {config.model_type}"
            attention = options["attn_implementation"]
            raise ConfigError(
                "runtime.trainer.attention", attention, rule, 'set runtime.trainer.attention = "eager"'
            ) from error
    note_tying(model)
    check_weights(loading, str(folder), allowed_missing=allowed_missing)
    return model


def renamed_weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder's files under the names of the parameters that they make in `model`.

    Families whose names differ (GPT-NeoX), or whose parameters join several tensors (experts of Qwen3-MoE), are converted
    as transformers converts their files. Tensors that make no parameter keep their names.
    """
    with torch.random.fork_rng(devices=[]):
        made, loading = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            dtype=model.dtype,
            trust_remote_code=False,
            **REPORT,
        )
    kept = {name: tensors[name] for name in loading["unexpected_keys"]}
    return {name: one for name, one in made.state_dict().items() if name not in loading["missing_keys"]} | kept


def check_weights(loading: dict[str, Any], path: str, *, allowed_missing: Collection[str] = ()) -> None:
    """Raise ConfigError if transformers has drawn weights at random: missing weights, or weights of another shape."""
    missing = sorted(set(loading["missing_keys"]) - set(allowed_missing))
    other = sorted(name for name, *_ in loading["mismatched_keys"])
    if missing or other:
        rule = (
            f"lacks the weights {missing[:3]}"
            if missing
            else f"has weights of other shapes than its config.json {other[:3]}"
        )
        raise ConfigError("model.path", path, rule, "give a folder of the same architecture")


def check_type(config: Any, path: str, *, lm: bool) -> None:
    """Raise ConfigError for a model with an encoder (T5), and where an LM head is needed, for a model without one."""
    rule = ""
    if getattr(config, "is_encoder_decoder", False):
        rule = "has an encoder, without which its decoder is another model"
    elif lm and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        rule = "has no causal language model in transformers"
    if rule:
        rule = f"a model of type {config.model_type} {rule}"
        raise ConfigError("model.path", path, rule, "use a decoder-only model")


def note_tying(model: Any) -> None:
    """Correct a configuration that ties an LM head with a separate weight: vLLM would leave that weight out."""
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    tied = getattr(text, "tie_word_embeddings", False)  # not an entry of every configuration
    if head is None or not tied or head.weight is model.get_input_embeddings().weight:
        return
    logger.warning("%s has an LM head of its own, although tie_word_embeddings is true", type(model).__name__)
    model.config.tie_word_embeddings = text.tie_word_embeddings = False


def checkpoint_activations(model: Any) -> None:
    """Make `model` recompute its activations in the backward pass, and nothing else.

    A layer does so only in training mode. All modules in it stay in evaluation mode: in the other, routers add noise.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        rule = f"{type(model).__name__} does not support it"
        raise ConfigError("runtime.trainer.gradient_checkpointing", True, rule, "set it to false") from error
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _config_without_dropout(folder: Path) -> Any:
    config = read_config(folder)
    for owner in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(owner).items():
            if isinstance(value, float) and "drop" in name:  # also attn_pdrop and layerdrop
                setattr(owner, name, 0.0)
    return config


# ---------------------------------------------------------------- export


def export_model(
    model: nn.Module, folder: Path, *, tokenizer_from: Path, stream: WeightStream | None = None, write: bool = True
) -> None:
    """Write `model` in Hugging Face layout (safetensors, LoRA merged) with the tokenizer of `tokenizer_from`.

    The adapters of a causal LM are also written separately to `adapter/`. The same weights give the same bytes. Host memory
    holds one weight at a time. If ranks have parts of the weights, every rank must call it with its `stream`, and one
    of them with `write`.
    """
    stream = WeightStream(model) if stream is None else stream
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        _write_settings(model.backbone if isinstance(model, ValueModel) else model, folder)
    _write_weights(stream, folder, write=write)
    if has_lora(model) and not hasattr(model, "score"):
        with stream.whole([parameter for parameter in model.parameters() if parameter.requires_grad]):
            if write:
                save_adapter(model, folder / "adapter")
    if write and tokenizer_from.resolve() != folder.resolve():
        _copy_tokenizer(tokenizer_from, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer_config.json").is_file():
        rule = "has no tokenizer_config.json"
        raise ConfigError("tokenizer", str(source), rule, "give the folder that the model came from")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_settings(model: Any, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_weights(stream: WeightStream, folder: Path, *, write: bool) -> None:
    """Write files of at most `SHARD_SIZE`, weight by weight as they come, and an index if there are several."""
    metadata = {"format": "pt"}
    weights = stream.metadata
    weights.pop(VALUE_HEAD, None)
    split = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD_SIZE)
    if not write:
        deque(stream, maxlen=0)
        return
    for old in [file for file in folder.iterdir() if WEIGHT_FILES.fullmatch(file.name)]:
        old.unlink()
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(WeightFile(folder / file, {name: weights[name] for name in names}, metadata))
            for file, names in split.filename_to_tensors.items()
        }
        for name, weight in stream:
            if name == VALUE_HEAD:
                save_file({"weight": weight.cpu()}, folder / VALUE_HEAD_FILE)
            else:
                files[split.tensor_to_filename[name]].write(name, weight)
            del weight  # not kept while the next one is gathered
    if split.is_sharded:
        index = {"metadata": split.metadata | metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


# ---------------------------------------------------------------- kernels

LIGER = "liger_kernel"


def check_kernels(attention: str, *, liger: bool, device: str) -> None:
    """Raise ConfigError for kernels that are not installed or do not run on `device`, a torch device type."""
    if attention == "flash_attention_2" and not (device == "cuda" and is_flash_attn_2_available()):
        rule, remedy = (
            f"FlashAttention 2 is not available (device {device})",
            "use sdpa, or on a GPU with nvcc: pip install --no-build-isolation 'rlhf-lifecycle[flash-attn]'",
        )
        raise ConfigError("runtime.trainer.attention", attention, rule, remedy)
    if liger and not (device == "cuda" and find_spec(LIGER) is not None):
        rule, remedy = (
            f"Liger kernels are not available (device {device})",
            "remove it, or on a GPU: pip install 'rlhf-lifecycle[kernels]'",
        )
        raise ConfigError("runtime.trainer.liger", liger, rule, remedy)


def use_liger(model: nn.Module) -> None:
    """Replace the norms, rotations and MLPs of `model` with Liger's kernels, but not its losses.

    Raises ConfigError for an architecture that Liger does not support, which it would leave unchanged silently.
    """
    any_model: Any = model
    patches = import_module(f"{LIGER}.transformers.monkey_patch")
    kind = any_model.config.get_text_config().model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        rule = f"Liger does not support the architecture {kind!r}"
        raise ConfigError("runtime.trainer.liger", True, rule, "remove it")
    patches._apply_liger_kernel_to_instance(
        model=backbone_of(model), cross_entropy=False, fused_linear_cross_entropy=False
    )


# ---------------------------------------------------------------- vocabularies

REMEDY = 'use a teacher with the student\'s tokenizer, or compare the two across tokenizers: divergence.kind = "uld_text" or "uld"'


def shared_vocabulary(student: Path, teacher: Path, *, key: str = "teacher") -> int:
    """The common vocabulary size (rows of the LM head) of two policies. Raises ConfigError if the vocabularies differ.

    `key` is the teacher's name in the error.

    They are the same if every ID has the same token and the heads have the same width. Heads padded to different sizes
    give distributions over different tokens.
    """
    sizes = [vocabulary_size(folder) for folder in (student, teacher)]
    if sizes[0] != sizes[1]:
        rule = f"its vocabulary has {sizes[1]} tokens, the student's has {sizes[0]}"
        raise ConfigError(key, str(teacher), rule, REMEDY)
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (student, teacher))
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        rule = f"{len(differing)} tokens have other ids than in the student's tokenizer, for example {differing[0]!r}"
        raise ConfigError(key, str(teacher), rule, REMEDY)
    return sizes[0]


def check_same_tokens(policy: Path, other: Path, *, key: str) -> None:
    """Raise ConfigError, naming `key`, for a model in which an ID of the policy's tokenizer is another token.

    IDs that a single vocabulary has, and padding, do not count.
    """
    ours, theirs = (load_tokenizer(folder) for folder in (policy, other))
    tokens, others = ({number: token for token, number in one.get_vocab().items()} for one in (ours, theirs))
    shared = (tokens.keys() & others.keys()) - {ours.pad_token_id, theirs.pad_token_id}
    differing = sorted(tokens[number] for number in shared if tokens[number] != others[number])
    if differing:
        rule = f"{len(differing)} of the policy's tokens are others there, for example {differing[0]!r}"
        raise ConfigError(key, str(other), rule, "use a model with the policy's tokenizer")


def vocabulary_size(policy: Path) -> int:
    """Vocabulary size of a policy: the rows of its LM head."""
    return int(load_config(policy).get_text_config().vocab_size)
