"""The tables of a recipe, and sections that read rows, made from the declarations of stages and groups.

An input names a step, a part of `prepare_data` (`base`, `prompts`, ...), an artifact of the store by its digest
(`store:3fa9c1d2`) or the registered `champion`. Neither `stage` nor the names enter a key: the digests of the inputs do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    SerializationInfo,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    create_model,
)

from pipelines.flows import groups  # noqa: F401  # declares the groups
from pipelines.flows.nodes import GROUPS, PARTS, Node
from pipelines.flows.sections import DistillationConfig, OfflineDPOConfig, PolicyOptimizationConfig, RewardModelSection
from rlhf_core.by_path import is_path, named
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from rlhf_core.types import DemonstrationsRef, PreferencesRef, PromptsRef, StepsRef
from stages.declaration import Input, Stage
from stages.mix import MixConfig
from stages.process_reward_model import ProcessRewardModelConfig
from stages.sft import SFTConfig
from stages.table import STAGES

Name: TypeAlias = Annotated[str, OPERATIONAL]
"""The name of an input; "" for the default that the text of its field describes."""
StepName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]*$")]


class AllRounds(Config):
    """The result of `start`, and the results of a step in all rounds so far."""

    all: str
    """Name of the step."""


def check_tables(value: Any) -> Any:
    """The value of an input that takes several tables. Raises ValueError for a value of another kind.

    >>> check_tables({"pairs": 2.0, "previous": {"pairs": 1.0}})  # in TOML `{pairs = 2.0, previous.pairs = 1.0}`
    {'pairs': 2.0, 'previous.pairs': 1.0}
    """
    if isinstance(value, Mapping) and set(value) != {"all"}:
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                below = {f"{name}.{part}": share for part, share in inner.items()}
                return check_tables({**{key: one for key, one in value.items() if key != name}, **below})
        for name, share in value.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise ValueError(f"{name} = {share!r}: must be a number, the share of this table")
    elif not isinstance(value, (str, list, tuple, Mapping, AllRounds)):
        raise ValueError('must be a name, a list of names, a table of shares, or {all = "STEP"} in rounds')
    return value


TableNames: TypeAlias = Annotated[
    str | tuple[str, ...] | dict[str, float] | AllRounds, BeforeValidator(check_tables), OPERATIONAL
]
"""A table of rows: one name, a list of names for all rows of several, their shares, or the tables of all rounds."""
Names: TypeAlias = Annotated[
    tuple[str, ...] | AllRounds | dict[str, str], Field(union_mode="left_to_right"), OPERATIONAL
]
"""Several inputs: a list of names, a table of names by the name that the stage uses, or the results of all rounds."""
Pool: TypeAlias = Annotated[str | Names, Field(union_mode="left_to_right"), OPERATIONAL]
"""Rollouts of one policy, or of several."""
TABLES = (DemonstrationsRef, PreferencesRef, PromptsRef, StepsRef)
MIXED = ("sft", "reward_model", "process_reward_model", "dpo", "distill", "generate", "synthesize", "ppo")
"""Stages whose rows may come from several tables."""
ROW_OPTIONS = ("sources", "mixture", "stopping_strategy", "chat_template", "chat_template_kwargs")
"""Options of `mix` that the step has whose rows they choose or render."""
NOT_STEPS = ("publish", "report_suites")
"""Stages that a profile configures elsewhere."""
DERIVED = {
    "generate": ("asked",),
    "distill": ("teachers",),
    "ppo": ("teachers",),
    "merge": ("policies",),
    "select": ("pool",),
    "prepare_data": ("suites",),
}
"""Inputs that follow from the options: `teachers` and `weights` name policies, several `rollouts` are a pool."""
SECTIONS: Mapping[str, type[Config]] = {"reward_model": RewardModelSection}
ABOUT = {
    "reference": "The reference policy; if empty, the policy that training starts from.",
    "reward_models": "The reward models; if empty, those that the terms of `rewards` name.",
    "critic": "The policy or reward model whose weights the value model starts from; if empty, a reward model, or else the policy.",
    "teacher": "The teacher, if there are no `teachers` with weights; one or the other.",
    "reward_start": "The policy whose weights the reward models start from; if empty, the first policy.",
    "first_reward_model": "The reward model of the first round.",
}


def tables_read(node: Node) -> list[str]:
    """The inputs of a node that may be several tables of rows."""
    if node.stage not in (*MIXED, *GROUPS):
        return []
    return [name for name, kind in node.kinds.items() if issubclass(kind, TABLES)]


def table_inputs(stage: Stage[..., Any]) -> Iterator[tuple[str, Input]]:
    """Yield the inputs of a stage that a table of a recipe names."""
    for name, row in stage.inputs.items():
        if name not in DERIVED.get(stage.name, ()):
            yield name, row


def field_of(stage: str, name: str, row: Input) -> tuple[Any, Any]:
    """The type and the default of an input in a table of a recipe."""
    about = ABOUT.get(name)
    if (stage, name) == ("select", "rollouts"):
        return Pool, ...
    if row.many:
        return (TableNames, ...) if stage == "mix" else (Names, Field((), description=about))
    kind: Any = TableNames if stage in MIXED and issubclass(row.kind, TABLES) else Name
    part = str(row.start).removeprefix("prepare_data.")
    default = row.default or (part if part in PARTS and issubclass(row.kind, TABLES) else "")
    if default:
        return kind, Field(default, description=about)
    if row.optional or row.instead or get_when(row):
        return kind, added_option("", description=about) if name == "critic" else Field("", description=about)
    return kind, ...


def get_when(row: Input) -> bool:
    """True if only some options read the input."""
    return row.when is not Input.__dataclass_fields__["when"].default


def mix_fields() -> dict[str, Any]:
    """The options that choose rows, of every stage that reads a table."""
    known = MixConfig.model_fields
    return {
        name: (Annotated[known[name].annotation, OPERATIONAL], added_option(known[name].default))
        for name in ROW_OPTIONS
    }


def stage_tables(stage: Stage[..., Any]) -> Iterator[type[Config]]:
    """Yield the classes of a stage's tables, several if its options have a `type`."""
    for options in (SECTIONS[stage.name],) if stage.name in SECTIONS else stage.configs:
        known = options.model_fields
        inputs = {name: field_of(stage.name, name, row) for name, row in table_inputs(stage) if name not in known}
        rows = {name: field for name, field in mix_fields().items() if stage.name in MIXED and name not in known}
        yield recipe_table(stage.name, options, inputs | rows, stage.about)


