"""Name the extra of the package that a command needs: the base install plans, explains and reads stores."""

import importlib
import re
from collections.abc import Sequence
from importlib.util import find_spec

PACKAGE = "rlhf-lifecycle"
SERVERS = ("prefect", "mlflow")
ENGINES = ("torch", "transformers", "ray", *SERVERS)
NEEDS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("run", "rehearse", "sweep", "reproduce", "worker"), ENGINES),
    **dict.fromkeys(("up", "deploy"), SERVERS),
}
"""Command -> the modules it needs, where it would use them only after work, or in another process.

Others import theirs first. vLLM and DeepSpeed are not among them: a profile may have the `hf` sampler and train nothing.
"""


def check_needs(command: str) -> None:
    """Raise ModuleNotFoundError for the first module that a command needs and that is not installed."""
    for module in NEEDS[command] if command in NEEDS else ():
        if find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


def remedy(module: str) -> str:
    """The command that installs a module with an extra of this package; "" if no extra has it.

    >>> remedy("torch"), remedy("psycopg"), remedy("a_module_of_yours")
    ("pip install 'rlhf-lifecycle[cpu]', or [gpu] beside an NVIDIA GPU", "pip install 'rlhf-lifecycle[server]'", '')
    """
    if module.startswith("rlhf_contrib"):
        return f"install the whole wheel of {PACKAGE}, which has all topics"
    lines = (re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)", line) for line in _requirements())
    extras = {line[2] for line in lines if line is not None and _plain(line[1]) == _plain(module)}
    if "server" in extras:
        return f"pip install '{PACKAGE}[server]'"
    if extras & {"engines", "gpu"}:
        return f"pip install '{PACKAGE}[cpu]', or [gpu] beside an NVIDIA GPU"
    return f"pip install '{PACKAGE}[{min(extras)}]'" if extras else ""


def _requirements() -> Sequence[str]:
    metadata = importlib.import_module("importlib.metadata")  # 0.1 s, which commands save if no module is missing
    try:
        return metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:  # run from its folder, without an installation
        return ()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.partition(".")[0].lower())
