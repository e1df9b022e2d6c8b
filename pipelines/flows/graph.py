"""Run declared stages. A pipeline is a function over `Stages`, which both runs and plans call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from pydantic import BaseModel

from pipelines.flows.inputs import Opponents
from pipelines.flows.nodes import rewards_in
from pipelines.flows.trial import try_custom_functions
from pipelines.services.home import Home
from pipelines.services.user_servers import registry
from rlhf_core.by_path import is_path
from rlhf_core.config.agents import AgentConfig, AgentsBySource, EpisodeLimits
from rlhf_core.config.engines import BaseSamplerConfig, check_lora, check_lora_sync
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.model import check_reward_models
from rlhf_core.schema.base import Config, keyed
from rlhf_core.stage.key import StageInput, StageSpec
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.types import ArtifactRef, Prompt, PromptsRef
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.sources import is_ours
from stages.declaration import Input, Stage
from stages.publish import GateNote

P = ParamSpec("P")
R = TypeVar("R", bound=ArtifactRef)
S = TypeVar("S", bound=ArtifactRef)
T = TypeVar("T")
GivenInput: TypeAlias = ArtifactRef | Mapping[str, ArtifactRef] | None
"""An input that a pipeline passes to a stage; None if it is left out."""

FUNCTION_FIELDS = ("function", "gold")


class RunStage(Protocol):
    """A function that returns a stage's artifact: from the store, by running it, or (in a plan) as a placeholder."""

    def __call__(self, spec: StageSpec, kind: type[R]) -> R: ...


class RunGroup(Protocol):
    """A function that runs `body`, whose stages a graph shows as one node.

    `after` lists the artifacts that it reads.
    """

    def __call__(self, label: str, body: Callable[[], T], *, after: Iterable[ArtifactRef]) -> T: ...


def ungrouped(label: str, body: Callable[[], T], *, after: Iterable[ArtifactRef]) -> T:
    """Run `body` without a group, where no graph is shown."""
    return body()


class FindOutside(Protocol):
    """A function that returns an artifact from outside the run: `store:DIGEST`, `champion`. `key` is named in errors."""

    def __call__(self, key: str, name: str, kind: type[R]) -> R: ...


def nothing_outside(key: str, name: str, kind: type[R]) -> R:
    """Raise ConfigError: no store is open to look into."""
    raise ConfigError(key, name, "there is no store to look it up in", "name a step")


def no_prompts(ref: PromptsRef) -> Sequence[Prompt]:
    """No prompts: no store is open to read them from."""
    return ()


@dataclass(frozen=True)
class Stages:
    """Runs declared stages. `label` names the node in tables, graphs and the tracker, not in the key."""

    run_stage: RunStage
    seed: int
    runtime: RuntimeConfig
    champion: Opponents | None = None
    """The champion of the registry and the one before, if a policy has to beat it."""
    decisions: Callable[[], tuple[GateNote, ...]] = tuple
    """Returns the verdicts of the gates so far, for the model card."""
    group: RunGroup = ungrouped
    path: str = ""
    """Key of the table that configures the next stage, for errors; if empty, the label has it."""
    outside: FindOutside = nothing_outside
    prompts: Callable[[PromptsRef], Sequence[Prompt]] = no_prompts
    """Returns the prompts of an existing artifact; empty for an artifact that has yet to be made."""

    def run(self, stage: Stage[P, R], label: str, *config: P.args, **given: P.kwargs) -> R:
        """Run a stage with its configuration and its inputs as declared, and return its artifact.

        Inputs that the stage does not read under this configuration are left out. Raises TypeError for inputs that the
        stage does not take, and ConfigError, before any stage runs, if something that the configuration needs is missing.

        >>> stages.run(sft, "sft", config, policy=base, demonstrations=rows)   # doctest: +SKIP
        """
        return self.run_as(stage.output, stage, label, *config, **given)

    def run_as(self, kind: type[S], stage: Stage[P, Any], label: str, *args: P.args, **given: P.kwargs) -> S:
        """Run a stage as `run` does, where the type of its artifact depends on the configuration or the inputs."""
        (config,) = args
        assert isinstance(config, Config)
        path = self.path or label.replace("/", ".")
        inputs = inputs_of(stage, config, cast(dict[str, GivenInput], given))
        files = {} if stage.files is None else dict(stage.files(config))
        self._check_reward_models(path, config, inputs)
        self._check_episodes(path, config)
        self._check_lora(path, stage, config)
        if getattr(config, "router_replay", False):
            self.runtime.check_router_replay(f"{path}.router_replay")
        files |= agent_digests(config, path)
        configured = keyed(self.runtime)
        engines: dict[str, Any] = {engine: configured[engine] for engine in stage.engines if engine != "registry"}
        if files:
            engines["files"] = files
        if "sampler" in engines and (code := own_sampler_code(self.runtime.sampler)):
            engines["sampler_code"] = code
        if "registry" in stage.engines:
            engines["registry"] = registry(Home.here())
        if configured["trainer"]["dtype"] == "bfloat16" and stage.scores(config):
            engines["scalar_heads"] = "float32"  # earlier results were computed in bfloat16 throughout
        functions = reward_functions(config, path)
        for key, function in functions.items():  # now, not after earlier stages have run for hours
            user_code_digest(function, key=key)
        try_custom_functions(config, path)
        callables = tuple(dict.fromkeys(functions.values()))
        spec = stage.spec(config, inputs, label=label, seed=self.seed, engines=engines, callables=callables)
        return self.run_stage(spec, kind)

    def _check_reward_models(self, path: str, config: Any, inputs: Mapping[str, Any]) -> None:
        """Raise ConfigError for a missing reward model now, not after earlier stages have run for hours."""
        for key, rewards in rewards_in(config).items() if "reward_models" in inputs else ():
            try:
                check_reward_models(rewards, inputs["reward_models"])
            except ConfigError as error:
                raise ConfigError(f"{path}.{key}.{str(error).removeprefix('rewards.')}") from None

    def _check_lora(self, path: str, stage: Stage[..., Any], config: Any) -> None:
        """Raise ConfigError for adapters that cannot be trained, or that cannot be sent alone to a sampler that needs that."""
        check_lora(getattr(config, "lora", None), self.runtime.of("policy").trainer, key=f"{path}.lora")
        samples = "sampler" in stage.engines and getattr(config, "on_policy", True)
        if not samples or not hasattr(config, "lora") or not self.runtime.sampler.needs().adapters:
            return
        check_lora_sync(config.lora, key=f"{path}.lora")
        most = getattr(self.runtime.sampler, "max_lora_rank", None)
        if most is not None and config.lora.rank > most:
            rule, remedy = f"runtime.sampler.max_lora_rank is {most}", "raise that, or lower this"
            raise ConfigError(f"{path}.lora.rank", config.lora.rank, rule, remedy)

    def _check_episodes(self, path: str, config: Any) -> None:
        """Raise ConfigError for episodes that may exceed the sampler's length: the first such one would end the run."""
        longest: int | None = getattr(self.runtime.sampler, "max_model_len", None)
        for key, agent in agents_of(config).items():
            if longest is not None and agent.max_episode_tokens > longest:
                rule = f"the sampler takes at most {longest} tokens"
                remedy = "lower it or raise runtime.sampler.max_model_len"
                raise ConfigError(f"{path}.{key}.max_episode_tokens", agent.max_episode_tokens, rule, remedy)


