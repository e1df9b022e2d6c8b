"""The steps of a pipeline and their order: the sections of a profile, the tables `[recipe.NAME]`, and rounds of tables.

Each is read as a node (`pipelines.flows.nodes`) with its inputs by name. Inputs are named after other nodes, or after
parts of the prepared data. The order of tables in the file does not matter.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from pipelines.flows.checks import RESERVED, check
from pipelines.flows.nodes import GROUPS, PARTS, Names, Node, listed, models_in, terms_in
from pipelines.flows.sections import (
    ConditionalSFTConfig,
    IterativeDPOConfig,
    OnlineConfig,
    RejectionSamplingConfig,
)
from pipelines.flows.steps import (
    ROW_OPTIONS,
    TABLES,
    AllRounds,
    DistillationSection,
    DPOSection,
    PPOSection,
    ProcessRewardModelSection,
    RecipeStep,
    RewardModelsSection,
    RoundsConfig,
    SFTSection,
    StepName,
    tables_read,
)
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import GenerativeReward, ProcessRewardModelReward, RewardModelReward
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.config.teachers import TeacherOptions
from rlhf_core.errors import explain
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from rlhf_core.types import ArtifactRef, PolicyRef, RewardModelRef
from stages.import_policy import ImportPolicyConfig
from stages.import_reward_model import ImportRewardModelConfig
from stages.merge import MergeConfig
from stages.mix import MixConfig
from stages.prepare_data import PrepareDataConfig
from stages.table import STAGES

logger = logging.getLogger(__name__)

UNNAMED = tuple(term.model_fields["model"].default for term in (RewardModelReward, ProcessRewardModelReward))
"""Reward models of terms that name none."""
SHARED = ("model", "chat_template", "max_prompt_tokens", "max_tokens")
"""Options of `[prepare_data]` that steps with the stage `prepare_data` share unless they give them."""
PREVIOUS = "previous."
"""Begins the name of a step of the round before."""


class GraphConfig(Config):
    """The stages of a pipeline: the sections of a profile, and the tables of its recipe."""

    name: str = "rlhf"
    """Name of the run and of the MLflow experiment."""
    seed: int = Field(17, ge=0)
    store: Annotated[str, OPERATIONAL] = ""
    """Artifact store: a folder, or a bucket that several machines share (`s3://bucket/folder`, `gs://`, `az://`; docs/cluster.md).
    If empty, `store` in the state folder (`.rlhf`, or `RLHF_HOME`)."""
    runtime: RuntimeConfig = RuntimeConfig()
    prepare_data: PrepareDataConfig
    import_reward_model: ImportRewardModelConfig | None = None
    """An external reward model, used instead of a trained one."""
    sft: SFTSection | None = None
    reward_model: RewardModelsSection | None = None
    process_reward_model: ProcessRewardModelSection | None = None
    rejection_sampling: RejectionSamplingConfig | None = None
    conditional_sft: ConditionalSFTConfig | None = None
    dpo: DPOSection | None = None
    iterative_dpo: IterativeDPOConfig | None = None
    online: OnlineConfig | None = None
    ppo: PPOSection | None = None
    distill: DistillationSection | None = None
    recipe: dict[StepName, RecipeStep] = added_option({})
    """Steps by name, each a stage with its options and its inputs by name, in addition to the sections or instead of
    them (docs/recipes.md)."""
    rounds: dict[StepName, RoundsConfig] = added_option({})
    """Steps that are repeated, by the name of the rounds. `NAME.STEP` is the step of the last round (docs/recipes.md)."""

    @model_validator(mode="before")
    @classmethod
    def _share_model(cls, tree: Any) -> Any:
        """A step that prepares data has the model, the chat template and the limits of `[prepare_data]`."""
        if not isinstance(tree, Mapping) or not isinstance(tree.get("prepare_data"), Mapping):
            return tree
        shared = {name: value for name, value in tree["prepare_data"].items() if name in SHARED}

        def with_shared(table: Any) -> Any:
            """A table in which each step that prepares data, also in rounds, has the shared options."""
            if not isinstance(table, Mapping):
                return table
            given = shared if table.get("stage") == "prepare_data" else {}
            return {**given, **{name: with_shared(one) for name, one in table.items()}}

        return {**tree, **{name: with_shared(tree[name]) for name in ("recipe", "rounds") if name in tree}}

    def steps(self) -> list[Node]:
        """The sections, tables and rounds as nodes, each after the nodes that it reads.

        Sections come in the order of the lifecycle, then tables of the recipe in the order of the file, then rounds.
        Raises ValueError for a recipe without such an order, and for an input that does not exist or is of another
        kind.
        """
        sections = list(section_steps(self))
        others = {*self.recipe, *(name for step in sections for name in step.made)}
        steps = [
            *sections,
            *(node for name, table in self.recipe.items() for node in recipe_steps(name, table, others)),
        ]
        steps += [node for name, rounds in self.rounds.items() for node in round_steps(name, rounds, others)]
        steps = with_kinds([with_labels(step, without_prefix) for step in steps])
        check(steps)
        return in_order(steps)

    def judge(self) -> str:
        """The reward model by which policies are compared: the one called `reward_model`, or the only one."""
        steps = self.steps()
        scoring, starts = (
            {name for step in steps for name in listed(step.inputs.get(kind, ""))}
            for kind in ("reward_models", "critic")
        )
        models = [name for step in steps if step.output is RewardModelRef for name in step.shown]
        models = [name for name in models if name in scoring or name not in starts]
        return "reward_model" if "reward_model" in models else models[0] if len(models) == 1 else ""

    def policies(self) -> list[str]:
        """Names of the policies that this pipeline makes and evaluates, in order."""
        return ["base", *policies_of(self.steps())]


def policies_of(steps: Sequence[Node]) -> list[str]:
    """The names of the policies that are evaluated: imported ones only if a step starts from them, of rounds the last."""
    started = {
        name
        for step in steps
        for kind, names in step.reads().items()
        for name in names
        if kind not in ("teacher", "teachers", "reward_models")
    }
    made = [(name, step) for step in steps if step.output is PolicyRef for name in step.shown]
    return [name for name, step in made if step.stage != "import_policy" or name in started]


def section_steps(profile: GraphConfig) -> Iterator[Node]:
    """Yield the sections of a profile as nodes, in the order of the lifecycle."""
    start, models = "sft" if profile.sft else "base", dict[str, str]()

    def step(name: str, **given: Names) -> Iterator[Node]:
        made = Node(name, name, getattr(profile, name))
        named: dict[str, Any] = {**{part: part for part in PARTS}, **given}
        inputs = {kind: named[kind] for kind in made.kinds if kind in named}
        inputs |= {kind: getattr(made.config, kind, inputs[kind]) for kind in inputs if kind in tables_read(made)}
        yield from with_mixes(made, inputs)

    if profile.import_reward_model:
        (imported,) = step("import_reward_model", policy="base")
        yield replace(imported, names=("reward_model",))
        models["reward_model"] = "reward_model"
    if profile.sft:
        yield from step("sft", policy="base")
    if profile.reward_model:
        trained = list(step("reward_model", policy=start))
        yield from trained
        models |= {name: name for name in trained[-1].made}
    if profile.process_reward_model:
        yield from step("process_reward_model", policy=start)
        models["process_reward_model"] = "process_reward_model"
    for name in ("rejection_sampling", "conditional_sft"):
        if getattr(profile, name):
            yield from step(name, policy=start, reward_models=scoring(getattr(profile, name), models, profile.recipe))
    if profile.dpo:
        start = profile.dpo.start_from
        yield from step("dpo", policy=start, reference=profile.dpo.reference or start)
    if profile.iterative_dpo:
        further = scoring(profile.iterative_dpo, models, profile.recipe)
        yield from step("iterative_dpo", policy=profile.iterative_dpo.start_from, reward_models=further)
    if profile.online:
        first = models.get("reward_model", "")
        yield from step("online", policy=profile.online.start_from, reward_start=start, first_reward_model=first)
    if profile.ppo:
        start, teachers = profile.ppo.start_from, {name: name for name in teachers_in(profile.ppo)}
        further = scoring(profile.ppo, models, profile.recipe)
        critic = profile.ppo.critic
        yield from step("ppo", policy=start, reference=start, reward_models=further, teachers=teachers, critic=critic)
    if profile.distill:
        outside = {name: f"distill/{name}/import" for name in profile.distill.external}
        for name, model in profile.distill.external.items():
            yield Node(outside[name], "import_policy", ImportPolicyConfig(model=model), key=f"distill.external.{name}")
        teachers = {name: outside.get(name, name) for name in profile.distill.teachers}
        teacher = "" if teachers else outside.get(profile.distill.teacher, profile.distill.teacher)
        yield from step("distill", policy=profile.distill.start_from, teacher=teacher, teachers=teachers)


def scoring(section: Config, models: Mapping[str, str], recipe: Collection[str]) -> Mapping[str, str]:
    """The reward models of a section: the `models` of other sections, steps of the recipe, and policies that judge."""
    asked = {term.model for term in terms_in(section) if isinstance(term, GenerativeReward)}
    return {**models, **{name: name for name in models_in(section) if name in recipe or name in asked}}


# ---------------------------------------------------------------- tables of a recipe


def recipe_steps(name: str, config: Any, others: Collection[str], *, key: str = "") -> Iterator[Node]:
    """Yield the node of the table `[recipe.<name>]`, after the mixes of its rows. `others` are the names of all steps."""
    key = key or f"recipe.{name}"
    node = Node(name, config.stage, config, key=key)
    inputs: dict[str, Any] = {kind: getattr(config, kind) for kind in node.kinds if hasattr(config, kind)}
    for followed in ("reference", "reward_start"):
        if inputs.get(followed) == "":
            inputs[followed] = inputs["policy"]
    if "reward_models" in inputs:
        inputs["reward_models"] = reward_models(node, inputs["reward_models"], others)
    if "teachers" in node.kinds:
        inputs["teachers"] = {teacher: teacher for teacher in teachers_in(config)}
    if isinstance(config, MergeConfig):
        inputs["policies"] = {policy: policy for policy in config.weights}
    yield from with_mixes(node, inputs)


def with_mixes(node: Node, inputs: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the mixes of a node's rows, and then the node with its inputs."""
    found: dict[str, Names] = {}
    for kind, given in inputs.items():
        if kind not in tables_read(node):
            if (node.stage, kind) == ("select", "rollouts"):
                found |= rollouts_of(f"{node.path}.{kind}", given)
            elif not isinstance(node.config, MixConfig):
                several = isinstance(given, (tuple, AllRounds))
                found[kind] = tables_of(f"{node.path}.{kind}", given)[0] if several else given
            continue
        key = f"{node.path}.{kind}"
        names, chosen = tables_of(key, given)
        options = {one: getattr(node.config, one) for one in ROW_OPTIONS if chooses(node, kind, one)}
        options |= {"kind": next(part for part, of in PARTS.items() if of is node.kinds[kind]), "shares": chosen}
        rows = mixed(node.path, kind, options)
        if len(names) == 1 and not chosen and len(options) == 2:
            (found[kind],) = names.values()
            continue
        found[kind] = f"{node.label}/{kind}"
        yield Node(f"{node.label}/{kind}", "mix", rows, {"tables": names}, key=key)
    if isinstance(node.config, MixConfig):
        found["tables"], shares = tables_of(f"{node.path}.tables", inputs["tables"])
        options = {one: getattr(node.config, one) for one in MixConfig.model_fields} | {"shares": shares}
        node = replace(node, config=mixed(node.path, "tables", options))
    yield replace(node, inputs=found)


