"""A request to plan or run a profile, made by a command, a Python program, a form of Prefect or `rlhf resume`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.execution.executor import RunOptions
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.run_notes import whereabouts
from rlhf_core.stage.key import Strictness


@dataclass(frozen=True)
class RunRequest:
    """A profile, changes of it, and which of its stages are to run.

    >>> RunRequest("tiny/full", until="sft").parameters()["until"]
    'sft'
    """

    profile: str
    """Name of a shipped profile, or a TOML file; "" for a form, whose configuration its flow finds."""
    overrides: tuple[str, ...] = ()
    """`dotted.key=value` changes of the profile."""
    until: str = ""
    force: tuple[str, ...] = ()
    strict: Strictness = Strictness()

    def config(self) -> PipelineConfig:
        """Load the profile with the changes."""
        return load_profile(self.profile, self.overrides)

    def options(self) -> RunOptions:
        """The options of the run, with the place of the profile instead of its name."""
        return RunOptions(
            until=self.until,
            force=self.force,
            strict=self.strict,
            overrides=self.overrides,
            profile=whereabouts(self.profile),
        )

    def parameters(self) -> dict[str, Any]:
        """The parameters that the flow run keeps, from which `from_parameters` makes the request again."""
        return {
            "profile": whereabouts(self.profile),
            "overrides": list(self.overrides),
            "until": self.until,
            "force": list(self.force),
            "strict_code": self.strict.code,
            "strict_env": self.strict.env,
        }

    @classmethod
    def from_parameters(cls, kept: Mapping[str, Any]) -> RunRequest:
        """The request that a flow run has kept, or that the options of a command describe. Raises KeyError without one."""
        strict = Strictness(code=kept.get("strict_code", False), env=kept.get("strict_env", False))
        return cls(kept["profile"], tuple(kept["overrides"]), kept["until"], tuple(kept["force"]), strict)
