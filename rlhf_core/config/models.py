"""Configure models: where the weights come from, and their adapters."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.schema.base import Config, RenamedConfig, added_option

GIVEN_TO_TEMPLATES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of chat templates that are of a conversation."""


def check_template_variables(values: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    """The values. Raises ValueError for a variable that each conversation gives, and for a truth value as text."""
    for name in sorted(values.keys() & GIVEN_TO_TEMPLATES):
        raise ValueError(f"{name} = {values[name]!r}: is given to the template with each conversation; remove it")
    for name, value in values.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            rule = "is text, which a template takes for true"
            raise ValueError(f"{name} = {value!r}: {rule}; write {value.lower()} without quotes")
    return values


TemplateVariables: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str],
    AfterValidator(check_template_variables),
]
"""Values of variables that a chat template reads."""


class PretrainedModel(Config):
    """A causal LM, given by folder or Hub name, or a GGUF file inside a folder."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Folder or Hub name; `package:<python package>/<folder>` finds a folder inside an installed package."""
    revision: str = ""
    """Commit of a Hub model; required for a Hub name so that the key means one model."""
    gguf_file: str = ""
    """Name of a GGUF file in `path`, dequantized on load."""
    chat_template_kwargs: TemplateVariables = added_option({})
    """Values of variables that the chat template reads, such as `{enable_thinking = false}`. They are written into the template
    of the model, so that training, sampling and serving have the same."""


class InitModel(Config):
    """A randomly initialized Llama of a given shape, with a byte-level BPE tokenizer trained on the demonstrations."""

    type: Literal["init"] = "init"
    vocab_size: int = Field(1024, ge=300)
    hidden_size: int = Field(256, ge=32)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(4, ge=1)
    intermediate_size: int = Field(704, ge=32)
    max_positions: int = Field(256, ge=32)


BaseModelConfig = Annotated[PretrainedModel | InitModel, Field(discriminator="type")]


ALL_LINEAR: Literal["all-linear"] = "all-linear"


class LoraConfig(RenamedConfig):
    """Low-rank adapters (arXiv 2106.09685), merged into the weights on export."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """Variant of the adapters: `rslora` scales by alpha / sqrt(rank) (arXiv 2312.03732), `dora` also learns the norms
    of the rows (2402.09353)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear modules by name or by the end of their full name, as in peft; the default fits Llama and its kin. "all-linear"
    fits every architecture: all but the LM head. Fused experts are not modules (see `target_parameters`). A module that
    shares its weight (a tied LM head) is refused, because its adapter could not be merged."""
    quantize: Literal["", "nf4"] = ""
    """Quantization of the base weights: `nf4` keeps them in 4 bits (QLoRA, arXiv 2305.14314) and needs the extra `kernels`.
    The export has full weights: the rounded ones with the adapters merged in."""
    target_parameters: tuple[str, ...] = added_option(())
    """Stacks of experts that get adapters, too, by the end of their full names, as in peft:
    `["experts.gate_up_proj", "experts.down_proj"]`. Each expert has adapters of `rank`. A layer computes with a changed copy
    of its stacks, and keeps it for the backward pass unless `runtime.trainer.gradient_checkpointing` is on."""

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        name = "quantize" if self.quantize else "variant"
        if self.target_parameters and (self.quantize or self.variant == "dora"):
            rule = "is not possible for adapters of experts (target_parameters)"
            raise ValueError(f"{name} = {getattr(self, name)!r}: {rule}; remove one of them")
        return self