def rollouts_of(key: str, given: Any) -> dict[str, Names]:
    """The inputs of a selection: rollouts of one step, or a pool of several by name."""
    names = given if isinstance(given, Mapping) else tables_of(key, given)[0]
    # One step has the input, and so the key, that it had before selections could read several.
    return {"pool": names} if len(names) > 1 else {"rollouts": "".join(names.values())}


def mixed(key: str, name: str, options: Mapping[str, Any]) -> MixConfig:
    """The options of a mix.

    Raises ValueError for an invalid mix, by its key in the table `key`; `name` is the input.
    """
    try:
        return MixConfig(**options)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        named = f"{name}.{message.removeprefix('shares.')}" if message.startswith("shares.") else message
        raise ValueError(f"{key}.{named}") from None


def tables_of(key: str, given: Any) -> tuple[dict[str, str], dict[str, float]]:
    """The names of an input that takes several tables, and their shares, which are empty if all rows are taken."""
    if isinstance(given, AllRounds):  # inputs of a step in rounds have been replaced by the names of its tables
        rule = "only a step of [rounds.NAME] has earlier rounds"
        raise ValueError(explain(key, {"all": given.all}, rule, "name one table, a list of tables, or shares"))
    if isinstance(given, str):
        given = (given,)
    return {name: name for name in given}, dict(given) if isinstance(given, Mapping) else {}