def inputs_of(stage: Stage[..., Any], config: Config, given: Mapping[str, GivenInput]) -> dict[str, StageInput]:
    """The `given` inputs that the stage reads under `config`. Raises TypeError if it has no such input."""
    unknown = given.keys() - stage.inputs.keys()
    if unknown:
        raise TypeError(f"{stage.name}: has no input {', '.join(sorted(unknown))}")
    inputs: dict[str, StageInput] = {}
    for name, row in stage.inputs.items():
        reads = stage.reads_input(name, config)
        value = given.get(name if reads else row.instead)
        if value is not None:
            inputs[name] = _checked(stage.name, name, row, value)
        elif reads and not row.optional:
            raise TypeError(f"{stage.name}: the input {name} is missing")
    return inputs


def _checked(stage: str, name: str, row: Input, value: ArtifactRef | Mapping[str, ArtifactRef]) -> StageInput:
    refs = [value] if isinstance(value, ArtifactRef) else list(value.values())
    if isinstance(value, ArtifactRef) == row.many or not all(isinstance(ref, row.kind) for ref in refs):
        kind = f"a table of {row.kind.__name__}" if row.many else row.kind.__name__
        raise TypeError(f"{stage}: the input {name} must be {kind}, not {value!r}")
    return value if isinstance(value, ArtifactRef) else dict(value)


def own_sampler_code(sampler: BaseSamplerConfig) -> dict[str, str]:
    """Digests of the user's code of a sampler that is named by path; {} for ours, whose changes are noted."""
    paths = (sampler.type, f"{sampler.module}:ENGINE") if is_path(sampler.type) else ()
    return {path: user_code_digest(path, key="runtime.sampler.type") for path in paths if not is_ours(path)}


def agents_of(config: Any) -> dict[str, AgentConfig]:
    """Agents of a stage by their keys in its configuration."""
    return config.by_key if isinstance(config, AgentsBySource) else {}


def agent_digests(config: Any, key: str) -> dict[str, str]:
    """Digests of the files that an agent's behavior depends on. Raises ConfigError if one is missing."""
    files = {name: f"{key}.{part}" for part, agent in agents_of(config).items() for name in agent.read_files()}
    for name, part in files.items():
        if not Path(name).is_file():
            raise ConfigError(part, name, f"there is no such file in {Path.cwd()}", "fix the path")
    return {name: hash_file(Path(name)) for name in files}


def reward_functions(config: Any, key: str) -> dict[str, str]:
    """Dotted key -> function that a configuration names in a field called `function` or `gold`."""
    found: dict[str, str] = {}
    if isinstance(config, EpisodeLimits):
        for function in config.callables():
            found[f"{key}.{_field_with(config, function)}"] = function
    elif isinstance(config, BaseModel):
        for name in type(config).model_fields:
            value = getattr(config, name)
            if name in FUNCTION_FIELDS and isinstance(value, str):
                found |= {f"{key}.{name}": value} if value else {}
            else:
                found |= reward_functions(value, f"{key}.{name}")
    elif isinstance(config, Mapping):
        for name, value in config.items():
            found |= reward_functions(value, f"{key}.{name}")
    elif isinstance(config, (list, tuple)):
        for index, value in enumerate(config):
            found |= reward_functions(value, f"{key}[{index}]")
    return found


def _field_with(agent: EpisodeLimits, function: str) -> str:
    """The field of an agent that names a function, or the file of one: `environment`, `tools[1]`, `file`."""
    for name, value in agent:
        if isinstance(value, tuple) and function in value:
            return f"{name}[{value.index(function)}]"
        if value and value in (function, function.rpartition(":")[0]):
            return name
    return function
