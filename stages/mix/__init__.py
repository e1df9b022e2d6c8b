"""Declare and configure `mix`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.models import TemplateVariables
from rlhf_core.data.chat_templates import CHATML, SHIPPED
from rlhf_core.errors import explain, nearest
from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import ArtifactRef
from stages import measured
from stages.declaration import From, stage

Kind = Literal["demonstrations", "preferences", "prompts", "steps"]


class MixConfig(Config):
    """Shares of several tables, or of the sources of their rows."""

    kind: Kind = "demonstrations"
    """Kind of the tables. A profile does not need to give it: it is the kind of the first table."""
    shares: dict[str, float] = {}
    """Table -> its share of the training rows. Empty takes all rows of all tables."""
    sources: tuple[str, ...] = ()
    """Sources whose rows are taken. Empty takes all sources."""
    mixture: dict[str, float] = {}
    """Source -> its share of the training rows, instead of shares of tables."""
    chat_template: dict[str, str] = added_option({})
    """Source -> chat template of its rows in place of the model's: `chatml`, the name of a shipped one, or its Jinja text."""
    chat_template_kwargs: dict[str, TemplateVariables] = added_option({})
    """Source -> values of variables that the chat template reads, such as `{gsm8k = {enable_thinking = true}}`. Later steps
    keep both with the rows."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """End of a mixture with shares, as in `datasets.interleave_datasets`: `first_exhausted` ends when the first table has no
    more rows, `all_exhausted` repeats the rows of small tables until every row of every table was taken. Sources are drawn
    in the sequence of that function for the seed of the run."""
    least_rows: int = Field(1, ge=0)
    """Least number of training rows; with fewer the stage fails."""

    def settings(self, source: str) -> dict[str, Any]:
        """The arguments with which conversations of a source are rendered."""
        template = {"chat_template": self.chat_template[source]} if source in self.chat_template else {}
        return template | self.chat_template_kwargs.get(source, {})

    @model_validator(mode="after")
    def _check_templates(self) -> "MixConfig":
        for source, template in self.chat_template.items():
            if "{" not in template and template not in (CHATML, *SHIPPED):
                rule = "is neither Jinja nor a shipped template"
                remedy = nearest(template, [CHATML, *SHIPPED])
                raise ValueError(explain(f"chat_template.{source}", template, rule, remedy))
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> "MixConfig":
        if self.shares and self.mixture:
            raise ValueError("mixture = {...}: a step has shares of tables or of sources; remove one of the two")
        for name, shares in (("shares", self.shares), ("mixture", self.mixture)):
            for key, share in shares.items():
                if not share > 0:
                    raise ValueError(f"{name}.{key} = {share:g}: must be above 0; remove it to leave the rows out")
        if self.stopping_strategy == "all_exhausted" and not (self.shares or self.mixture):
            rule = "only rows that are taken by shares can be exhausted; give shares or mixture"
            raise ValueError(f"stopping_strategy = {self.stopping_strategy!r}: {rule}")
        outside = [name for name in self.mixture if self.sources and name not in self.sources]
        if outside:
            rule = f"is none of sources ({', '.join(self.sources)})"
            raise ValueError(
                f"mixture.{outside[0]} = {self.mixture[outside[0]]:g}: {rule}; add it there, or remove it here"
            )
        return self


@stage(
    version=1,
    code="strict",
    metrics=measured.mix,
)
def mix(
    config: MixConfig, *, tables: Annotated[Mapping[str, ArtifactRef], From({"first": "prepare_data.demonstrations"})]
) -> ArtifactRef:
    """One table of several `tables` of the same kind: all rows, or rows by shares of the tables or of their sources."""
