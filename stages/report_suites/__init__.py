"""Declare and configure the report over all suites."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import ReportRef
from stages import measured
from stages.declaration import From, stage


class ReportSuitesConfig(Config):
    """The comparison of the policies over all suites. The intervals cover 95 %, as in the reports of the suites."""

    reference: str = "sft"
    """Policy that all others are compared with, prompt by prompt."""
    regressions_shown: int = Field(8, ge=0)
    """Number of prompts per suite at which a policy is furthest below the reference, with both answers."""
    opponents: dict[str, str] = added_option({})
    """Name of the opponent of each `<suite>/<policy>` that a judge compared; set by the pipeline."""


@stage(version=1, code="strict", page="evaluation.md", metrics=measured.report_suites)
def report_suites(
    config: ReportSuitesConfig, *, results: Annotated[Mapping[str, ReportRef], From({"suite/sft": "evaluate_suite"})]
) -> ReportRef:
    """One report over the `results` of all suites and policies, named `<suite>/<policy>`."""
