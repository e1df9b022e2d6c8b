"""Add low-rank adapters (LoRA, arXiv 2106.09685; rsLoRA, DoRA) and merge them; the only module that imports peft.

Adapters are inserted into the model instead of wrapped around it, so a model with LoRA has the same class, backbone and
head as one without.

The result of a stage is always the merged weights; the adapters are saved next to them for other programs. The next
stage starts from the merged weights with fresh adapters. Adapters are never stacked, loaded again or merged twice.
Within a stage, a checkpoint contains the adapters, and a resumed stage continues with them.

The changes of an adapter must reach the merged weights. Modules for which they would not are refused before training:
modules that share their weight with another module, and modules whose weight the model uses without calling them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.models import ALL_LINEAR, LoraConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.models.forward import ValueModel

# ---------------------------------------------------------------- Compute digests of weights

PROBES = 8
"""Number of tensors whose bytes a weights digest reads."""


def weights_digest(named_tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> str:
    """SHA-256 of every tensor's name, dtype and shape and of the bytes of `PROBES` tensors.

    The probes are spread evenly over the sorted names, including the first and the last. They detect a stale layer, a
    missing tensor or a wrong cast at a cost that does not grow with the model's depth. With `read`, which returns a tensor
    by its name, `named_tensors` need no values (meta tensors).
    """
    digest = hashlib.sha256()
    names = sorted(named_tensors)
    last = len(names) - 1
    probes = {names[round(index * last / (PROBES - 1))] for index in range(PROBES)} if names else set()
    for name in names:
        tensor = named_tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if name in probes:
            flat = (tensor if read is None else read(name)).detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---------------------------------------------------------------- quantized

QUANTIZER = "bitsandbytes"


def check_quantizer() -> None:
    """Raise ConfigError if bitsandbytes is not installed."""
    if find_spec(QUANTIZER) is None:
        rule = f"needs {QUANTIZER}, which is not installed"
        raise ConfigError(
            "lora.quantize", "nf4", rule, "pip install 'rlhf-lifecycle[kernels]', or remove lora.quantize"
        )


def quantize(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers `names` of `model` (full names) with 4-bit layers, and freeze all weights.

    Weights are NF4 in blocks of 64, with quantized scales of the blocks. A weight is rounded when its layer is moved to
    a device.
    """
    bitsandbytes = import_module(QUANTIZER)
    for name in names:
        layer: Any = model.get_submodule(name)
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            quant_type="nf4",
            compress_statistics=True,
            device="meta",
        )
        small.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=small
        )
        small.bias = layer.bias
        model.set_submodule(name, small.to(layer.weight.device))
    model.requires_grad_(False)


def whole_weight(layer: nn.Module) -> Tensor:
    """Dequantize the weight_OI of a layer made by `quantize`, in its original dtype as in the forward pass."""
    any_layer: Any = layer
    functional = import_module(f"{QUANTIZER}.functional")
    weight: Tensor = functional.dequantize_4bit(any_layer.weight.data, any_layer.weight.quant_state)
    return weight


# ---------------------------------------------------------------- lora

logger = logging.getLogger(__name__)

_LAYERS = re.compile(r"(\.base_layer)+\.")
_BLOCK_STATE = ".base_layer.weight."
"""Part of the names of the tensors that restore a 4-bit weight."""
_ADAPTER = "default"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute without its adapters inside this context: as it did before they were trained, bit for bit."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # peft's own switch turns gradients off, too
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def apply_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> nn.Module:
    """Add trainable adapters to `model` and freeze everything else. Its outputs do not change at first.

    A ~ Kaiming-uniform from `seed`, B = 0. With `quantize`, the adapted layers' weights are rounded to 4 bits first.
    Raises ConfigError for targets that the model does not have or whose adapter could not be merged.
    """
    targets = _targets(model, config)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
        target_modules=targets,
        target_parameters=_stacks(model, config) or None,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
    )
    any_model: Any = model
    if config.quantize:
        quantize(model, targets)
        any_model.is_loaded_in_4bit = (
            True  # makes peft adapt 4-bit layers; deleted below, as transformers would refuse to move the model
        )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    except ValueError as error:  # peft knows modules that cannot be adapted, of Mamba for example
        names = sorted({_last(name) for name in targets})
        raise _refused(config, str(error), f"leave them out of {names}") from error
    if config.quantize:
        del any_model.is_loaded_in_4bit
    for name, layer in adapted.named_modules():
        if hasattr(layer, "lora_magnitude_vector") and not all(
            (m.weight != 0).all() for m in layer.lora_magnitude_vector.values()
        ):
            rule = f"{name} has a row of zeros, which has no direction"
            raise ConfigError("lora.variant", config.variant, rule, 'use "lora", or leave this module out')
    return adapted


