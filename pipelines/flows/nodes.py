"""The graph of a profile as data: nodes, each a stage with its options and the names of its inputs.

A table of a profile is read as one node. If its stage is a group (`rejection_sampling`, `online`), the node is replaced by
the nodes of the group before anything runs (`pipelines.flows.groups`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import get_annotations
from typing import Any, TypeAlias, TypeVar, cast, get_args

from rlhf_core.config.rewards import GenerativeReward, RewardsConfig, Term, models_of
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import Config
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    GenerationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    RewardModelRef,
    StepsRef,
)
from stages.checkpoint import CheckpointConfig
from stages.mix import MixConfig
from stages.select import Pairs, PromptsInBand
from stages.synthesize import SynthesizeConfig
from stages.table import STAGES

R = TypeVar("R", bound=ArtifactRef)
Names: TypeAlias = str | Mapping[str, str]
"""The name of an input, or several by the name that the stage uses."""

PARTS: Mapping[str, type[ArtifactRef]] = {
    "base": PolicyRef,
    "demonstrations": DemonstrationsRef,
    "preferences": PreferencesRef,
    "prompts": PromptsRef,
    "eval_prompts": PromptsRef,
    "steps": StepsRef,
}
"""The parts of the prepared data."""


SYNTHESIZED: Mapping[str, type[ArtifactRef]] = {
    "demonstrations": DemonstrationsRef,
    "prompts": PromptsRef,
    "pairs": PreferencesRef,
    "generations": GenerationsRef,
}
"""The artifact of a synthesis, by its option `make`."""


@dataclass(frozen=True)
class Node:
    """One stage, or one group of stages, with its options and the names of its inputs."""

    label: str
    stage: str
    config: Config
    inputs: Mapping[str, Names] = field(default_factory=dict)
    key: str = ""
    """Key of the table that configures the node; "" for a section with the name of the label."""
    names: tuple[str, ...] = ()
    """Further names under which other nodes find the result."""
    seed: int = 0
    """Added to the seed of the run."""
    group: str = ""
    """Label of the group that Prefect's graph shows in place of the node."""

    @property
    def path(self) -> str:
        """The key of the table that configures the node."""
        return self.key or self.label

    @property
    def kinds(self) -> Mapping[str, type[ArtifactRef]]:
        """The kind of artifact of each input."""
        if self.stage in GROUPS:
            return GROUPS[self.stage].kinds
        return {name: row.kind for name, row in STAGES[self.stage].inputs.items()}

    def kind(self, name: str, read: str, declared: type[R]) -> type[R]:
        """The kind of artifact that the input `name` needs of `read`: a policy for a reward that asks one."""
        if self.stage == "mix" and isinstance(self.config, MixConfig):
            return cast(type[R], PARTS[self.config.kind])
        names = self.inputs[name]
        if name != "reward_models" or not isinstance(names, Mapping):
            return declared
        asked = {names.get(term.model) for term in terms_in(self.config) if isinstance(term, GenerativeReward)}
        return cast(type[R], PolicyRef if read in asked else RewardModelRef)

    def option(self, name: str, read: str) -> str:
        """The key by which a profile gives `read` for the input `name`."""
        below = {"pool": "rollouts", "policies": f"weights.{read}", "teachers": f"teachers.{read}"}.get(name, name)
        below = f"distill.{below}" if name == "teachers" and self.stage == "ppo" else below
        return self.path if self.mixes_input else f"{self.path}.{below}"  # the table of a mix is its step's

    @property
    def output(self) -> type[ArtifactRef]:
        """The kind of artifact that the node makes."""
        if self.stage in GROUPS:
            return PolicyRef
        match self.config:
            case Pairs():
                return PreferencesRef
            case PromptsInBand():
                return PromptsRef
            case SynthesizeConfig():
                return SYNTHESIZED[self.config.make]
            case MixConfig():
                return PARTS[self.config.kind]
        if self.stage == "condition" and self.inputs.get("prompts"):
            return PromptsRef
        declared = STAGES[self.stage].output
        return DemonstrationsRef if declared is ArtifactRef else declared

    def kind_of(self, name: str) -> type[ArtifactRef]:
        """The kind of artifact of a name in `made`: a step that prepares data makes several kinds."""
        return PARTS.get(prepared_part(name)[1], self.output) if self.stage == "prepare_data" else self.output

    @property
    def made(self) -> list[str]:
        """All names under which other nodes find the results."""
        if self.stage in GROUPS:
            policies = GROUPS[self.stage].policies(self.label, self.config)
            return list(dict.fromkeys([*policies, *(self.names if self.label in policies else ())]))
        if self.stage == "prepare_data":
            names = self.names or (self.label,)
            parts = [f"{name}.{part}" for name in names for part in PARTS]
            return [*names, *parts]
        if members := self.members:
            return list(dict.fromkeys([*members, self.label, *self.names]))
        names = self.names or (self.label,)
        return [*(f"{name}_{step}" for step in self.exported for name in names), *names]

    @property
    def shown(self) -> list[str]:
        """The names by which policies and reward models are compared: of rounds, only the last round's."""
        return [name for name in self.made if not (self.key.startswith("rounds.") and "/round_" in name)]

    @property
    def mixes_input(self) -> bool:
        """True for a mix that is an input of one step, whose table has its options."""
        return self.stage == "mix" and self.key.endswith(tuple(f".{part}" for part in PARTS))

    @property
    def members(self) -> Mapping[str, Config]:
        """The options of each reward model of an ensemble, by label."""
        ensemble = getattr(self.config, "ensemble", None)
        return self.config.stage_configs(self.label) if ensemble else {}  # type: ignore[attr-defined]

    @property
    def exported(self) -> tuple[int, ...]:
        """The steps after which a training exports its policy on its way, as `NAME_STEP`."""
        steps: tuple[int, ...] = getattr(self.config, "exported_steps", ())
        return steps

    @property
    def may_be_empty(self) -> tuple[str, ...]:
        """The inputs that the node can do without."""
        if self.stage in GROUPS:
            return ("reward_models", *GROUPS[self.stage].optional(self.config))
        rows = STAGES[self.stage].inputs
        found = ("teacher", "teachers", "reward_models", *(name for name, row in rows.items() if row.optional))
        return found if self.inputs.get("pool") else tuple(name for name in found if name != "rollouts")

    def reads(self) -> dict[str, list[str]]:
        """The names that each input reads, without inputs that the configuration does not use."""
        names = {name: listed(value) for name, value in self.inputs.items()}
        if self.stage in GROUPS:
            return names
        rows = STAGES[self.stage].inputs
        used = {name if row.when(self.config) else row.instead for name, row in rows.items()}
        return {name: found for name, found in names.items() if name in used}

    def reads_names(self) -> dict[str, None]:
        """All names that the node reads, each once."""
        return dict.fromkeys(name for names in self.reads().values() for name in names)


