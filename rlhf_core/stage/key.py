"""Compute the key of a stage: one sha256 over everything that decides its result, and nothing else."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel

from rlhf_core.by_path import is_path
from rlhf_core.config.agent_modules import AGENT_MODULES
from rlhf_core.config.agents import AgentsBySource
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import Config, as_written, keyed
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.corrections import corrections
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import ArtifactRef
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.sources import code_of, is_ours, reached_from

KEY_SCHEMA = 1  # raised when keys are computed in another way: no result is found then

CodePolicy: TypeAlias = Literal["strict", "warn"]
StageInput: TypeAlias = ArtifactRef | tuple[ArtifactRef, ...] | dict[str, ArtifactRef]


@dataclass(frozen=True, slots=True)
class Strictness:
    """The optional parts of a stage's key; the default adds none.

    >>> Strictness(code=True)
    Strictness(code=True, env=False)
    """

    code: bool = False
    """Whether every change of code enters the key, also in stages that normally only warn."""
    env: bool = False
    """Whether the versions of Python and of the packages that compute enter the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage whose inputs exist, ready to be decided on and run.

    `name` and `module` identify it (`ppo`, `stages.ppo.run`). `version` and `code` come from its declaration:
    with `code = "strict"` a change of the stage's code makes a new key, with `"warn"` it is only reported. `label` is
    the stage's name in the pipeline (`rejection_sampling/generate`); it does not enter the key, so two places can share
    one result. `inputs` become keyword arguments of the stage's `run`. `engines` holds the part of the runtime's
    configuration that changes results, {} for a stage without engines. `callables` are the user's functions,
    `module:function` or `file.py:function`; their code, and all user modules that it reaches, enter the key.
    `pipeline` is the `name` of the profile, whose earlier stages explain a decision. Like the next three it does not
    enter the key: `project` is the profile's project, `cpus` and `gpus` are the resources of the stage, for the record.

    Raises ConfigError for an invalid `code`.
    """

    name: str
    module: str
    version: int
    code: CodePolicy
    config: Config
    inputs: dict[str, StageInput]
    seed: int
    label: str
    engines: dict[str, Any]
    callables: tuple[str, ...] = ()
    pipeline: str = ""
    project: str = ""
    cpus: float = 0.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.code not in get_args(CodePolicy):
            raise ConfigError(f"{self.name}.code", self.code, "must be 'strict' or 'warn'", "choose one")

    def refs(self) -> Iterator[ArtifactRef]:
        """Yield all input handles, in the order of their names."""
        return (ref for _, ref in self.named_refs())

    def named_refs(self) -> Iterator[tuple[str, ArtifactRef]]:
        """Yield all input handles with their names, in the order of these; `pool/sft` is an entry of a table."""
        for name, value in sorted(self.inputs.items()):
            if isinstance(value, ArtifactRef):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((name, ref) for ref in value)
            else:
                yield from ((f"{name}/{entry}", ref) for entry, ref in sorted(value.items()))


def user_functions(spec: StageSpec) -> dict[str, str]:
    """Hash each of the user's functions, including all user modules that it reaches."""
    return {name: user_code_digest(name) for name in spec.callables}


def key_payload(
    spec: StageSpec, *, strict_code: bool = False, functions: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Build the table whose canonical JSON is hashed to the key; `functions` gives their digests if already known.

    It contains the digest of the stage's code if the stage's `code` is "strict" or `strict_code` is set, and the corrected
    faults that earlier results of this configuration may have.
    """
    config, unnamed = _with_code(keyed(spec.config), user_functions(spec) if functions is None else functions)
    payload: dict[str, Any] = {
        "schema": KEY_SCHEMA,
        "stage": spec.name,
        "version": spec.version,
        "config": config,
        "inputs": {name: _digests(name, value) for name, value in spec.inputs.items()},
        "seed": spec.seed,
        "engines": _as_written(spec.engines),
        "callables": unnamed,
    }
    if corrected := corrections(spec.name, keyed(spec.config)):
        payload["corrections"] = corrected
    if strict_code or spec.code == "strict":
        payload["code"] = sha256_text(canonical_json(stage_code(spec)))
    return payload


def stage_code(spec: StageSpec) -> dict[str, str]:
    """Digests of the modules of ours that a stage runs: imports of its module, and modules that its options name.

    Raises ConfigError if a module is in a topic of `rlhf_contrib` that is not installed.
    """
    agents = spec.config.by_key.values() if isinstance(spec.config, AgentsBySource) else ()
    named = [AGENT_MODULES[agent.type] for agent in agents if agent.type in AGENT_MODULES]
    # Of a user's stage also the user's modules that it reaches.
    found = {} if is_ours(spec.module) else code_of(reached_from(spec.module), key="module")
    for module in (spec.module, *named, *_modules_of(spec.config)):
        found |= module_digests(module)
    if is_path(sampler := spec.engines.get("sampler", {}).get("type")):
        found |= module_digests(sampler.partition(":")[0])
    return dict(sorted(found.items()))


def _modules_of(config: BaseModel) -> Iterator[str]:
    """Yield the modules that the stage imports for tables of its configuration, whose classes name them in `module`."""
    if isinstance(module := getattr(type(config), "module", None), str):
        yield module
    for name in type(config).model_fields:
        value = getattr(config, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, BaseModel):
                yield from _modules_of(one)


def payload_key(payload: Mapping[str, Any]) -> str:
    """Hash a payload to its key: 64 hexadecimal digits."""
    return sha256_text(canonical_json(payload))


def stage_module(spec: StageSpec) -> ModuleType:
    """Import the module of the stage. Raises ConfigError if it has no `run`. Call it only to run the stage."""
    module = importlib.import_module(spec.module)
    if not hasattr(module, "run"):
        raise ConfigError("module", spec.module, "has no function `run`", "see docs/add_a_stage.md")
    return module


def _with_code(config: dict[str, Any], digests: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace functions in the configuration by their digests; also the digests of functions that it does not name.

    `my/file.py:reward` becomes `reward@<digest>`, so that the same file under another path is the same function.
    """
    digests = {as_written(spec): digest for spec, digest in digests.items()}
    named: set[str] = set()

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, str) and value in digests:
            named.add(value)
            return f"{value.rpartition(':')[2]}@{digests[value]}"
        return value

    config = replaced(config)
    return config, {spec: digest for spec, digest in digests.items() if spec not in named}


def _as_written(engines: Any) -> Any:
    """The table of engines with the names of files as the profile has them."""
    if isinstance(engines, dict):
        return {as_written(name): _as_written(value) for name, value in engines.items()}
    return engines


def _digests(name: str, value: StageInput) -> Any:
    if isinstance(value, ArtifactRef):
        return value.digest
    if isinstance(value, tuple) and all(isinstance(ref, ArtifactRef) for ref in value):
        return [ref.digest for ref in value]
    if isinstance(value, dict) and all(isinstance(ref, ArtifactRef) for ref in value.values()):
        return {label: ref.digest for label, ref in value.items()}
    raise ConfigError(f"inputs.{name}", value, "must be a handle, a tuple or a table of handles", "pass those")
