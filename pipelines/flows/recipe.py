"""The steps of a pipeline and their order: the tables `[recipe.NAME]` of a profile, and its sections, which are shorthand for steps.

A step is a stage, or several stages that one section configures, with inputs by name. Names are those of other steps and of the parts
of the prepared data. The order of tables in the file does not matter.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, TypeAlias, TypeVar, cast

from pydantic import Field

from pipelines.flows.sections import (
    ConditionalSFTConfig,
    DistillationConfig,
    IterativeDPOConfig,
    MergeStep,
    OfflineDPOConfig,
    OnlineConfig,
    OnlineRounds,
    PolicyOptimizationConfig,
    RecipeStep,
    RejectionSamplingConfig,
    RewardModelSection,
)
from rlhf_core.config.engines import RuntimeConfig
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import (
    GenerativeReward,
    ProcessRewardModelReward,
    RewardModelReward,
    RewardsConfig,
    Term,
    models_of,
    what_moves_rewards,
)
from rlhf_core.config.teachers import Teachers
from rlhf_core.errors import explain, nearest
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from rlhf_core.types import (
    CHAMPION,
    ArtifactRef,
    DemonstrationsRef,
    ModelRef,
    PolicyRef,
    PreferencesRef,
    PromptsRef,
    RewardModelRef,
    StepsRef,
    title,
)
from stages.config.import_policy import ImportPolicyConfig
from stages.config.import_reward_model import ImportRewardModelConfig
from stages.config.prepare_data import PrepareDataConfig
from stages.config.process_reward_model import ProcessRewardModelConfig
from stages.config.score import ScoreConfig
from stages.config.select import Pairs, PromptsInBand
from stages.config.sft import SFTConfig
from stages.config.synthesize import SynthesizeConfig
from stages.table import STAGES

logger = logging.getLogger(__name__)

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
STORED, REGISTERED = "store:", "models:/"
"""Begin the names of inputs from earlier runs: by digest, and by name and version in the registry."""
UNNAMED = tuple(term.model_fields["model"].default for term in (RewardModelReward, ProcessRewardModelReward))
"""Reward models of terms that name none."""
RESERVED = (*PARTS, CHAMPION, "parent", "suites", "evaluate", "evaluation", "publish", "prepare_data", "none")

GROUPS: Mapping[str, Mapping[str, type[ArtifactRef]]] = {
    "rejection_sampling": {"policy": PolicyRef, "prompts": PromptsRef, "reward_models": ModelRef},
    "conditional_sft": {"policy": PolicyRef, "prompts": PromptsRef, "reward_models": ModelRef},
    "iterative_dpo": {"policy": PolicyRef, "prompts": PromptsRef, "reward_models": ModelRef},
    "online": {
        "policy": PolicyRef,
        "reward_start": PolicyRef,
        "first_reward_model": RewardModelRef,
        "preferences": PreferencesRef,
        "prompts": PromptsRef,
        "demonstrations": DemonstrationsRef,
    },
}
"""Inputs of the steps that run several stages, each of which ends with a policy."""


@dataclass(frozen=True)
class Step:
    """A step of the graph; `inputs` has the names of what it reads."""

    name: str
    stage: str
    config: Config
    inputs: Mapping[str, Names] = field(default_factory=dict)
    key: str = ""
    """Where the profile configures it; "" for a section of its own name."""
    alias: str = ""
    """The name under which other steps find what this one makes, if it is not its own."""

    @property
    def path(self) -> str:
        """The key of the table that configures the step."""
        return self.key or self.name

    @property
    def kinds(self) -> Mapping[str, type[ArtifactRef]]:
        """The kind of artifact of each input."""
        if self.stage in GROUPS:
            return GROUPS[self.stage]
        return {name: row.kind for name, row in STAGES[self.stage].inputs.items()}

    def kind(self, name: str, read: str, declared: type[R]) -> type[R]:
        """Return the kind of artifact that the input `name` needs of `read`: of reward models, policies for terms that ask one."""
        names = self.inputs[name]
        if name != "reward_models" or not isinstance(names, Mapping):
            return declared
        asked = {names.get(term.model) for term in terms_in(self.config) if isinstance(term, GenerativeReward)}
        return cast(type[R], PolicyRef if read in asked else RewardModelRef)

    @property
    def output(self) -> type[ArtifactRef]:
        """The kind of artifact that the step makes."""
        if self.stage in GROUPS:
            return PolicyRef
        if self.stage == "select":
            kinds = {Pairs: PreferencesRef, PromptsInBand: PromptsRef}
            return next((kind for config, kind in kinds.items() if isinstance(self.config, config)), DemonstrationsRef)
        if isinstance(self.config, SynthesizeConfig):
            return PromptsRef if self.config.make == "prompts" else DemonstrationsRef
        return STAGES[self.stage].output

    @property
    def made(self) -> list[str]:
        """The names under which other steps find what this one makes."""
        if isinstance(self.config, OnlineRounds):
            return [f"{self.name}_{number + 1}" for number in range(self.config.rounds)]
        if isinstance(self.config, RewardModelSection) and self.config.ensemble:
            return [*self.config.stage_configs(self.name), self.name]
        return [*self.exported, self.alias or self.name]

    @property
    def exported(self) -> dict[str, int]:
        """The names of the policies that a training exports on its way, and their steps."""
        if self.stage not in ("sft", "ppo") or not isinstance(self.config, (SFTConfig, PPOConfig)):
            return {}
        return {f"{self.name}_{step}": step for step in self.config.exported_steps}

    @property
    def may_be_empty(self) -> tuple[str, ...]:
        """The inputs that the step can do without."""
        unused = (
            () if isinstance(self.config, OnlineRounds) and self.config.uses_demonstrations else ("demonstrations",)
        )
        of_groups = ("preferences", *unused) if self.stage == "online" else ()
        return ("teacher", "teachers", "reward_models", "critic", *of_groups)

    def reads(self) -> dict[str, list[str]]:
        """Return the names that each input reads; those of inputs that the configuration does not use are left out."""
        names = {name: listed(value) for name, value in self.inputs.items()}
        if self.stage in GROUPS:
            return names
        rows = STAGES[self.stage].inputs
        used = {name if row.when(self.config) else row.instead for name, row in rows.items()}
        return {name: found for name, found in names.items() if name in used}


def listed(names: Names) -> list[str]:
    """Return the names of an input as a list, without empty ones."""
    if isinstance(names, str):
        return [names] if names else []
    return list(names.values())


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
    sft: SFTConfig | None = None
    reward_model: RewardModelSection | None = None
    process_reward_model: ProcessRewardModelConfig | None = None
    rejection_sampling: RejectionSamplingConfig | None = None
    conditional_sft: ConditionalSFTConfig | None = None
    dpo: OfflineDPOConfig | None = None
    iterative_dpo: IterativeDPOConfig | None = None
    online: OnlineConfig | None = None
    ppo: PolicyOptimizationConfig | None = None
    distill: DistillationConfig | None = None
    recipe: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]*$")], RecipeStep] = added_option({})
    """Steps by name, each a stage with its options and its inputs by name, beside the sections or instead of them
    (docs/recipes.md)."""

    def steps(self) -> list[Step]:
        """Return the steps, each after those that it reads.

        Sections come in the order of the lifecycle, tables of the recipe in that of the file. Raises ValueError for a
        recipe that has no such order, and for an input that there is not, or that is of another kind.
        """
        sections = list(section_steps(self))
        others = {*self.recipe, *(name for step in sections for name in step.made)}
        steps = [*sections, *(recipe_step(name, config, others) for name, config in self.recipe.items())]
        check(steps)
        return in_order(steps)

    def judge(self) -> str:
        """Return the reward model by which policies are compared: the one called `reward_model`, or the only one."""
        steps = self.steps()
        scoring, starts = (
            {name for step in steps for name in listed(step.inputs.get(kind, ""))}
            for kind in ("reward_models", "critic")
        )
        models = [name for step in steps if step.output is RewardModelRef for name in step.made]
        models = [name for name in models if name in scoring or name not in starts]
        return "reward_model" if "reward_model" in models else models[0] if len(models) == 1 else ""

    def policies(self) -> list[str]:
        """Return the names of the policies that this pipeline makes and evaluates, in order."""
        return ["base", *policies_of(self.steps())]


def policies_of(steps: Sequence[Step]) -> list[str]:
    """Return the names of the policies that are evaluated; imported ones only if a step starts from them."""
    started = {
        name
        for step in steps
        for kind, names in step.reads().items()
        for name in names
        if kind not in ("teacher", "teachers", "reward_models")
    }
    made = [(name, step) for step in steps if step.output is PolicyRef for name in step.made]
    return [name for name, step in made if step.stage != "import_policy" or name in started]


def section_steps(profile: GraphConfig) -> Iterator[Step]:
    """Yield the steps that the sections of a profile stand for, in the order of the lifecycle."""
    start, models = "sft" if profile.sft else "base", dict[str, str]()

    def step(name: str, **given: Names) -> Step:
        made = Step(name, name, getattr(profile, name))
        named: dict[str, Names] = {**{part: part for part in PARTS}, **given}
        return replace(made, inputs={kind: named[kind] for kind in made.kinds if kind in named})

    if profile.import_reward_model:
        yield replace(step("import_reward_model", policy="base"), alias="reward_model")
        models["reward_model"] = "reward_model"
    if profile.sft:
        yield step("sft", policy="base")
    if profile.reward_model:
        trained = step("reward_model", policy=start)
        yield trained
        models |= {name: name for name in trained.made}
    if profile.process_reward_model:
        yield step("process_reward_model", policy=start)
        models["process_reward_model"] = "process_reward_model"
    for name in ("rejection_sampling", "conditional_sft"):
        if getattr(profile, name):
            yield step(name, policy=start, reward_models=scoring(getattr(profile, name), models, profile.recipe))
    if profile.dpo:
        start = profile.dpo.start_from
        yield step("dpo", policy=start, reference=profile.dpo.reference or start)
    if profile.iterative_dpo:
        further = scoring(profile.iterative_dpo, models, profile.recipe)
        yield step("iterative_dpo", policy=profile.iterative_dpo.start_from, reward_models=further)
    if profile.online:
        first = models.get("reward_model", "")
        yield step("online", policy=profile.online.start_from, reward_start=start, first_reward_model=first)
    if profile.ppo:
        start, teachers = profile.ppo.start_from, {name: name for name in teachers_in(profile.ppo)}
        further = scoring(profile.ppo, models, profile.recipe)
        critic = profile.ppo.critic
        yield step("ppo", policy=start, reference=start, reward_models=further, teachers=teachers, critic=critic)
    if profile.distill:
        outside = {name: f"distill/{name}/import" for name in profile.distill.external}
        for name, model in profile.distill.external.items():
            yield Step(outside[name], "import_policy", ImportPolicyConfig(model=model), key=f"distill.external.{name}")
        teachers = {name: outside.get(name, name) for name in profile.distill.teachers}
        teacher = "" if teachers else outside.get(profile.distill.teacher, profile.distill.teacher)
        yield step("distill", policy=profile.distill.start_from, teacher=teacher, teachers=teachers)


def scoring(section: Config, models: Mapping[str, str], recipe: Collection[str]) -> Mapping[str, str]:
    """Return the reward models of a section: the `models` of other sections, steps of the recipe, and policies that judge."""
    asked = {term.model for term in terms_in(section) if isinstance(term, GenerativeReward)}
    return {**models, **{name: name for name in models_in(section) if name in recipe or name in asked}}


def recipe_step(name: str, config: RecipeStep, others: Collection[str]) -> Step:
    """Return the step of the table `[recipe.<name>]`; `others` are the names of all steps."""
    step = Step(name, config.stage, config, key=f"recipe.{name}")
    inputs = {kind: getattr(config, kind) for kind in step.kinds if hasattr(config, kind)}
    for followed in ("reference", "reward_start"):
        if inputs.get(followed) == "":
            inputs[followed] = inputs["policy"]
    if "reward_models" in inputs:
        inputs["reward_models"] = reward_models(step, inputs["reward_models"], others)
    if "teachers" in step.kinds:
        inputs["teachers"] = {teacher: teacher for teacher in teachers_in(config)}
    if isinstance(config, MergeStep):
        inputs["policies"] = {policy: policy for policy in config.weights}
    return replace(step, inputs={kind: without_prefix(names) for kind, names in inputs.items()})


def teachers_in(config: Config) -> Mapping[str, float]:
    """Return the teachers of a distillation, and of a policy optimization that learns from some, with their weights."""
    taught = config.distill if isinstance(config, PPOConfig) else config
    return taught.teachers if isinstance(taught, Teachers) else {}


def without_prefix(names: Names) -> Names:
    """Return names in which parts of the prepared data stand alone: `base` for `prepare_data.base`."""
    if isinstance(names, str):
        part = names.removeprefix("prepare_data.")
        return part if part in PARTS else names
    return {used: str(without_prefix(name)) for used, name in names.items()}


def reward_models(step: Step, given: Sequence[str] | Mapping[str, str], others: Collection[str]) -> Mapping[str, str]:
    """Return the steps whose reward models a step reads, by the names in the terms of its rewards.

    They are those that terms name, and all that are `given`. A single given one also serves terms that name none, if none
    of the `others` has the name of such a term.
    """
    if isinstance(given, Mapping):
        return given
    terms = models_in(step.config)
    replaced = [name for name in terms if len(given) == 1 and name in UNNAMED and name not in others]
    return {name: given[0] if name in replaced else name for name in terms} | {
        name: name for name in given if not replaced
    }


def rewards_in(config: Config) -> dict[str, RewardsConfig]:
    """Return the rewards of a step, also those of its scoring, its optimization and its independent evaluation, by key."""
    scoring, optimized, evaluated = (getattr(config, name, None) for name in ("score", "ppo", "evaluate"))
    found = {
        "rewards": getattr(config, "rewards", None),
        "score.rewards": getattr(scoring, "rewards", None),
        "ppo.rewards": getattr(optimized, "rewards", None),
        "evaluate.independent": getattr(evaluated, "independent", None),
    }
    return {key: rewards for key, rewards in found.items() if isinstance(rewards, RewardsConfig)}


def terms_in(config: Config) -> list[Term]:
    """Return all terms in the rewards of a step."""
    return [term for rewards in rewards_in(config).values() for term in rewards.terms.values()]


def models_in(config: Config) -> list[str]:
    """Return the names of the reward models in the terms of a step, and of its independent evaluation, each once."""
    return list(dict.fromkeys(model for term in terms_in(config) for _, model in models_of(term)))


# ---------------------------------------------------------------- checks and order


def check(steps: Sequence[Step]) -> None:
    """Raise ValueError for a name that two steps have, and for an input that there is not or that is of another kind."""
    made = {name: step for step in steps for name in step.made}
    for step in steps:
        check_optimization(step, made)
        check_difficulty(step, made)
        if not step.key.startswith("recipe."):
            for name in (
                {"reference", "reward_models", "teachers", "critic"} & step.inputs.keys()
                if step.stage in ("dpo", "ppo", *GROUPS)
                else ()
            ):
                for read in listed(step.inputs[name]):  # which a step of the recipe may have made
                    check_input(step, name, read, made)
            continue
        if step.name in RESERVED:
            raise ValueError(f"{step.key} = {{...}}: this name has another meaning; give the step another one")
        twin = next((other for other in steps if other is not step and set(other.made) & set(step.made)), None)
        if twin is not None:
            rule = f"makes what {twin.key or f'[{twin.name}]'} makes"
            raise ValueError(f"{step.key} = {{...}}: {rule}; give the step another name")
        for name, names in step.reads().items():
            if not names and name not in step.may_be_empty:
                raise ValueError(explain(f"{step.key}.{name}", "", "names no input", "name a step"))
        for name, given in step.inputs.items():  # also one that is not read now: a misspelt name would wait there
            for read in listed(given):
                check_input(step, name, read, made)
    check_distillation(steps)
    used = {name for step in steps for names in step.reads().values() for name in names}
    for step in steps:
        if step.key.startswith("recipe.") and step.output is not PolicyRef and used.isdisjoint(step.made):
            warn_unread(step.key)


def check_optimization(step: Step, made: Mapping[str, Step]) -> None:
    """Raise ValueError for a critic without a value model, and for an order by difficulties that the prompts come without."""
    own = isinstance(step.config, PPOConfig)
    config, path = (step.config, step.path) if own else (getattr(step.config, "ppo", None), f"{step.path}.ppo")
    if not isinstance(config, PPOConfig):
        return
    critic = "".join(listed(step.inputs.get("critic", "")))
    if critic and not config.uses_values:
        rule = "there is no value model that could start from it"
        raise ValueError(explain(f"{path}.critic", critic, rule, 'remove it, or set advantage = "gae"'))
    prompts = "".join(listed(step.inputs["prompts"]))
    measured = prompts in made and isinstance(made[prompts].config, PromptsInBand)
    if config.order == "easy_first" and not measured and prompts in {*made, *PARTS}:
        rule, remedy = (
            f"{prompts} come without their difficulty",
            'read the prompts of a select step with type = "prompts"',
        )
        raise ValueError(explain(f"{path}.order", config.order, rule, remedy))


def check_difficulty(step: Step, made: Mapping[str, Step]) -> None:
    """Raise ValueError for prompts that are selected by a term that there is not, or by a reward that is normalized."""
    scored = made.get("".join(listed(step.inputs.get("rollouts", ""))))
    if not (isinstance(step.config, PromptsInBand) and scored and isinstance(scored.config, ScoreConfig)):
        return
    term, rewards = step.config.term, scored.config.rewards
    known = [*rewards.terms, *(name for name in ("overlong", "truncated") if getattr(rewards, name))]
    if term and term not in known:
        rule = f"{scored.path}.rewards have no such term"
        raise ValueError(explain(f"{step.path}.term", term, rule, nearest(term, known)))
    if not term and (mover := what_moves_rewards(rewards)):
        rule, remedy = f"{scored.path}.{mover} changes the reward", "name a term, or remove one of them"
        raise ValueError(explain(f"{step.path}.term", term, rule, remedy))


@cache
def warn_unread(key: str) -> None:
    """Log once that no step reads what the step at `key` makes."""
    logger.warning("%s: no other step reads what it makes", key)


def check_input(step: Step, name: str, read: str, made: Mapping[str, Step]) -> None:
    """Raise ValueError unless `read` names an artifact of the kind that the input `name` needs."""
    option = {"policies": f"weights.{read}", "teachers": f"teachers.{read}"}.get(name, name)
    option = f"distill.{option}" if name == "teachers" and step.stage == "ppo" else option
    wanted, key = step.kind(name, read, step.kinds[name]), f"{step.path}.{option}"
    if read.startswith(STORED) and not re.fullmatch("[0-9a-f]{8,64}", read.removeprefix(STORED)):
        raise ValueError(explain(key, read, "must be a digest of at least 8 digits", "`rlhf store ls` lists them"))
    if read.startswith(REGISTERED) and not re.fullmatch(rf"{REGISTERED}[^/@]+(/\d+|@{CHAMPION})?", read):
        rule = f'must be "{REGISTERED}NAME/VERSION" or "{REGISTERED}NAME@{CHAMPION}"'
        raise ValueError(explain(key, read, rule, "`rlhf champion NAME` lists the versions"))
    if read.startswith((STORED, REGISTERED)):
        return
    known: dict[str, type[ArtifactRef]] = {**PARTS, **{one: made[one].output for one in made}, CHAMPION: PolicyRef}
    usable = [one for one, kind in known.items() if issubclass(kind, wanted) and one != step.name]
    if read not in known:
        raise ValueError(explain(key, read, "there is no such step", nearest(read, usable)))
    if not issubclass(known[read], wanted):
        rule = f"is {title(known[read])}, and {name} must be {title(wanted)}"
        raise ValueError(explain(key, read, rule, f"name one of {', '.join(usable)}" if usable else "add such a step"))


def check_distillation(steps: Sequence[Step]) -> None:
    """Raise ValueError for a distillation of the recipe without a teacher, with two kinds of them, or with itself."""
    for step in steps:
        if step.stage != "distill" or not step.key:
            continue
        teacher, teachers = listed(step.inputs["teacher"]), listed(step.inputs["teachers"])
        if bool(teacher) == bool(teachers):
            rule = "there is no teacher" if not teacher else "is not read beside teachers, which have the weights"
            raise ValueError(explain(f"{step.key}.teacher", "".join(teacher), rule, "give teacher or teachers"))
        for name in (*teacher, *teachers):
            if name == step.inputs["policy"]:
                raise ValueError(explain(f"{step.key}.policy", name, "is a teacher, too", "name another student"))


def in_order(steps: Sequence[Step]) -> list[Step]:
    """Return the steps in an order in which each comes after those that it reads, and else in the given one.

    Raises ValueError for a cycle.
    """
    makers = {name: step for step in steps for name in step.made}
    waiting, ordered = list(steps), list[Step]()
    while waiting:
        ready = (step for step in waiting if not any(maker in waiting for maker in read_steps(step, makers)))
        first = next(ready, None)
        if first is None:
            names = cycle(waiting, makers)
            raise ValueError(
                f"recipe.{names[0]} = {{...}}: {' -> '.join(names)} is a cycle; change an input of one of them"
            )
        waiting.remove(first)
        ordered.append(first)
    return ordered


def read_steps(step: Step, makers: Mapping[str, Step]) -> list[Step]:
    """Return the steps that a step reads from."""
    return [makers[name] for names in step.reads().values() for name in names if name in makers]


def cycle(steps: Sequence[Step], makers: Mapping[str, Step]) -> list[str]:
    """Return the names along a cycle among `steps`, all of which read another one of them; first and last are the same."""
    path = [steps[0]]
    while path[-1] not in path[:-1]:
        path.append(next(maker for maker in read_steps(path[-1], makers) if maker in steps))
    return [step.name for step in path[path.index(path[-1]) :]][::-1]


def drawn(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a line for each step with what it reads: the graph as `rlhf plan` shows it."""
    width = max((len(step.name) for step in steps), default=0)
    for step in steps:
        read = dict.fromkeys(name for names in step.reads().values() for name in names)
        yield f"{step.name:<{width}} <- {', '.join(read) or 'outside'} ({step.stage})"