def chooses(node: Node, kind: str, option: str) -> bool:
    """True if the table sets an option of its mix, and the input is the one whose rows it chooses."""
    read = ["prompts"]
    if node.stage not in GROUPS:
        read = [name for name in tables_read(node) if STAGES[node.stage].reads_input(name, node.config)]
    if kind != next(iter(read), "") or (option == "mixture" and isinstance(node.config, PPOConfig)):
        return False
    default = MixConfig.model_fields[option].default
    return bool(getattr(node.config, option, default) != default)


def with_labels(node: Node, label: Callable[[str], str]) -> Node:
    """The node, whose inputs have labels in place of the names that are written."""
    inputs = {
        kind: label(names) if isinstance(names, str) else {used: label(name) for used, name in names.items()}
        for kind, names in node.inputs.items()
    }
    return replace(node, inputs=inputs)


def without_prefix(name: str) -> str:
    """The name, where parts of the prepared data stand alone: `base` for `prepare_data.base`."""
    part = name.removeprefix("prepare_data.")
    return part if part in PARTS else name


def teachers_in(config: Config) -> Mapping[str, float]:
    """The teachers of a distillation, and of a policy optimization that learns from some, with their weights."""
    taught = config.distill if isinstance(config, PPOConfig) else config
    return taught.teachers if isinstance(taught, TeacherOptions) else {}


