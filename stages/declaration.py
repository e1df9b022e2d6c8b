"""The declaration of a stage: a typed signature and the fields that its key, form and deployment are made from.

The package of a stage declares it. This module and `stages.measured` are not in the keys of strict stages, which import them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_type_hints

from rlhf_core.schema.base import Config
from rlhf_core.stage.key import CodePolicy, StageInput, StageSpec
from rlhf_core.types import ArtifactRef, ProcessRewardModelRef, RewardModelRef
from stages.measured import Numbers, Specs

P = ParamSpec("P")
R = TypeVar("R", bound=ArtifactRef)
Engine: TypeAlias = Literal["trainer", "sampler", "registry"]
"""Services that a stage uses: engines of the runtime, and the registry of models."""


def always(config: Any) -> bool:
    """True: the stage reads the input under every configuration."""
    return True


@dataclass(frozen=True, slots=True)
class From:
    """Start value of an input in its form, and the condition for reading it; annotates an argument of the declaration.

    `start` is the label of an artifact in the store, the first value of the field in Prefect's form; for a stage that
    takes a table of artifacts, several labels by name. The stage reads the input only if `when` holds for its
    configuration; otherwise the input named by `instead` is used, so unused inputs do not enter the key.
    """

    start: str | Mapping[str, str]
    when: Callable[[Any], bool] = always
    instead: str = ""
    default: str = ""
    """Default of the input in a table `[recipe.NAME]`, if it differs from the part of the data in `start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(From):
    """An input of a stage: a keyword argument of its `run`.

    An `optional` input may be left out; the rest is as in `From`.

    >>> from stages.sft import sft
    >>> sft.inputs["policy"].many, sft.inputs["policy"].start
    (False, 'prepare_data.base')
    """

    kind: type[ArtifactRef]
    optional: bool = False

    @property
    def many(self) -> bool:
        """Whether the input is a table of artifacts by name."""
        return not isinstance(self.start, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[P, R]):
    """The declaration of a stage.

    >>> from stages.sft import sft
    >>> sft.module, sft.engines
    ('stages.sft.run', ('trainer',))
    """

    name: str
    """Of the module in `stages`, of the flow in Prefect and, with dashes, of its deployment; the path of the declaration of a
    stage of another package."""
    module: str
    """Name of the module with `run`, which is imported only where the stage runs."""
    version: int
    """Part of the key; raised when the same configuration gives another result."""
    code: CodePolicy
    """Whether a change of the code makes a new key (`strict`: stages of seconds) or is only reported (`warn`)."""
    config: Any
    """The configuration: a class, or a union of classes discriminated by `type`."""
    inputs: Mapping[str, Input]
    output: type[R]
    """The kind of artifact; `ArtifactRef` where it depends on the configuration or the inputs."""
    engines: tuple[Engine, ...]
    """Engines that the stage leases; their configuration is part of its key."""
    section: str
    """Where a profile configures the stage alone, which fills its form in Prefect; "" if no profile does."""
    page: str
    """Its page in docs."""
    about: str
    """One sentence for the form in Prefect."""
    judges: tuple[str, ...]
    """Input that the stage's report judges, and the entry of that table: a gate after the stage holds it back, too."""
    metrics: Callable[[StageSpec, Specs], Numbers]
    """Returns the names of the metrics of its record and the numbers of its report, which gates and sweeps may name."""
    files: Callable[[Any], Mapping[str, str]] | None
    """Returns the digests of the user's files that a configuration names; they are part of the key."""

    @property
    def configs(self) -> tuple[type[Config], ...]:
        """The configuration classes of the stage.

        >>> from stages.select import select
        >>> [kind.__name__ for kind in select.configs]
        ['BestOfN', 'TopK', 'Threshold', 'Pairs', 'PromptsInBand']
        """
        return (self.config,) if isinstance(self.config, type) else get_args(get_args(self.config)[0])

    def reads_input(self, name: str, config: Config) -> bool:
        """Whether the stage reads the input `name` under this configuration."""
        return self.inputs[name].when(config)

    def inputs_read(self, config: Config) -> list[str]:
        """Names of the inputs that the stage reads under this configuration."""
        return [name for name in self.inputs if self.reads_input(name, config)]

    def scores(self, config: Config) -> bool:
        """Whether the stage computes rewards, whose heads stay float32 under a bfloat16 trainer."""
        read = self.inputs_read(config)
        kinds = {self.output, *(self.inputs[name].kind for name in read)}
        return "reward_models" in read or not kinds.isdisjoint({RewardModelRef, ProcessRewardModelRef})

    def spec(
        self,
        config: Config,
        inputs: dict[str, StageInput],
        *,
        label: str,
        seed: int,
        engines: dict[str, Any],
        callables: tuple[str, ...] = (),
    ) -> StageSpec:
        """Bind the stage to these inputs, ready for the decision whether to run it."""
        return StageSpec(
            name=self.name,
            module=self.module,
            version=self.version,
            code=self.code,
            config=config,
            inputs=inputs,
            seed=seed,
            label=label,
            engines=engines,
            callables=callables,
        )


def stage(
    *,
    version: int,
    code: CodePolicy,
    engines: tuple[Engine, ...] = (),
    page: str = "stages.md",
    metrics: Callable[[StageSpec, Specs], Numbers],
    section: str = "",
    judges: tuple[str, ...] = (),
    files: Callable[[Any], Mapping[str, str]] | None = None,
    module: str = "",
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Declare a stage from a signature, its docstring and these fields of `Stage`.

    A stage in `stages` has the name of its package. Elsewhere the name is the path of the declaration, which profiles
    use to refer to it. `module` contains `run`; the default is the module `run` of the package with the declaration.
    """

    def declared(signature: Callable[P, R]) -> Stage[P, R]:
        types = get_type_hints(signature, include_extras=True)
        config, output = types.pop("config"), types.pop("return")
        arguments = inspect.signature(signature).parameters
        package, name = signature.__module__, signature.__name__
        return Stage(
            name=name if package == f"stages.{name}" else f"{package}:{name}",
            module=module or f"{package}.run",
            version=version,
            code=code,
            config=config,
            inputs={name: _input(kind, arguments[name].default is None) for name, kind in types.items()},
            output=output,
            engines=engines,
            section=section,
            page=page,
            about=inspect.getdoc(signature) or "",
            judges=judges,
            metrics=metrics,
            files=files,
        )

    return declared


def _input(annotation: Any, may_be_left_out: bool) -> Input:
    """Parse the annotation of an argument: `Annotated[kind, From(...)]`; the kind may be a mapping or optional."""
    kind, given = get_args(annotation)
    if may_be_left_out:
        kind = next(one for one in get_args(kind) if one is not type(None))
    many = not isinstance(kind, type)
    return Input(
        kind=get_args(kind)[1] if many else kind,
        start=given.start,
        optional=may_be_left_out and given.when is always,
        when=given.when,
        instead=given.instead,
        default=given.default,
    )
