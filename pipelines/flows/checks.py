"""Check the steps of a pipeline before anything runs: names that do not exist, inputs of another kind, and options that clash."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache

from pipelines.flows.nodes import GROUPS, PARTS, Node, listed, rollouts_read
from pipelines.flows.steps import tables_read
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import what_moves_rewards
from rlhf_core.errors import explain, nearest
from rlhf_core.types import CHAMPION, ArtifactRef, PolicyRef, ReportRef, title
from stages.mix import MixConfig
from stages.score import ScoreConfig
from stages.select import Pairs, PromptsInBand

logger = logging.getLogger(__name__)

STORED, REGISTERED = "store:", "models:/"
"""Begin the names of inputs from earlier runs: by digest, and by name and version in the registry."""
RESERVED = (
    *PARTS,
    CHAMPION,
    "parent",
    "suites",
    "evaluate",
    "evaluation",
    "publish",
    "prepare_data",
    "none",
    "all",
    "previous",
)
TABLE_KEYS = ("recipe.", "rounds.")
"""Begin the keys of tables that are steps."""


def check(steps: Sequence[Node]) -> None:
    """Raise ValueError for a name of two steps, and for an input that does not exist or is of another kind."""
    made = {name: step for step in steps for name in step.made}
    for step in steps:
        check_optimization(step, made)
        check_pool(step)
        check_difficulty(step, made)
        if not step.key.startswith(TABLE_KEYS):
            check_section(step, made)
            continue
        if step.label in RESERVED:
            raise ValueError(f"{step.key} = {{...}}: this name has another meaning; give the step another one")
        twin = next((other for other in steps if other is not step and set(other.made) & set(step.made)), None)
        if twin is not None:
            rule = f"makes what {twin.key or f'[{twin.label}]'} makes"
            raise ValueError(f"{step.key} = {{...}}: {rule}; give the step another name")
        for name, names in step.reads().items():
            if not names and name not in step.may_be_empty:
                raise ValueError(explain(f"{step.key}.{name}", "", "names no input", "name a step"))
        for name, given in step.inputs.items():  # also inputs that are not read now: a misspelt name would stay
            for read in listed(given):
                check_input(step, name, read, made)
    check_distillation(steps)

    # Policies are evaluated and reports are read by people, so no step needs to read them.
    used = {name for step in steps for name in step.reads_names()}
    known = {step.key for step in steps if not used.isdisjoint(step.made)}  # of a step of rounds, in any round
    for step in steps:
        may_be_unread = step.output in (PolicyRef, ReportRef)
        if step.key.startswith(TABLE_KEYS) and step.key not in known and not may_be_unread:
            warn_unread(step.key)


def check_section(step: Node, made: Mapping[str, Node]) -> None:
    """Raise ValueError for an input of a section, which a step of the recipe may make, that is of another kind."""
    checked = set(tables_read(step))
    if step.stage in ("dpo", "ppo", *GROUPS):
        checked |= {"reference", "reward_models", "teachers", "critic"}
    if step.mixes_input:
        checked.add("tables")
    for name in step.inputs:
        if name in checked:
            for read in listed(step.inputs[name]):
                check_input(step, name, read, made)


def check_optimization(step: Node, made: Mapping[str, Node]) -> None:
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
        rule = f"{prompts} come without their difficulty"
        remedy = 'read the prompts of a select step with type = "prompts"'
        raise ValueError(explain(f"{path}.order", config.order, rule, remedy))


def check_pool(step: Node) -> None:
    """Raise ValueError for pairs of several policies among the answers of one step, or with a name that has no answers."""
    if not isinstance(step.config, Pairs) or not step.config.compares_policies:
        return
    names = list(step.inputs.get("pool", ()))
    options = {name: getattr(step.config, name) for name in ("across", "chosen", "rejected")}
    given = {name: value for name, value in options.items() if value}
    for option, value in given.items():
        key = f"{step.path}.{option}"
        if not names:
            raise ValueError(explain(key, value, "rollouts names one step", "name the rollouts of each policy"))
        if option != "across" and value not in names:
            raise ValueError(explain(key, value, "rollouts has no such name", nearest(value, names)))


def check_difficulty(step: Node, made: Mapping[str, Node]) -> None:
    """Raise ValueError for prompts that are selected by a missing term of the rewards, or by a normalized reward."""
    if not isinstance(step.config, PromptsInBand):
        return
    for name in rollouts_read(step):
        if name in made and isinstance(made[name].config, ScoreConfig):
            check_term(step, step.config.term, made[name])


def check_term(step: Node, term: str, scored: Node) -> None:
    """Raise ValueError if the rewards of `scored` lack a term, or change the reward by which prompts are selected."""
    rewards = scored.config.rewards  # type: ignore[attr-defined]
    known = [*rewards.terms, *(name for name in ("overlong", "truncated") if getattr(rewards, name))]
    if term and term not in known:
        rule = f"{scored.path}.rewards have no such term"
        raise ValueError(explain(f"{step.path}.term", term, rule, nearest(term, known)))
    if not term and (mover := what_moves_rewards(rewards)):
        rule = f"{scored.path}.{mover} changes the reward"
        raise ValueError(explain(f"{step.path}.term", term, rule, "name a term, or remove one of them"))


@cache
def warn_unread(key: str) -> None:
    """Log once that no step reads the result of the step at `key`."""
    logger.warning("%s: no other step reads what it makes", key)


def check_input(step: Node, name: str, read: str, made: Mapping[str, Node]) -> None:
    """Raise ValueError unless `read` names an artifact of the kind that the input `name` needs."""
    wanted = step.kind(name, read, step.kinds[name])

    key = step.option(name, read)
    name = "rollouts" if name == "pool" else name
    shown: object = read
    if isinstance(step.config, MixConfig):
        name = key.rpartition(".")[2]
        key, shown = (f"{key}.{read}", step.config.shares[read]) if read in step.config.shares else (key, read)

    # Results of earlier runs: only the form of the name is checked here.
    if read.startswith(STORED) and not re.fullmatch("[0-9a-f]{8,64}", read.removeprefix(STORED)):
        raise ValueError(explain(key, read, "must be a digest of at least 8 digits", "`rlhf store ls` lists them"))
    if read.startswith(REGISTERED) and not re.fullmatch(rf"{REGISTERED}[^/@]+(/\d+|@{CHAMPION})?", read):
        rule = f'must be "{REGISTERED}NAME/VERSION" or "{REGISTERED}NAME@{CHAMPION}"'
        raise ValueError(explain(key, read, rule, "`rlhf champion NAME` lists the versions"))
    if read.startswith((STORED, REGISTERED)):
        return

    # Tables that a step mixes for itself have no name in a profile.
    known: dict[str, type[ArtifactRef]] = {
        **PARTS,
        **{one: made[one].kind_of(one) for one in made},
        CHAMPION: PolicyRef,
    }
    inner = {one for other in made.values() if other.mixes_input for one in other.made}
    usable = [one for one, kind in known.items() if issubclass(kind, wanted) and one not in {*inner, step.label}]
    if read not in known:
        raise ValueError(explain(key, shown, "there is no such step", nearest(read, usable)))
    if not issubclass(known[read], wanted):
        rule = f"is {title(known[read])}, and {name} must be {title(wanted)}"
        raise ValueError(explain(key, shown, rule, f"name one of {', '.join(usable)}" if usable else "add such a step"))


def check_distillation(steps: Sequence[Node]) -> None:
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