def reward_models(step: Node, given: Sequence[str] | Mapping[str, str], others: Collection[str]) -> Mapping[str, str]:
    """The steps whose reward models a step reads, by the names in the terms of its rewards.

    They are all that terms name, and all that are `given`. A single given one also serves terms that name none, if none of
    the `others` has the name of such a term.
    """
    if isinstance(given, Mapping):
        return given
    given = list(tables_of(f"{step.path}.reward_models", given)[0])
    terms = models_in(step.config)
    replaced = [name for name in terms if len(given) == 1 and name in UNNAMED and name not in others]
    return {name: given[0] if name in replaced else name for name in terms} | {
        name: name for name in given if not replaced
    }


def with_kinds(steps: Sequence[Node]) -> list[Node]:
    """The steps, where a table of the stage `mix` has the kind of its first table whose kind is known."""
    found = list(steps)
    kinds: dict[str, type[ArtifactRef]] = {**PARTS}
    kinds |= {name: step.kind_of(name) for step in steps if not mixes_any(step) for name in step.made}
    parts: dict[type[ArtifactRef], str] = {
        kind: part for part, kind in PARTS.items() if issubclass(kind, TABLES) and part != "eval_prompts"
    }
    while True:
        for place, step in enumerate(found):
            known = [parts[kinds[one]] for one in listed(step.inputs.get("tables", "")) if kinds.get(one) in parts]
            if mixes_any(step) and step.label not in kinds and known:
                found[place] = replace(step, config=step.config.model_copy(update={"kind": known[0]}))
                kinds |= dict.fromkeys([*step.made, step.label], found[place].output)
                break
        else:
            return found


def mixes_any(step: Node) -> bool:
    """True for a table of the stage `mix`, whose kind follows from its tables."""
    return step.stage == "mix" and not step.mixes_input


# ---------------------------------------------------------------- rounds


