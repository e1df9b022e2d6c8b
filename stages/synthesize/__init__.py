"""Declare and configure synthesis: answers or prompts that a language model writes from seed prompts."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.rewards import ChatServer
from rlhf_core.schema.base import OPERATIONAL, Config
from rlhf_core.types import ArtifactRef, PolicyRef, PromptsRef
from stages import measured
from stages.declaration import From, stage


class SynthesizeConfig(Config):
    """The request to a policy, or to a model at a server, for each prompt, and the rules for keeping its replies."""

    make: Literal["demonstrations", "prompts", "pairs", "generations"] = "demonstrations"
    """Use of the replies: `demonstrations` answer the prompt, `prompts` are new ones, `pairs` prefer the last reply of a
    conversation to the first, and `generations` are answers that `score` and `select` read."""
    server: ChatServer | None = None
    """Server of the model that replies; without a server, the input `policy` replies."""
    template: str = ""
    """Text of the request; `{prompt}` and `{label}` are filled in, other braces stay. If empty, the prompt itself is
    the request."""
    turns: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further requests of the conversation, such as a critique and a revision; the last reply counts."""
    samples_per_prompt: int = Field(1, ge=1)
    """Number of conversations about each prompt."""
    max_prompts: int = Field(0, ge=0)
    """Number of prompts to use, from the start; 0 uses all."""
    sampling: SamplingConfig = SamplingConfig(max_tokens=512)
    """Sampling of the `policy`; a server has separate settings."""
    pattern: str = ""
    """Regular expression whose last match in a reply is kept, or its group if it has one; other replies are left out."""
    drop_truncated: bool = True
    """Whether replies cut off by the token limit are left out: as text they would teach the model to end there."""
    min_characters: int = Field(1, ge=1)
    max_characters: int = Field(0, ge=0)
    """Most characters of a kept text; 0 sets no limit."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts whose demonstrations or pairs are held out."""
    shard_size: Annotated[int, Field(ge=1), OPERATIONAL] = 128
    """Number of prompts that the policy is asked about in one call. A killed run loses at most one call; with a server,
    the requests in progress."""

    @property
    def uses_policy(self) -> bool:
        """True if the policy answers, or its tokenizer is needed for the tokens of generations."""
        return self.server is None or self.make == "generations"

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if self.template and "{prompt}" not in self.template:
            raise ValueError("template: must hold {prompt}, or every request is the same; add it")
        if self.make == "pairs" and not self.turns:
            raise ValueError('turns = []: make = "pairs" prefers the last reply to the first; write a further request')
        if self.make == "prompts" and not self.template:
            raise ValueError('template = "": replies to a prompt are no prompts; write a request for a new one')
        if self.server is not None and self.sampling != type(self).model_fields["sampling"].default:
            raise ValueError(
                "sampling = {...}: is not read beside server, which has max_tokens and temperature of its own; remove it"
            )
        if self.max_characters and self.max_characters < self.min_characters:
            raise ValueError(f"max_characters = {self.max_characters}: must be >= min_characters; raise it")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern = {self.pattern!r}: is no regular expression: {error}; correct it") from None
        if groups > 1:
            raise ValueError(f"pattern = {self.pattern!r}: has {groups} groups; write one, and others as (?:...)")
        return self


@stage(version=2, code="warn", engines=("sampler",), metrics=measured.fixed(*measured.SYNTHESIZED))
def synthesize(
    config: SynthesizeConfig,
    *,
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    policy: Annotated[PolicyRef | None, From("sft", when=lambda config: config.uses_policy, default="base")] = None,
) -> ArtifactRef:
    """Demonstrations, prompts, pairs or generations that `policy`, or the model at `config.server`, writes from `prompts`."""
