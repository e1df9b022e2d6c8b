"""Declare and configure tasks of EleutherAI's evaluation harness: `type = "lm_eval"` in `[[evaluate.suites]]`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import OPERATIONAL, Config
from rlhf_core.store.fingerprint import canonical_json, hash_files, sha256_text, tree_digest
from rlhf_core.types import PolicyRef, ReportRef
from stages import measured
from stages.declaration import From, stage
from stages.evaluate_suite import SuiteName
from stages.harness_files import outside_files
from stages.planned_files import files_at

PACKAGE = "lm_eval"


class HarnessSuite(Config):
    """Tasks of lm_eval, scored with our engines: log-likelihoods by the trainer, answers by the sampler."""

    name: SuiteName
    type: Literal["lm_eval"] = "lm_eval"
    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks or groups, of the harness or of `include_path`."""
    include_path: Annotated[str, OPERATIONAL] = ""
    """Folder with task YAML files, their rows and functions. The stage's key contains the content of all its files, and
    of local files outside of the folder to which they refer (`include`, `!function`, `data_files`)."""
    num_fewshot: int = Field(-1, ge=-1)
    """Number of examples before each question; -1 leaves it to the task."""
    limit: int = Field(0, ge=0)
    """Number of documents per task, from the start; 0 uses all."""
    apply_chat_template: bool = False
    """Whether prompts are rendered with the policy's chat template, as turns of the user."""
    headline: str = ""
    """Measure that stands for the suite, `<task>/<metric>`; if empty, the first metric of the first task."""


def content_digests(config: HarnessSuite) -> dict[str, str]:
    """Version of the harness and digests of its task files, for the stage's key.

    The files are those in `include_path` and the outside files that they refer to. Raises ConfigError if the harness is
    not installed or the folder is missing.
    """
    try:
        found = {PACKAGE: version(PACKAGE)}
    except PackageNotFoundError:
        remedy = 'install the extra: pip install "rlhf-lifecycle[lm-eval]"'
        rule = f"needs the package {PACKAGE}, which is not installed"
        raise ConfigError(f"evaluate.suites.{config.name}.type", config.type, rule, remedy) from None
    if config.include_path:
        folder = Path(config.include_path).expanduser()
        if not folder.is_dir():
            key = f"evaluate.suites.{config.name}.include_path"
            raise ConfigError(key, config.include_path, "is not a folder", "give the folder of the tasks")
        found["include_path"] = tree_digest(hash_files(*files_at(folder)))
        if outside := outside_files(folder):
            found["include_path.outside"] = sha256_text(canonical_json(outside))
    return found


@stage(
    version=2,
    code="warn",
    engines=("trainer", "sampler"),
    page="evaluation.md",
    metrics=measured.suite,
    files=content_digests,
)
def evaluate_harness(config: HarnessSuite, *, policy: Annotated[PolicyRef, From("ppo")]) -> ReportRef:
    """Tasks of EleutherAI's evaluation harness on one `policy`."""
