"""Open a model of which every rank reads a part of each weight: without memory for weights until they are partitioned."""

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights

from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.forward import ValueModel, compute_in_float32, initial_head, read_head
from rlhf_core.models.loading import checked_config, set_padding, without_dropout
from rlhf_core.models.weight_files import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelParts:
    """A model whose parameters are on the meta device, but for those of a scalar head, and where the others are."""

    module: nn.Module
    places: Mapping[str, Place]
    """By the name of the parameter."""


def open_parts(spec: ModelSpec, *, dtype: str, attention: str) -> ModelParts | None:
    """Return the model of `spec` as `load_model` does, or None if it must be loaded whole; the log has the reason."""
    made = _open(spec, dtype, attention)
    if isinstance(made, ModelParts):
        return made
    logger.info("%s is loaded whole by every rank: %s", spec.path, made)
    return None


def _open(spec: ModelSpec, dtype: str, attention: str) -> ModelParts | str:
    """Return the model, or why it must be loaded by transformers itself."""
    folder = Path(spec.path)
    config = checked_config(spec, attention)
    if spec.lora is not None:
        return "adapters are made from the weights that they adapt"
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    classifier = spec.head == "score" and type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    auto: Any = AutoModelForCausalLM if spec.head == "lm" else AutoModel
    if classifier:
        auto = AutoModelForSequenceClassification
        config.num_labels = 1
        set_padding(config, folder)
    # Buffers such as RoPE's frequencies are computed here: under ZeRO's own context they would be rounded to `dtype`.
    with torch.random.fork_rng(devices=[]), no_init_weights(), _parameters_on_meta():
        model: Any = auto.from_config(config, **options)
    model.tie_weights()
    kind = type(model).__name__
    if get_model_conversion_mapping(model, add_legacy=False):
        return f"transformers changes the names or the weights of a {kind} on load"
    if dtype != "float32" and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
        return f"a {kind} keeps some weights in float32"
    if model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}:
        return f"a {kind} has buffers in its files"
    places = _places(model, folder, drawn={"score.weight"} if classifier else set())
    if places is None:
        return f"its files do not have the weights of a {kind} one to one"
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return ModelParts(*_with_head(model, places, spec, options["dtype"]))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module gets on the meta device inside this context; buffers stay as they are."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _with_head(
    model: Any, places: Mapping[str, Place], spec: ModelSpec, dtype: torch.dtype
) -> tuple[nn.Module, Mapping[str, Place]]:
    if spec.head == "lm":
        return without_dropout(model), places
    head_1H = read_head(Path(spec.path))
    if head_1H is None:
        head_1H = initial_head(model.config.get_text_config().hidden_size, seed=spec.seed)
    if hasattr(model, "score"):
        model.score.weight = nn.Parameter(head_1H.to(dtype, copy=True))
        compute_in_float32(model.score)
        return without_dropout(model), places
    whole = ValueModel(model, head_1H.to(dtype))
    return without_dropout(whole), {f"backbone.{name}": place for name, place in places.items()}


def _places(model: Any, folder: Path, *, drawn: AbstractSet[str]) -> dict[str, Place] | None:
    """Return the place of each parameter but `drawn`, or None unless each has one, of its shape, and tied ones no other."""
    found: dict[str, Place] = {}
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name], shapes[name] = Place(file, name), tensors.get_slice(name).get_shape()
    prefix = f"{model.base_model_prefix}."
    parameters = dict(model.named_parameters())
    places = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        written = [one for one in (name, prefix + name, name.removeprefix(prefix)) if one in found]
        if name not in parameters:
            if written:
                return None
        elif name not in drawn:
            if not written or shapes[written[0]] != list(parameters[name].shape):
                return None
            places[name] = found[written[0]]
    return places