def round_steps(name: str, config: RoundsConfig, others: Collection[str]) -> Iterator[Node]:
    """Yield the steps of all rounds of `[rounds.<name>]`, with labels such as `<name>/round_1/policy`."""
    key = f"rounds.{name}.steps"
    for step in config.steps:
        if step in RESERVED:
            raise ValueError(f"{key}.{step} = {{...}}: this name has another meaning; give the step another one")
    for number in range(1, config.count + 1):
        at, before = f"{name}/round_{number}", f"{name}/round_{number - 1}" if number > 1 else ""
        made = list[Node]()
        for step, table in config.steps.items():
            so_far = dict[str, tuple[str, ...]]()
            for option, given in table:
                if isinstance(given, AllRounds):
                    check_used(config, f"{key}.{step}.{option}", given.all, {"all": given.all})
                    rounds = (f"{name}/round_{one}/{given.all}" for one in range(1, number))
                    so_far[option] = (config.start[given.all], *rounds)
            table = table.model_copy(update=so_far)
            made += recipe_steps(step, table, {*others, *config.steps}, key=f"{key}.{step}")
        # Also parts of data (`more.prompts`), exported policies (`policy_20`) and mixes of rows (`policy/preferences`).
        inside = {one for node in made for one in node.made}

        def place(written: str, at: str = at, before: str = before, inside: Collection[str] = inside) -> str:
            step = written.removeprefix(PREVIOUS)
            if step != written:
                return f"{before}/{step}" if before else config.start[step]
            return f"{at}/{written}" if written in inside else written

        for node in made:
            for kind, names in node.inputs.items():
                for one in listed(names):
                    if one.startswith(PREVIOUS):
                        check_used(config, node.option(kind, one), one.removeprefix(PREVIOUS), one)
            label = f"{at}/{node.label}"
            last = (f"{name}.{node.label}", label) if number == config.count else ()
            # Another seed draws other samples and other orders in each round.
            yield replace(with_labels(node, place), label=label, names=last, seed=number - 1)


def check_used(config: RoundsConfig, key: str, used: str, shown: object) -> None:
    """Raise ValueError for a name with `previous` or `all` that is no step, or that `start` does not give."""
    if used not in config.steps or used not in config.start:
        steps, start = ", ".join(config.steps), ", ".join(config.start) or "nothing"
        rule = f"{used} must be a step of the round ({steps}) and a key of start ({start})"
        raise ValueError(explain(key, shown, rule, "name one that is both"))


# ---------------------------------------------------------------- order


def in_order(steps: Sequence[Node]) -> list[Node]:
    """Sort the steps so that each comes after the steps that it reads, and otherwise keep their order.

    Raises ValueError for a cycle.
    """
    makers = {name: step for step in steps for name in step.made}
    waiting, ordered = list(steps), list[Node]()
    while waiting:
        ready = (step for step in waiting if not any(maker in waiting for maker in read_steps(step, makers)))
        first = next(ready, None)
        if first is None:
            names = cycle(waiting, makers)
            raise ValueError(
                f"{makers[names[0]].path} = {{...}}: {' -> '.join(names)} is a cycle; change an input of one of them"
            )
        waiting.remove(first)
        ordered.append(first)
    return ordered


def read_steps(step: Node, makers: Mapping[str, Node]) -> list[Node]:
    """The steps that a step reads from."""
    return [makers[name] for name in step.reads_names() if name in makers]


def cycle(steps: Sequence[Node], makers: Mapping[str, Node]) -> list[str]:
    """Find a cycle among `steps` and return the names along it; first and last are the same.

    Each step must read another step of `steps`.
    """
    path = [steps[0]]
    while path[-1] not in path[:-1]:
        path.append(next(maker for maker in read_steps(path[-1], makers) if maker in steps))
    return [step.label for step in path[path.index(path[-1]) :]][::-1]


def drawn(steps: Sequence[Node]) -> Iterator[str]:
    """Yield a line for each step with its inputs: the graph as `rlhf plan` shows it."""
    width = max((len(step.label) for step in steps), default=0)
    for step in steps:
        yield f"{step.label:<{width}} <- {', '.join(step.reads_names()) or 'outside'} ({step.stage})"
