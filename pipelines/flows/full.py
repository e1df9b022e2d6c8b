"""Run the nodes of a profile: data, its sections and recipe, evaluation, publication.

prepare_data -> sft -> reward_model -+-> rejection sampling -+
             process_reward_model ---+-> conditional SFT ----+
                                     +-> DPO, iterative DPO -+-> evaluate -> publish
                                     +-> PPO ----------------+
                            a policy -+-> distillation ------+
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypeVar

from pipelines.flows.evaluation import Compared, evaluation_nodes, suites_to_avoid
from pipelines.flows.graph import GivenInput, Stages
from pipelines.flows.groups import ask_node
from pipelines.flows.nodes import PARTS, Node, expand, listed, part, prepared_part, rewards_in
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.sections import ConditionalSFTConfig, EvaluationConfig
from rlhf_core.rewards.rubrics import check_rubrics, columns_read
from rlhf_core.types import CHAMPION, ArtifactRef, PolicyRef, PreparedDataRef, PromptsRef, RewardModelRef
from stages.prepare_data import PrepareDataConfig
from stages.publish import PublishConfig
from stages.table import STAGES

R = TypeVar("R", bound=ArtifactRef)
Made = dict[str, ArtifactRef]
"""Artifacts by the labels and names of their nodes."""


def lifecycle(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run the nodes of a profile and of its evaluation; return the policies by name, in the order they were made."""
    made = run_nodes(data_nodes(config), stages, {})
    data = made["prepare_data"]
    assert isinstance(data, PreparedDataRef)
    made["base"] = part(data, "base", PolicyRef)
    steps, compared = config.steps(), config.policies()
    if data.preferences is None:  # the online loop can do without pairs of its first round
        steps = [without_pairs(step) for step in steps]
    for step in steps:
        if step.inputs.get("prompts") in PARTS:  # now, not after the steps before it have run for hours
            check_prompts(step, steps, stages, made)
    for step in steps:
        check_prompts(step, steps, stages, made)
        outside = found_outside(step, step.reads(), stages, made)
        made |= run_nodes(step_nodes(step, config), stages, made | outside)
    evaluated = {name: ref for name, ref in made.items() if name in compared and isinstance(ref, PolicyRef)}
    if config.evaluate:
        published = evaluated[config.published()]
        champion = None if stages.champion is None else stages.champion.of(published)
        made |= {} if champion is None else {CHAMPION: champion}
        policies = [*evaluated, *([] if champion is None else [CHAMPION])]
        run_nodes(closing_nodes(config, steps, policies), stages, made)
    return evaluated


def graph(config: PipelineConfig) -> list[Node]:
    """All nodes of a profile in order, as a run without a champion has them."""
    steps, compared = config.steps(), config.policies()
    nodes = [*data_nodes(config), *(node for step in steps for node in step_nodes(step, config))]
    made = ["base", *(name for node in nodes for name in (*node.names, node.label))]
    policies = dict.fromkeys(name for name in made if name in compared)
    return [*nodes, *(closing_nodes(config, steps, policies) if config.evaluate else ())]


# ---------------------------------------------------------------- nodes


def data_nodes(config: PipelineConfig) -> list[Node]:
    """The preparation of the data, and before it the prompts of suites that training rows are compared with."""
    avoided = suites_of(config.prepare_data, config)
    return [*avoided, Node("prepare_data", "prepare_data", config.prepare_data, {"suites": by_suite(avoided)})]


def suites_of(data: PrepareDataConfig, config: PipelineConfig) -> list[Node]:
    """The prompts of suites that rows of `data` are compared with."""
    return list(suites_to_avoid(data.suite_ngram, config.evaluate)) if data.suite_ngram else []


def by_suite(nodes: Iterable[Node]) -> dict[str, str]:
    """The labels of the prompts of suites, by the suite."""
    return {node.label.rpartition("/")[2]: node.label for node in nodes}


def step_nodes(step: Node, config: PipelineConfig) -> list[Node]:
    """The nodes of a step, and the reworded held-out prompts of a conditional SFT if policies are evaluated."""
    nodes = list(expand(step))
    if isinstance(step.config, PrepareDataConfig):
        avoided = suites_of(step.config, config)
        own = [] if config.prepare_data.suite_ngram else avoided  # else they are there already
        nodes = [*own, replace(step, inputs={"suites": by_suite(avoided)})]
    if config.evaluate and isinstance(step.config, ConditionalSFTConfig):
        nodes.append(ask_node(f"{step.label}/ask", step.label, step.config, "eval_prompts"))
    return nodes


def closing_nodes(config: PipelineConfig, steps: Sequence[Node], policies: Iterable[str]) -> list[Node]:
    """The nodes of the evaluation of `policies` and of the publication."""
    assert config.evaluate is not None
    makers = {name: step for step in steps for name in step.shown}
    conditioned = {step.label: step.config for step in steps if isinstance(step.config, ConditionalSFTConfig)}
    compared = Compared(
        policies={name: name for name in policies},
        reward_models=tuple(name for name, step in makers.items() if issubclass(step.output, RewardModelRef)),
        judge=config.judge(),
        conditioned=conditioned,
        held_out={name: f"{name}/ask" for name in conditioned},
    )
    nodes = list(evaluation_nodes(with_parents(config.evaluate, steps), compared))
    if config.publish:
        champion = CHAMPION if CHAMPION in compared.policies else ""
        inputs = {"policy": config.published(), "report": "evaluate", "champion": champion}
        nodes.append(Node("publish", "publish", config.publish, inputs))
    return nodes