@torch.no_grad()
def check_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Check on a few tokens that the model calls its adapted modules.

    Some models compute with the weight of a module instead (Mamba), and text alone does not reach an image encoder. The
    adapters of such modules are frozen if the targets are "all-linear". Raises ConfigError if they were named, as stacks
    of experts are.
    """
    called: set[str] = set()
    layers = {name: layer for name, layer in model.named_modules() if _is_adapted(layer)}
    hooks = [
        layer.register_forward_hook(lambda *_, kind=_kind(name): called.add(kind)) for name, layer in layers.items()
    ]
    try:
        any_model: Any = model
        any_model(input_ids=torch.arange(8, device=any_model.device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # A few tokens reach a few experts only, so all modules at the same place of their layers count as one.
    idle = [name for name in layers if _kind(name) not in called]
    stacks = [name for name in idle if isinstance(layers[name], ParamWrapper)]
    if stacks or (idle and config.target_modules != ALL_LINEAR):
        kinds = sorted({_kind(name) for name in stacks or idle})
        rule = f"the model does not call {kinds}, so adapters would learn nothing"
        raise _refused(config, rule, "leave them out", key="target_parameters" if stacks else "target_modules")
    for name in idle:
        layers[name].requires_grad_(False)
    if idle:
        logger.info("lora: %d modules that text does not reach stay as they are, such as %s", len(idle), idle[0])


def has_lora(model: nn.Module) -> bool:
    """Whether `model` has adapters of `apply_lora`."""
    return any(_is_adapted(module) for module in model.modules())


def adapted_stacks(model: nn.Module) -> list[nn.Module]:
    """Modules of `model` that add adapters to a stack of experts."""
    return [module for module in model.modules() if isinstance(module, ParamWrapper)]


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write only the adapters in peft's layout, so that `peft.PeftModel.from_pretrained(base, folder)` loads them."""
    any_model: Any = model
    folder.mkdir(parents=True, exist_ok=True)
    weights = peft.get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = any_model.peft_config[_ADAPTER].to_dict()
    # The folder of the base model is a path on one machine. peft receives the base model when it loads an adapter.
    settings |= {
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": sorted(settings["target_modules"]),
        "target_parameters": sorted(settings["target_parameters"] or ()) or None,
    }
    (folder / "adapter_config.json").write_text(
        json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8"
    )