def group_table(name: str) -> type[Config]:
    """The class of a group's tables."""
    (options,) = [kind for argument, kind in GROUPS[name].nodes.__annotations__.items() if argument == "config"]
    fields: dict[str, Any] = {}
    for argument in GROUPS[name].kinds:
        required = argument == "policy"
        default = argument if argument in PARTS else {"first_reward_model": "reward_model"}.get(argument, "")
        many = argument == "reward_models"
        given = Field(() if many else default, description=ABOUT.get(argument))
        one = TableNames if issubclass(GROUPS[name].kinds[argument], TABLES) else Name
        fields[argument] = (Names if many else one, ... if required else given)
    return recipe_table(name, options, fields | mix_fields(), GROUPS[name].nodes.__doc__ or "")


def recipe_table(stage: str, options: type[Config], fields: Mapping[str, Any], about: str) -> type[Config]:
    """A class of tables `[recipe.NAME]`: the options, the stage, and the names of the inputs."""
    kind: Any = (Annotated[Literal[stage], OPERATIONAL], ...)  # type: ignore[valid-type]
    title = f"{options.__name__.removesuffix('Config').removesuffix('Section')}Step"
    if is_path(stage):
        title = f"{title}_{re.sub(r'[^A-Za-z0-9]', '_', stage)}"  # ours keep their names
    return table_class(title, options, {"stage": kind, **fields}, about)


def table_class(title: str, options: type[Config], fields: Mapping[str, Any], about: str) -> type[Config]:
    """A class with the fields of `options` and further ones."""
    made: type[Config] = create_model(title, __base__=options, __doc__=about, __module__=__name__, **fields)
    made.__annotations__ = {}  # it has no source whose texts describe the fields
    globals()[title] = made  # where pickle looks for a class
    return made


