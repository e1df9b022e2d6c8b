"""Digest and read the rubric of a judge, where a file has it."""

from collections.abc import Mapping
from pathlib import Path

from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.store.fingerprint import hash_file


def rubric_digest(judge: JudgeAnnotator, name: str, *, under: str) -> dict[str, str]:
    """The digest of the judge's rubric as `name`, {} if no file has it. Raises ConfigError if the file is missing.

    `under` is the table of the profile with the judge.
    """
    if not judge.rubric_file:
        return {}
    path = Path(judge.rubric_file).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{under}.{name}", judge.rubric_file, f"there is no such file in {Path.cwd()}", "fix the path"
        )
    return {name: hash_file(path)}


def rubric_text(judge: JudgeAnnotator, name: str, planned: Mapping[str, str]) -> str:
    """The text that decides which answer is better. Raises DataError if its file has changed since the plan."""
    if not judge.rubric_file:
        return judge.rubric
    path = Path(judge.rubric_file).expanduser()
    if planned and hash_file(path) != planned[name]:
        raise DataError(name, judge.rubric_file, "has changed since the run was planned", "run it again")
    return path.read_text(encoding="utf-8")