def _targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Full names of the modules that `config` selects, as peft does: by a name or the end of one."""
    any_model: Any = model
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    experts = {last for last in {_last(name) for name in linear} if _becomes_experts(model, last)}
    if config.target_modules == ALL_LINEAR:
        head = any_model.get_output_embeddings()
        targets = [name for name, module in linear.items() if module is not head and _last(name) not in experts]
    else:
        targets = [name for name in linear if _ends_with(name, config.target_modules)]
        found = {target for target in config.target_modules if any(_ends_with(name, [target]) for name in targets)}
        missing = sorted(set(config.target_modules) - found)
        if missing:
            choices = sorted({_last(name) for name in linear} - experts)
            raise _refused(
                config, f"the model has no linear modules {missing}", f'use "{ALL_LINEAR}", or some of {choices}'
            )
        fused = [name for name, _ in model.named_parameters() if _ends_with(name, config.target_modules)]
        fused += [name for name in targets if _last(name) in experts]
        if fused:
            raise _refused(config, f"{fused[0]} is, or means in peft, a parameter of fused experts", "leave it out")
    if not targets:
        raise _refused(config, f"{type(model).__name__} has no linear modules", "remove lora")
    for names in _tied(model):
        shared = sorted({name.rpartition(".")[0] for name in names} & set(targets))
        if shared:
            rule = f"{shared[0]} shares its weight ({', '.join(names)}), so that what it learns would be lost or change both"
            raise _refused(config, rule, "leave it out")
    if config.quantize and any(isinstance(linear[name], Conv1D) for name in targets):
        rule = "the model has Conv1D layers, which have no 4-bit form"
        raise ConfigError("lora.quantize", config.quantize, rule, "remove it")
    left_out = {_last(name) for name in linear.keys() - set(targets)}
    logger.info("lora: adapters for %s, none for %s", sorted({_last(name) for name in targets}), sorted(left_out))
    return targets


def _stacks(model: nn.Module, config: LoraConfig) -> list[str]:
    """Full names of the stacks of experts that `config` selects: parameters of three dimensions."""
    stacks = [
        name
        for name, one in model.named_parameters()
        if _meta(one).dim() == 3 and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
    ]
    wanted = config.target_parameters
    if missing := [target for target in wanted if not any(_ends_with(name, [target]) for name in stacks)]:
        choices = sorted({".".join(name.split(".")[-2:]) for name in stacks})
        rule, remedy = (
            f"the model has no stacks of experts {missing}",
            f"use some of {choices}" if choices else "remove it",
        )
        raise _refused(config, rule, remedy, key="target_parameters")
    return [name for name in stacks if _ends_with(name, wanted)]


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """Whether `module` computes a product and nothing else: the routers of Llama 4 are a Linear, too."""
    if not isinstance(module, (nn.Linear, Conv1D)):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    any_module: Any = module
    # On meta tensors, as ZeRO 3 may have partitioned the weights.
    metas = _described(dict(module.named_parameters()))
    row = torch.empty(1, any_module.in_features, dtype=any_module.weight.dtype, device="meta")
    return isinstance(torch.func.functional_call(module, metas, (row,)), Tensor)


def _becomes_experts(model: nn.Module, name: str) -> bool:
    """Whether peft takes the name of a linear module for the name of the fused experts next to it (DeepSeek V3)."""
    settings = peft.LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # a part of the fused weight
        return True
    return bool(settings.target_parameters)


def _lost(names: Sequence[str]) -> TrainingError:
    rule = f"what adapters have learned would be missing in the merged weights ({', '.join(names[:3])})"
    return TrainingError("lora", len(names), rule, "please report this as a bug, with the model's type")


def _refused(config: LoraConfig, rule: str, remedy: str, *, key: str = "target_modules") -> ConfigError:
    return ConfigError(f"lora.{key}", getattr(config, key), rule, remedy)


def _ends_with(name: str, targets: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _kind(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _is_adapted(module: nn.Module) -> bool:
    return _ADAPTER in getattr(module, "lora_A", ())


def _changed_weight(name: str, layer: Any) -> str:
    """Name of the weight that the adapter of `layer`, whose name is `name`, changes. Adapters of stacks are nested."""
    parameter = getattr(layer, "parameter_name", "weight")
    while isinstance(layer, BaseTunerLayer):
        name, layer = f"{name}.base_layer", layer.base_layer
    return f"{name}.{parameter}"


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    if isinstance(layer, ParamWrapper):
        left, right, scaling = layer.get_delta_factors(_ADAPTER)  # of each expert, as the weight has them
        return (left.float() @ right.float()).mul_(scaling).add_(weight).to(weight.dtype)
    base = layer.get_base_layer()
    if type(base).__name__ == "Linear4bit":  # made by `quantize`
        weight = whole_weight(base)
    transposed = layer.fan_in_fan_out  # the weight of GPT-2's Conv1D is [in, out]
    weight_OI = weight.T if transposed else weight
    a_RI, b_OR = layer.lora_A[_ADAPTER].weight.float(), layer.lora_B[_ADAPTER].weight.float()
    # In place, so that one float32 copy of the weight exists and not four. It adds in float32 whatever the weight's dtype.
    merged_OI = (b_OR @ a_RI).mul_(layer.scaling[_ADAPTER]).add_(weight_OI)
    if layer.use_dora[_ADAPTER]:
        norm_O = layer.lora_magnitude_vector[_ADAPTER].weight.float()
        merged_OI.mul_((norm_O / merged_OI.norm(dim=1)).unsqueeze(1))
    return (merged_OI.T if transposed else merged_OI).to(weight.dtype)


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several (embeddings and a tied LM head), in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


# ---------------------------------------------------------------- Yield the weights of a model for others

VALUE_HEAD = "value_head.weight"
"""Name of the head of a `ValueModel`, whose other weights have the names in its backbone's checkpoint."""
Whole = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""Makes weights whole, of which a rank may hold a part, until the end of a context."""


class WeightStream:
    """The weights of a model under the names of its checkpoint, with adapters merged and without tied duplicates.

    Iterating makes one weight whole at a time (a layer, where transformers changes names or tensors on load, as it does
    with fused experts), and yields it contiguous, on the model's device. It may share memory with the model: use or copy
    it before the next optimizer step. If `whole` is a collective call, all ranks must iterate, and read the same names.

    The merge is V = W + scaling * B A in fp32, with every row of V scaled to its learned norm for DoRA, and rounded once to
    the dtype of W. A 4-bit W is dequantized first. The live model does not change.

    With `adapters_alone` the weights are the trained A and B, under the names of peft's files. `stored` reads weights of a
    model that is on the meta device, by their names in it.

    >>> [(name, tuple(weight.shape)) for name, weight in WeightStream(nn.Linear(3, 2))]
    [('weight', (2, 3)), ('bias', (2,))]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        whole: Whole = lambda _: nullcontext(),
        adapters_alone: bool = False,
        stored: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
    ) -> None:
        self.whole = whole
        self._stored = stored
        self._root = model.backbone if isinstance(model, ValueModel) else model
        if adapters_alone:
            self._sources = {_in_peft(name): _Source(weight) for name, weight in _trained_adapters(model)}
            self._groups = [_Group((n,), {n: one.meta()}) for n, one in self._sources.items()]
            return
        self._sources = _sources(self._root)
        self._groups = _groups(self._root, self._sources)
        if isinstance(model, ValueModel):
            self._sources[VALUE_HEAD] = head = _Source(model.value_head.weight)
            self._groups.append(_Group((VALUE_HEAD,), {VALUE_HEAD: head.meta()}))

    @property
    def metadata(self) -> dict[str, Tensor]:
        """Map each name to a meta tensor of the weight's dtype and shape, in the order of iteration."""
        return {name: weight for group in self._groups for name, weight in group.weights.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups:
            yield from self._of(group)

    def read(self, name: str) -> Tensor:
        """Read the weight `name`."""
        [group] = [group for group in self._groups if name in group.weights]
        return dict(self._of(group))[name]

    def digest(self) -> str:
        """The `weights_digest` of all weights."""
        return weights_digest(self.metadata, self.read)

    def measure(self) -> None:
        """Correct the shapes of `metadata` where the parameters are only parts of the whole: iterates once."""
        for index, group in enumerate(self._groups):
            self._groups[index] = replace(group, weights=_described(dict(self._of(group))))

    def _of(self, group: _Group) -> Iterator[tuple[str, Tensor]]:
        # A separate function, so that nothing here keeps a weight in memory while the next one is made whole.
        sources = {name: self._sources[name] for name in group.sources}
        with self.whole([tensor for source in sources.values() for tensor in source.tensors()]):
            state = {
                name: self._stored[name]() if name in self._stored else source.value()
                for name, source in sources.items()
            }
            del sources
            if group.converted:
                state = _reverted(self._root, state)
            for name in list(state):
                yield name, state.pop(name).contiguous()


@dataclass(frozen=True)
class _Group:
    """Weights that are made whole together."""

    sources: tuple[str, ...]
    """Their names in the model."""
    weights: Mapping[str, Tensor]
    """Name in the checkpoint -> meta tensor."""
    converted: bool = False
    """Whether these names or tensors differ."""


@dataclass(frozen=True)
class _Source:
    """A weight of the model, and the layer whose adapter changes it, if there is one."""

    weight: Tensor
    layer: Any = None

    def tensors(self) -> list[Tensor]:
        if isinstance(self.layer, ParamWrapper):  # inside are other stacks, too
            return [self.weight, *self.layer.lora_A.parameters(), *self.layer.lora_B.parameters()]
        return [self.weight] if self.layer is None else list(self.layer.parameters())

    def value(self) -> Tensor:
        return self.weight.detach() if self.layer is None else _merged(self.weight.detach(), self.layer)

    def meta(self) -> Tensor:
        if self.layer is not None and type(self.layer.get_base_layer()).__name__ == "Linear4bit":
            return self.value().to("meta")
        return _meta(self.weight)


def _trained_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Frozen ones (`check_adapters`) are the zeros that they were in the beginning.
    return ((name, one) for name, one in model.named_parameters() if ".lora_" in name and one.requires_grad)


def _in_peft(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def _sources(model: nn.Module) -> dict[str, _Source]:
    # Layers by the name of the weight that their adapter changes.
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    layers = {_changed_weight(name, module): module for name, module in adapted.items()}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, is_adapter, _ = name.partition(".lora_")
        if not (is_adapter and owner in adapted) and _BLOCK_STATE not in name:
            found[name] = _Source(tensor, layers.get(name))
    tied = _tied(model)
    if lost := sorted({*(layers.keys() - found.keys()), *(name for names in tied for name in names if name in layers)}):
        raise _lost(lost)
    left_out = {name for names in tied for name in names[1:]}
    return {_LAYERS.sub(".", name): source for name, source in found.items() if name not in left_out}


def _groups(model: nn.Module, sources: Mapping[str, _Source]) -> list[_Group]:
    metas = {name: source.meta() for name, source in sources.items()}
    named = _reverted(model, metas)
    if any(source.layer for source in sources.values()) and _elements(named) != _elements(metas):
        raise _lost(sorted(named.keys() ^ metas.keys()))
    if named.keys() == metas.keys() and all(named[name] is one for name, one in metas.items()):
        return [_Group((name,), {name: one}) for name, one in named.items()]
    order, expected = sorted(metas, key=dot_natural_key), _shapes(named)
    for unit in (str, _layer):  # one weight at a time if each gives its tensors of the checkpoint, else one layer
        by_unit = ([*names] for _, names in itertools.groupby(order, unit))
        groups = [
            _Group(tuple(names), _described(_reverted(model, {name: metas[name] for name in names})), converted=True)
            for names in by_unit
        ]
        if sorted(shape for group in groups for shape in _shapes(group.weights)) == expected:
            return groups
    logger.warning("%s: its checkpoint joins weights of several layers, so all are gathered", type(model).__name__)
    return [_Group(tuple(metas), _described(named), converted=True)]


def _shapes(weights: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((name, tuple(one.shape)) for name, one in weights.items())


def _described(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta tensors of the same dtypes and shapes, none of which is a part of another."""
    return {name: _meta(one) for name, one in weights.items()}


def _meta(weight: Tensor) -> Tensor:
    """A meta tensor like `weight`, or like the whole one (`ds_shape`) of which ZeRO 3 has left a part here."""
    return torch.empty(getattr(weight, "ds_shape", weight.shape), dtype=weight.dtype, device="meta")


def _layer(name: str) -> str:
    """First part of a weight's name, to the number of its layer; all of it if it is in none."""
    return re.sub(r"(?<=\.)(\d+)\..*", r"\1", name, count=1)


def _elements(tensors: Mapping[str, Tensor]) -> int:
    return sum(map(Tensor.numel, tensors.values()))


def _reverted(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the changes that transformers makes to names and tensors on load, as `save_pretrained` does."""
    return dict(revert_weight_conversion(model, state)) if isinstance(model, PreTrainedModel) else state