def with_parents(config: EvaluationConfig, steps: Sequence[Node]) -> EvaluationConfig:
    """The evaluation, in which a policy of the recipe is compared with the policy that it started from."""
    started: dict[str, str] = {}
    # Of the policies of rounds the last one is compared, under the name of the rounds.
    rounds_shown = [step for step in steps if step.key.startswith("rounds.") and step.shown]
    short = {name: step.shown[0] for step in rounds_shown for name in step.made}
    for step in steps:
        if step.key and step.output is PolicyRef and "policy" in step.inputs:
            policy = str(step.inputs["policy"])
            start = short.get(policy, policy)
            if "/round_" in start:
                continue  # of a round before the last, whose policies are not compared
            rounds = zip(step.shown, [start, *step.shown], strict=False)
            started |= dict.fromkeys(step.shown, start) if step.exported else dict(rounds)
    parents = started | config.evaluate.parents
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"parents": parents})})


def without_pairs(step: Node) -> Node:
    """The step without pairs before its first round, if it is an online loop on the pairs of the data."""
    if step.stage != "online" or step.inputs["preferences"] != "preferences":
        return step
    return replace(step, inputs={**step.inputs, "preferences": ""})


# ---------------------------------------------------------------- the loop


def run_nodes(nodes: Iterable[Node], stages: Stages, made: Mapping[str, ArtifactRef]) -> Made:
    """Run nodes in order, each group as one; return the artifacts of these nodes by label and name."""
    known, results = dict(made), Made()

    def run(members: Sequence[Node]) -> None:
        for node in members:
            ref = run_node(node, stages, known)
            for name in (*node.names, node.label):
                known[name] = results[name] = ref

    for label, found in groupby(list(nodes), key=lambda node: node.group):
        members = list(found)
        if not label:
            run(members)
            continue
        inside = {node.label for node in members}
        outer = dict.fromkeys(name for node in members for name in node.reads_names() if name not in inside)
        stages.group(label, partial(run, members), after=[artifact(name, ArtifactRef, known) for name in outer])
    return results


def run_node(node: Node, stages: Stages, made: Mapping[str, ArtifactRef]) -> ArtifactRef:
    """Run the stage of a node, and return its artifact."""
    declared, given = STAGES[node.stage], dict[str, GivenInput]()
    for name in node.reads():
        kind, names = declared.inputs[name].kind, node.inputs[name]
        if isinstance(names, Mapping):
            given[name] = {used: artifact(read, node.kind(name, read, kind), made) for used, read in names.items()}
        elif names:
            given[name] = artifact(names, kind, made)
    config = node.config
    if isinstance(config, PublishConfig):
        config = config.model_copy(update={"decisions": stages.decisions()})
    placed = replace(stages, seed=stages.seed + node.seed, path=node.key)
    return placed.run_as(node.output, declared, node.label, config, **given)


def artifact(name: str, kind: type[R], made: Mapping[str, ArtifactRef]) -> R:
    """An artifact by the name of its node, or as a part of the prepared data. Raises ConfigError for a missing part."""
    if name not in made:
        label, one = prepared_part(name)
        data = made[label]
        assert isinstance(data, PreparedDataRef)
        return part(data, one, PARTS[one], label)  # type: ignore[return-value]
    found = made[name]
    assert isinstance(found, kind)
    return found


def found_outside(step: Node, inputs: Iterable[str], stages: Stages, made: Mapping[str, ArtifactRef]) -> Made:
    """The results of earlier runs among some inputs of a step. Raises ConfigError for a result that does not exist."""
    found = Made()
    for name in inputs:
        for read in listed(step.inputs[name]):
            label, one = prepared_part(read)
            if read not in made and not (label in made and one in PARTS):
                found[read] = stages.outside(f"{step.path}.{name}", read, step.kind(name, read, step.kinds[name]))
    return found


def check_prompts(step: Node, steps: Sequence[Node], stages: Stages, made: Mapping[str, ArtifactRef]) -> None:
    """Raise ConfigError, before a step samples answers, for a prompt without a rubric that a reward of them reads."""
    rewards = {f"{step.path}.{key}": one for key, one in rewards_in(step.config).items()}
    for other in steps:
        if other.stage == "score" and step.label in listed(other.inputs["generations"]):
            rewards |= {f"{other.path}.{key}": one for key, one in rewards_in(other.config).items()}
    if "prompts" not in step.reads() or not any(list(columns_read(one)) for one in rewards.values()):
        return
    (read,) = listed(step.inputs["prompts"])
    outside = found_outside(step, ["prompts"], stages, made)
    prompts = stages.prompts(artifact(read, PromptsRef, {**outside, **made}))
    sampling = getattr(step.config, "generate", step.config)
    mixture = getattr(step.config, "mixture", {})
    rows = prompts[: getattr(sampling, "max_prompts", 0) or len(prompts)]
    for key, one in rewards.items():
        check_rubrics(one, [row for row in rows if not mixture or mixture.get(row.source)], key=key)
