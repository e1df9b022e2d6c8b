"""Configure who judges comparisons: `annotator = {type = "program" | "file" | "mlflow" | "judge"}`."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.rewards import ChatServer, JsonVerdict, OnFailure, PatternVerdict
from rlhf_core.schema.base import FAILURES, OPERATIONAL, Config, Seconds

SHOWN_TO_JUDGE = ("{prompt}", "{first}", "{second}")


class ProgramAnnotator(Config):
    """Simulated people: a reward function with Bradley-Terry noise, for tests and for worlds with a known reward."""

    type: Literal["program"] = "program"
    function: str
    """Reward as `module:function` or `file.py:function`: list[Generation] -> list[float]."""
    annotators: int = Field(1, ge=1)
    """Number of simulated people; each judges every comparison with separate noise."""
    temperature: float = Field(1.0, gt=0)
    """Noise: an answer with reward a is chosen over an answer with reward b with probability sigmoid((a - b) /
    temperature)."""
    tie_below: float = Field(0.0, ge=0)
    """Rewards that differ by less than this are a tie."""
    timeout_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """Deadline, in seconds, of the function for all answers."""


class Patience(Config):
    """Time that the stage waits for people."""

    needed: float = Field(1.0, gt=0, le=1)
    """Share of the comparisons that must be judged before the stage continues."""
    deadline_hours: Annotated[float, Field(ge=0), OPERATIONAL] = 0.0
    """Hours after which the stage continues with the judgments that are there; 0 sets no deadline."""

    def is_late(self, since_s: float, *, now: float) -> bool:
        """Whether the deadline has passed for comparisons that were shown first at `since_s`.

        >>> Patience(deadline_hours=1).is_late(0.0, now=3601.0)
        True
        """
        return bool(self.deadline_hours) and now > since_s + 3600 * self.deadline_hours


class FileAnnotator(Patience):
    """Judgments from a JSONL file that people, or a labeling tool, fill in.

    The stage writes the comparisons to `comparisons.jsonl` in a separate folder in `folder`, named by their digest, and
    waits for `judgments.jsonl` in the same folder, with a line
    `{"id": ..., "choice": "first" | "second" | "tie" | "both_bad", "annotator": ..., "reason": ...}` for each judgment.
    """

    type: Literal["file"] = "file"
    folder: str
    """Folder of the exchange, with a folder for each set of comparisons; it is created if it does not exist."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if not folder.strip():
            raise ValueError("must name a folder; give one")
        return folder


class ReviewAnnotator(Patience):
    """People who judge in MLflow's Review page, each in a separate queue.

    The queues are in the MLflow of the run. Without `rlhf up` they are created, but the page is missing.
    """

    type: Literal["mlflow"] = "mlflow"
    annotators: tuple[str, ...] = Field(("annotator-1",), min_length=1)
    """Names of the annotators; give pseudonyms, since they are recorded. Where MLflow has sign-in, names of its users."""
    overlap: int = Field(1, ge=1)
    """Number of annotators who judge each comparison, each without seeing the answers of the others."""
    instruction: str = "Which answer is better? Give a reason if you can."
    """Text next to the choice; the request and both answers are shown in any case."""
    experiment: Annotated[str, Field(min_length=1), OPERATIONAL] = "annotation"
    """Experiment in MLflow whose Review page has the queues; it is created if it does not exist."""

    @field_validator("annotators")
    @classmethod
    def _check_annotator_names(cls, annotators: tuple[str, ...]) -> tuple[str, ...]:
        bad = [name for name in annotators if not re.fullmatch(r"[\w.@-]+", name)]
        if bad:
            raise ValueError(f"{bad[0]!r}: must be letters, digits and . _ @ -; rename it")
        if len(set(annotators)) < len(annotators):
            raise ValueError("must differ; name each once")
        return annotators

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.overlap > len(self.annotators):
            rule = f"there are only {len(self.annotators)} annotators; lower it or add some"
            raise ValueError(f"overlap = {self.overlap}: {rule}")
        return self


class JudgeAnnotator(ChatServer):
    """A language model at an OpenAI-compatible chat endpoint; it judges every comparison in both orders.

    A choice counts if it is the same in both orders; otherwise the judgment is a tie (arXiv 2306.05685, section 3.4).
    """

    type: Literal["judge"] = "judge"
    rubric: str = "The better answer does what the request asks for, is correct and complete, and wastes no words."
    """Rubric or constitution that decides which answer is better; it takes the place of `{rubric}`."""
    rubric_file: Annotated[str, OPERATIONAL] = ""
    """Text file with the rubric, in place of `rubric`; its content is part of the stage's key, and its path is not."""
    template: str = (
        "Compare two answers to the same request.\n\nWhat counts:\n{rubric}\n\nRequest:\n{prompt}\n\n"
        "Answer A:\n{first}\n\nAnswer B:\n{second}\n\n"
        "Say in one sentence what decides. Then end with one line: `Better: A`, `Better: B`, `Better: tie`, or "
        "`Better: neither` if both answers are bad."
    )
    """Text of the question. `{rubric}`, `{prompt}`, `{first}` and `{second}` are filled in; other braces stay."""
    verdict: Annotated[PatternVerdict | JsonVerdict, Field(discriminator="type")] = PatternVerdict(
        pattern=r"(?im)better[\s*_`]*[:=][\s*_`]*(?:answer[\s*_`]+)?(a|b|tie|neither)[\s*_`.]*$"
    )
    """Pattern of the verdict in the reply: `A`, `B`, `tie` or `neither`, in either case."""
    max_tokens: int = Field(256, ge=1)
    """Maximum number of tokens of a reply."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    corrections: Annotated[int, Field(ge=0), FAILURES] = 2
    """Number of times that a reply without a verdict is answered with a request for one. They are counted."""
    on_failure: Annotated[OnFailure, FAILURES] = "fail"
    """Action if a question gets no verdict: `fail` ends the stage, which keeps the other verdicts for the next
    run; `invalid` leaves the comparison without a judgment, counted."""

    @model_validator(mode="after")
    def _check_placeholders(self) -> Self:
        missing = [name for name in SHOWN_TO_JUDGE if name not in self.template]
        if missing:
            raise ValueError(f"template: must hold {missing[0]}, or the judge does not see it; add it")
        if self.rubric_file and "rubric" in self.model_fields_set:
            raise ValueError("rubric_file: stands in place of rubric; remove one of them")
        if self.rubric_file and "{rubric}" not in self.template:
            raise ValueError("template: must hold {rubric}, or the judge does not see rubric_file; add it")
        return self


People = FileAnnotator | ReviewAnnotator
"""Annotators for whom a stage waits."""
Annotator = Annotated[ProgramAnnotator | FileAnnotator | ReviewAnnotator | JudgeAnnotator, Field(discriminator="type")]
