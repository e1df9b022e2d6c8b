"""Configure who judges comparisons: `annotator = {type = "program" | "file"}`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.schema.base import OPERATIONAL, Config


class ProgramAnnotator(Config):
    """Simulated people: a reward function with Bradley-Terry noise, for tests and for worlds with a known reward."""

    type: Literal["program"] = "program"
    function: str
    """Reward as `module:function` or `file.py:function`: list[Generation] -> list[float]."""
    annotators: int = Field(1, ge=1)
    """Number of simulated people; each judges every comparison with noise of its own."""
    temperature: float = Field(1.0, gt=0)
    """Noise: the answer with reward a is chosen over the one with b with probability sigmoid((a - b) / temperature)."""
    tie_below: float = Field(0.0, ge=0)
    """Rewards that differ by less than this are a tie."""
    timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 600.0
    """Deadline, in seconds, of the function for all answers."""


class FileAnnotator(Config):
    """Judgments from a JSONL file that people, or a labeling tool, fill in.

    The stage writes the comparisons to `comparisons.jsonl` in a folder of their own in `folder`, named by their digest,
    and waits for `judgments.jsonl` beside it, with a line `{"id": ..., "choice": "first" | "second" | "tie" | "both_bad", "annotator": ..., "reason": ...}` for each
    judgment.
    """

    type: Literal["file"] = "file"
    folder: str
    """Folder of the exchange, with a folder for each set of comparisons; it is created if it does not exist."""
    needed: float = Field(1.0, gt=0, le=1)
    """Share of the comparisons that must be judged before the stage goes on."""

    @field_validator("folder")
    @classmethod
    def _is_given(cls, folder: str) -> str:
        if not folder.strip():
            raise ValueError("must name a folder; give one")
        return folder


Annotator = Annotated[ProgramAnnotator | FileAnnotator, Field(discriminator="type")]
