"""Count the parameters of a model from its configuration, without its weights and, for common families, without torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.config.models import ALL_LINEAR, InitModel, LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.pretrained import load_config

BY_FORMULA = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type` of families whose parameters `shape_of` counts by formula. For all others, transformers builds the
layers on the meta device, which takes seconds.
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear modules with one name: `count` modules, each with `inputs` * `outputs` weights."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a causal LM that decide its memory and its speed.

    >>> shape = shape_of_init(InitModel(vocab_size=300, hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=96))
    >>> shape.parameters, shape.largest, shape.key_width
    (80960, 19200, 32)
    """

    family: str
    parameters: int
    """All parameters; a tied LM head counts once."""
    head: int
    """Parameters of a separate LM head; 0 if it is tied to the embedding."""
    embedding: int
    largest: int
    """Parameters of the largest tensor."""
    layers: int
    hidden: int
    intermediate: int
    query_width: int
    """Number of heads times head width."""
    key_width: int
    """Number of key/value heads times head width."""
    vocabulary: int
    linears: tuple[Linear, ...]
    """All linear modules except the LM head."""
    active: int
    """Parameters used for one token, without the embedding; in a mixture of experts, fewer than all."""
    stacks: tuple[Linear, ...] = ()
    """Stacks of experts."""

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.head - self.embedding) // self.layers

    @property
    def sparse(self) -> bool:
        """Whether each token uses only a part of the layers' weights: a mixture of experts."""
        return self.active + self.embedding < self.parameters

    def without_head(self) -> "ModelShape":
        """The shape as a reward or value model, with a scalar head in place of the LM head."""
        others = self.parameters - self.head + self.hidden
        largest = max(self.embedding, *(one.inputs * one.outputs for one in self.linears))
        active = self.active - self.hidden * self.vocabulary + self.hidden
        return replace(self, parameters=others, head=self.hidden, largest=largest, active=active)

    def adapted_stacks(self, lora: LoraConfig | None) -> list[int]:
        """Parameters of each stack of experts that adapters change."""
        targets = lora.target_parameters if lora else ()
        return [one.count * one.inputs * one.outputs for one in self.stacks if one.name.endswith(targets)]

    def adapters(self, lora: LoraConfig) -> int:
        """Parameters of the adapters: rank * (inputs + outputs) per target; DoRA adds one norm per row."""
        total = sum(
            one.count * lora.rank * (one.inputs + one.outputs)
            for one in self.stacks
            if one.name.endswith(lora.target_parameters)
        )
        for one in self.linears:
            if lora.target_modules == ALL_LINEAR or one.name in lora.target_modules:
                dora = one.outputs if lora.variant == "dora" else 0
                total += one.count * (lora.rank * (one.inputs + one.outputs) + dora)
        return total


def shape_of_init(model: InitModel) -> ModelShape:
    """Shape of a Llama built by `initialize_llama`, whose embeddings are tied."""
    return _by_formula(
        {
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "intermediate_size": model.intermediate_size,
            "tie_word_embeddings": True,
        }
    )


def shape_of(folder: Path) -> ModelShape:
    """Read the shape of the model in `folder` from `config.json`; ConfigError if it is missing or invalid."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError("model.path", str(folder), "has no config.json", "give the folder of a model")
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
        return _by_formula(config) if config.get("model_type") in BY_FORMULA else _on_meta(folder)
    except (KeyError, TypeError, ValueError, ArithmeticError, OSError) as error:
        rule = f"its config.json describes no model ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise ConfigError("model.path", str(folder), rule, "correct it, or give the folder of another model") from error


def _by_formula(config: Mapping[str, Any]) -> ModelShape:
    family, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    heads, inner, vocabulary = config["num_attention_heads"], config["intermediate_size"], config["vocab_size"]
    if min(hidden, layers, heads, inner, vocabulary) < 1:
        raise ValueError("sizes must be at least 1")
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    linears = tuple(
        Linear(name, inputs, outputs, layers)
        for name, inputs, outputs in (
            ("q_proj", hidden, queries),
            ("k_proj", hidden, keys),
            ("v_proj", hidden, keys),
            ("o_proj", queries, hidden),
            ("gate_proj", hidden, inner),
            ("up_proj", hidden, inner),
            ("down_proj", inner, hidden),
        )
    )
    biases = 0
    if family == "qwen2" or config.get("attention_bias"):
        biases += queries + 2 * keys + (hidden if family != "qwen2" else 0)
    if config.get("mlp_bias"):
        biases += 2 * inner + hidden
    norms = 2 * hidden + (2 * width if family == "qwen3" else 0)  # Qwen3 has one for queries, one for keys
    inside = layers * (biases + norms) + hidden + _weights(linears)
    tied = config.get("tie_word_embeddings", False)
    embedding = vocabulary * hidden
    return ModelShape(
        family=family,
        parameters=embedding + inside + (0 if tied else embedding),
        head=0 if tied else embedding,
        embedding=embedding,
        largest=max(embedding, *(one.inputs * one.outputs for one in linears)),
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        query_width=queries,
        key_width=keys,
        vocabulary=vocabulary,
        linears=linears,
        active=inside + embedding,
    )


def _weights(linears: Sequence[Linear]) -> int:
    return sum(one.inputs * one.outputs * one.count for one in linears)


def _on_meta(folder: Path) -> ModelShape:
    """Shape of any causal LM of transformers; its layers are built on the meta device, without memory."""
    # Imported here since only other families need them, and the imports take seconds.
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(folder)
    text = config.get_text_config()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    counted: dict[tuple[str, int, int], int] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if module is not head and type(module).__name__ in ("Linear", "Conv1D") and weight is not None:
            swaps = type(module).__name__ == "Conv1D"
            outputs, inputs = reversed(weight.shape) if swaps else weight.shape
            place = (name.rpartition(".")[2], int(inputs), int(outputs))
            counted[place] = counted.get(place, 0) + 1
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parameters = sum(sizes.values())
    own_head = 0 if head is None or head.weight is embedding else head.weight.numel()
    # Fused experts are parameters with a leading dimension of experts, of which a token meets a few.
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or experts
    routed = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 3 and experts and p.shape[0] == experts)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts:  # experts per token; without a separate width they have the MLP's
        inner = chosen * (getattr(text, "moe_intermediate_size", None) or inner)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        family=config.model_type,
        parameters=parameters,
        head=own_head,
        embedding=embedding.numel(),
        largest=max(sizes.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=inner,
        query_width=heads * width,
        key_width=(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=text.vocab_size,
        linears=tuple(Linear(*place, count) for place, count in counted.items()),
        stacks=tuple(Linear(n, p.shape[1], p.shape[2], p.shape[0]) for n, p in model.named_parameters() if p.ndim == 3),
        active=parameters
        - (embedding.numel() if own_head else 0)
        - routed
        + (routed * chosen // experts if experts else 0),
    )