def rollouts_read(node: Node) -> list[str]:
    """The rollouts of a selection, of one policy or of several."""
    return [name for kind in ("rollouts", "pool") for name in listed(node.inputs.get(kind, ""))]


def listed(names: Names) -> list[str]:
    """The names of an input as a list, without empty ones."""
    if isinstance(names, str):
        return [names] if names else []
    return list(names.values())


# ---------------------------------------------------------------- groups


@dataclass(frozen=True)
class Group:
    """Several stages under one name, each of which ends with a policy."""

    nodes: Callable[..., Iterator[Node]]
    """Yields the nodes for a label, the options, and the names of the inputs."""
    policies: Callable[[str, Any], list[str]]
    """The names of its policies, for a label and the options."""
    optional: Callable[[Any], tuple[str, ...]]
    """Inputs that it can do without under some options."""

    @cached_property
    def kinds(self) -> Mapping[str, type[ArtifactRef]]:
        """The kind of each input, from the annotations of the function."""
        hints = get_annotations(self.nodes, eval_str=True)
        return {name: get_args(hint)[1] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


GROUPS: dict[str, Group] = {}
"""All groups by name."""


def group(
    name: str,
    *,
    policies: Callable[[str, Any], list[str]] = lambda label, config: [label],
    optional: Callable[[Any], tuple[str, ...]] = lambda config: (),
) -> Callable[[Callable[..., Iterator[Node]]], Callable[..., Iterator[Node]]]:
    """Declare a function that yields nodes as a group that `[recipe.NAME] stage = "..."` can name."""

    def declared(nodes: Callable[..., Iterator[Node]]) -> Callable[..., Iterator[Node]]:
        GROUPS[name] = Group(nodes, policies, optional)
        return nodes

    return declared


def expand(node: Node) -> Iterator[Node]:
    """Yield the stages of a node in order: stages of a group, members of an ensemble, and exported policies."""
    if node.stage in GROUPS:
        for one in GROUPS[node.stage].nodes(node.label, node.config, **node.inputs):
            below = re.sub(r"/round_\d+", "", one.label.removeprefix(node.label)).replace("/", ".")
            names = (*one.names, *(node.names if node.label in one.names else ()))
            yield replace(one, key=node.path + below, seed=node.seed + one.seed, names=names)
        return
    for number, (label, config) in enumerate(node.members.items()):
        names = (node.label, *node.names) if number == 0 else ()  # the first member serves as the only one
        yield replace(node, label=label, config=config, names=names, key=f"{node.path}.{number + 1}")
    if not node.members:
        yield node
    for step in node.exported:
        names = tuple(f"{name}_{step}" for name in node.names)
        checkpoint = CheckpointConfig(step=step)
        yield Node(f"{node.label}_{step}", "checkpoint", checkpoint, {"policy": node.label}, key=node.path, names=names)


# ---------------------------------------------------------------- rewards


def rewards_in(config: Config) -> dict[str, RewardsConfig]:
    """The rewards of a node by key, including the rewards of its scoring, optimization and independent evaluation."""
    scoring, optimized, evaluated = (getattr(config, name, None) for name in ("score", "ppo", "evaluate"))
    found = {
        "rewards": getattr(config, "rewards", None),
        "score.rewards": getattr(scoring, "rewards", None),
        "ppo.rewards": getattr(optimized, "rewards", None),
        "evaluate.independent": getattr(evaluated, "independent", None),
    }
    return {key: rewards for key, rewards in found.items() if isinstance(rewards, RewardsConfig)}


def terms_in(config: Config) -> list[Term]:
    """All terms in the rewards of a node."""
    return [term for rewards in rewards_in(config).values() for term in rewards.terms.values()]


def models_in(config: Config) -> list[str]:
    """The reward models that the terms of a node name, each once."""
    return list(dict.fromkeys(model for term in terms_in(config) for _, model in models_of(term)))


# ---------------------------------------------------------------- prepared data


def prepared_part(name: str) -> tuple[str, str]:
    """The label and the part of prepared data that a name means.

    >>> prepared_part("prompts"), prepared_part("more.prompts")
    (('prepare_data', 'prompts'), ('more', 'prompts'))
    """
    label, _, part = name.rpartition(".")
    return label or "prepare_data", part


def part(data: PreparedDataRef, name: str, kind: type[R], label: str = "prepare_data") -> R:
    """An artifact of the prepared data by name. Raises ConfigError if this data has none."""
    ref = getattr(data, name)
    if not isinstance(ref, kind):
        raise ConfigError(
            f"{label}.{name}: has no rows, and a later stage reads them; "
            f"give {name} a larger share in `use` of a source, fix what drops its rows (listed in validation.json of {label}), "
            "or remove the section that reads it from the profile"
        )
    return ref