def section_table(title: str, stage: Stage[..., Any], options: type[Config]) -> type[Config]:
    """The class of a section: its options, and the tables whose rows it reads.

    Its other inputs follow the lifecycle.
    """
    read = {
        name: field_of(stage.name, name, row)
        for name, row in table_inputs(stage)
        if issubclass(row.kind, TABLES) and name not in options.model_fields
    }
    fields = {name: (kind, added_option(given.default)) for name, (kind, given) in read.items()}
    rows = {name: field for name, field in mix_fields().items() if name not in options.model_fields}
    return table_class(title, options, fields | rows, options.__doc__ or "")


def recipe_tables() -> Any:
    """The union of the tables of all stages and groups, chosen by `stage` and, in some stages, by `type`."""
    kinds = [union(stage_tables(stage), "type") for name, stage in STAGES.items() if name not in NOT_STEPS]
    return union([*kinds, *map(group_table, GROUPS)], "stage")


def union(kinds: Iterable[Any], tag: str) -> Any:
    """The union of classes that differ by the option `tag`."""
    found = list(kinds)
    return Annotated[reduce(or_, found), Field(discriminator=tag)] if len(found) > 1 else found[0]


def own_stage(path: str) -> Stage[..., Any]:
    """The stage that a profile names by path, which is then among `STAGES`. Raises ValueError if it is none."""
    found = named(path)
    if not isinstance(found, Stage):
        rule = "must be a declaration with `stages.declaration.stage`; see docs/add_a_stage.md"
        raise ValueError(f"stage = {path!r}: {rule}")
    if found.name != path:
        raise ValueError(f"stage = {path!r}: is declared as {found.name}; write this path")
    STAGES[path] = found
    return found


@cache
def own_tables(path: str) -> TypeAdapter[Any]:
    """The validator for tables of a stage that is named by path."""
    return TypeAdapter(union(stage_tables(own_stage(path)), "type"))


def read_step(table: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Read a table of a recipe: by the declaration that it names, or as a built-in stage or group."""
    if isinstance(table, Mapping) and is_path(table.get("stage")):
        return own_tables(table["stage"]).validate_python(table)
    return table if isinstance(table, Config) and is_path(getattr(table, "stage", "")) else handler(table)


def write_step(step: Any, handler: Any, info: SerializationInfo) -> Any:
    if is_path(step.stage):
        return step.model_dump(mode=info.mode, exclude_none=info.exclude_none)
    return handler(step)


if TYPE_CHECKING:
    RecipeStep: TypeAlias = Any
    SFTSection: TypeAlias = SFTConfig
    RewardModelsSection: TypeAlias = RewardModelSection
    ProcessRewardModelSection: TypeAlias = ProcessRewardModelConfig
    DPOSection: TypeAlias = OfflineDPOConfig
    PPOSection: TypeAlias = PolicyOptimizationConfig
    DistillationSection: TypeAlias = DistillationConfig
else:
    RecipeStep = Annotated[recipe_tables(), WrapValidator(read_step), WrapSerializer(write_step)]
    SFTSection = section_table("SFTSection", STAGES["sft"], SFTConfig)
    RewardModelsSection = section_table("RewardModelsSection", STAGES["reward_model"], RewardModelSection)
    ProcessRewardModelSection = section_table(
        "ProcessRewardModelSection", STAGES["process_reward_model"], ProcessRewardModelConfig
    )
    DPOSection = section_table("DPOSection", STAGES["dpo"], OfflineDPOConfig)
    PPOSection = section_table("PPOSection", STAGES["ppo"], PolicyOptimizationConfig)
    DistillationSection = section_table("DistillationSection", STAGES["distill"], DistillationConfig)


class RoundsConfig(Config):
    """Steps that are repeated, each round on the results of the round before.

    `previous.NAME` is the step NAME of the round before, in the first round `start.NAME`. `{all = "NAME"}` are `start.NAME`
    and the steps NAME of all rounds up to the one before.
    """

    count: int = Field(2, ge=1)
    """Number of rounds."""
    start: dict[StepName, str] = {}
    """Inputs of the first round, by the name of the step that makes them in later rounds."""
    steps: dict[StepName, RecipeStep]
    """Steps of a round, as in `[recipe.NAME]`."""
