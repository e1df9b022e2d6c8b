"""Open a model of which every rank reads a part of each weight; weights use no memory until they are partitioned."""

import logging
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.forward import with_head
from rlhf_core.models.loading import checked_config, model_class, without_dropout
from rlhf_core.models.lora import WeightStream
from rlhf_core.models.parameter_sources import OpenFiles, ParameterSource, find_sources

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelParts:
    """A model whose parameters are on the meta device, except for a scalar head, and where their elements are stored.

    It has no adapters yet: `rlhf_core.models.lora.apply_lora` adds them once the parameters are partitioned.
    """

    module: nn.Module
    sources: Mapping[str, ParameterSource]
    """By the name of the parameter."""


def open_parts(spec: ModelSpec, *, dtype: str, attention: str) -> ModelParts | None:
    """Open the model of `spec` as `load_model` does, or return None if it must be loaded whole; the log has the reason."""
    folder = Path(spec.path)
    config = checked_config(spec, attention)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    auto, drawn = model_class(spec.head, config, folder)
    model, sources = _on_meta(auto, config, folder, options, drawn=drawn)
    if sources is None:
        reason = "its files do not have all weights of a %s, or transformers does more than stack and concatenate them"
        logger.info(f"%s is loaded whole by every rank: {reason}", spec.path, type(model).__name__)
        return None
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    whole = model if spec.head == "lm" else with_head(model, folder, seed=spec.seed, dtype=options["dtype"])
    if whole is not model:
        sources = {f"backbone.{name}": source for name, source in sources.items()}
    return ModelParts(without_dropout(whole), sources)


def open_stored(config: Any, folder: Path) -> ModelParts | None:
    """Open the causal LM of the files in `folder` in its own dtype, or return None if it must be loaded whole."""
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    model, sources = _on_meta(AutoModelForCausalLM, config, folder, {"dtype": dtype}, drawn=set())
    kept = _in_float32(model, dtype)
    if sources is None or any(pattern.search(name) for name in sources for pattern in kept):
        return None
    if model.can_generate():
        named = {} if (folder / "generation_config.json").exists() else OF_CONFIG
        model.generation_config = GenerationConfig.from_pretrained(folder, **named)
    return ModelParts(model.eval(), sources)


OF_CONFIG: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
"""Options with which transformers takes the settings of generation from a model's own configuration."""


def weights_of(parts: ModelParts, files: OpenFiles) -> WeightStream:
    """Yield the weights of a model, each read from its file when it is reached."""

    def read(name: str, like: torch.Tensor) -> torch.Tensor:
        return parts.sources[name].read(files, 0, like.numel()).reshape(like.shape).to(like.dtype)

    parameters = parts.module.named_parameters()
    return WeightStream(parts.module, stored={name: partial(read, name, one) for name, one in parameters})


def _on_meta(
    auto: Any, config: Any, folder: Path, options: Mapping[str, Any], *, drawn: AbstractSet[str]
) -> tuple[Any, dict[str, ParameterSource] | None]:
    """A model whose parameters are on the meta device, and their sources; None if a weight cannot be read by range."""
    # Buffers such as RoPE's frequencies are computed here: under ZeRO's own context they would be rounded to `dtype`.
    with torch.random.fork_rng(devices=[]), no_init_weights(), _parameters_on_meta():
        model: Any = auto.from_config(config, trust_remote_code=False, **options)
    model.tie_weights()
    found = find_sources(model, folder)
    sources = _of_parameters(model, found, drawn=drawn)
    return model, sources if _read_buffers(model, found, options["dtype"]) else None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module gets on the meta device inside this context. Buffers are not changed."""

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter  # a tied one stays the same
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _of_parameters(
    model: Any, found: Mapping[str, ParameterSource], *, drawn: AbstractSet[str]
) -> dict[str, ParameterSource] | None:
    """The source of each parameter except `drawn`. None if one is missing or has another shape, or a tied one has two."""
    parameters = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    wanted = {name: tuple(one.shape) for name, one in parameters.items() if name not in drawn}
    sources = {name: found[name] for name in wanted if name in found}
    complete = {name: one.shape for name, one in sources.items()} == wanted
    return sources if complete and not tied & found.keys() else None


def _read_buffers(model: Any, found: Mapping[str, ParameterSource], dtype: torch.dtype) -> bool:
    """Read the buffers that a checkpoint has, such as the biases of DeepSeek's routers. False if one is missing.

    They are small, and whole on every rank. transformers keeps some in float32. It does so with parameters, too, but
    DeepSpeed casts all of those to its dtype.
    """
    kept = _in_float32(model, dtype)
    buffers = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    if any(name not in found or found[name].shape != tuple(one.shape) for name, one in buffers.items()):
        return False
    with OpenFiles() as files:
        for name, one in buffers.items():
            whole = found[name].read(files, 0, one.numel()).reshape(one.shape)
            owner, _, last = name.rpartition(".")
            in_float32 = any(pattern.search(name) for pattern in kept)
            setattr(model.get_submodule(owner), last, whole.to(torch.float32 if in_float32 else one.dtype))
    return True


def _in_float32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns of the names of weights that transformers keeps in float32."""
    return [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
