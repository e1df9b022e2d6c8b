"""Run the steps of a profile: data, the steps of the lifecycle or of a recipe, evaluation.

prepare_data -> sft -> reward_model -+-> rejection sampling -+
             process_reward_model ---+-> conditional SFT ----+
                                     +-> DPO, iterative DPO -+-> evaluate -> publish
                                     +-> PPO ----------------+
                            a policy -+-> distillation ------+
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pipelines.flows.graph import Stages
from pipelines.flows.online import run_online
from pipelines.flows.own_answers import condition_and_imitate, iterate_dpo, sample_and_imitate
from pipelines.flows.profile import PipelineConfig
from pipelines.flows.recipe import PARTS, Step, listed, rewards_in
from pipelines.flows.sections import (
    ConditionalSFTConfig,
    EvaluationConfig,
    IterativeDPORounds,
    OnlineRounds,
    RejectionSamplingConfig,
    RewardModelSection,
)
from pipelines.flows.suites import Candidates, Condition, evaluate_suites, suites_to_avoid
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.rubrics import check_rubrics, columns_read
from rlhf_core.types import (
    CHAMPION,
    ArtifactRef,
    DemonstrationsRef,
    GenerationsRef,
    ModelRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    ReportRef,
    RewardModelRef,
    RolloutsRef,
)
from stages import table
from stages.config.checkpoint import CheckpointConfig
from stages.config.condition import ConditionConfig
from stages.table import STAGES

R = TypeVar("R", bound=ArtifactRef)


@dataclass
class LifecycleState:
    """The artifacts of the lifecycle so far, by the name of the step that made them.

    `conditioned_prompts` holds the held-out prompts of policies that need them in other words, and `conditions` makes
    other prompts so.
    """

    data: PreparedDataRef
    artifacts: dict[str, ArtifactRef]
    evaluated: bool
    """Whether policies are evaluated in the end, on held-out prompts."""
    conditioned_prompts: dict[str, PromptsRef] = field(default_factory=dict)
    conditions: dict[str, Condition] = field(default_factory=dict)

    @property
    def reward_models(self) -> dict[str, RewardModelRef]:
        """The reward models so far."""
        return {name: ref for name, ref in self.artifacts.items() if isinstance(ref, RewardModelRef)}

    def one(self, stages: Stages, step: Step, name: str, kind: type[R]) -> R:
        """Return the input `name` of a step."""
        (read,) = listed(step.inputs[name])
        return self.find(stages, f"{step.path}.{name}", read, kind)

    def many(self, stages: Stages, step: Step, name: str, kind: type[R]) -> dict[str, R]:
        """Return the input `name` of a step that takes several artifacts, by the names that the stage uses."""
        names = step.inputs[name]
        assert isinstance(names, Mapping)
        return {
            used: self.find(stages, f"{step.path}.{name}", read, step.kind(name, read, kind))
            for used, read in names.items()
        }

    def find(self, stages: Stages, key: str, name: str, kind: type[R]) -> R:
        """Return an artifact by the name of its step, as a part of the prepared data, or from outside the run."""
        if name in self.artifacts:
            found = self.artifacts[name]
        elif name in PARTS:
            return part(self.data, name, kind)
        else:
            return stages.outside(key, name, kind)
        assert isinstance(found, kind)
        return found


def lifecycle(config: PipelineConfig, stages: Stages) -> dict[str, PolicyRef]:
    """Run the steps of a profile and the evaluation; return the policies by name, in the order they were made."""
    stages = replace(stages, recipe=frozenset(config.recipe))
    ngram = config.prepare_data.suite_ngram
    avoided = suites_to_avoid(ngram, config.evaluate, stages) if ngram else None
    data = stages.run(table.prepare_data, "prepare_data", config.prepare_data, suites=avoided)
    state = LifecycleState(data, {"base": part(data, "base", PolicyRef)}, evaluated=config.evaluate is not None)
    steps, compared = config.steps(), config.policies()
    for step in steps:
        if step.inputs.get("prompts") in PARTS:  # now, not after the steps before it have run for hours
            check_prompts(step, steps, stages, state)
    for step in steps:
        check_prompts(step, steps, stages, state)
        GROUP_RUNS.get(step.stage, run_stage)(step, stages, state)
    evaluated = {name: ref for name, ref in state.artifacts.items() if name in compared and isinstance(ref, PolicyRef)}
    if config.evaluate:
        published = config.published()
        champion = None if stages.champion is None else stages.champion.of(evaluated[published])
        settings = with_parents(config.evaluate, steps)
        judge = state.reward_models.get(config.judge())
        evaluation = partial(evaluate_lifecycle, settings, stages, state, evaluated, champion, judge)
        read = [*evaluated.values(), *state.reward_models.values(), *state.conditioned_prompts.values()]
        report = stages.group("evaluation", evaluation, after=read)
        if config.publish:
            decided = config.publish.model_copy(update={"decisions": stages.decisions()})
            stages.run(table.publish, "publish", decided, policy=evaluated[published], report=report, champion=champion)
    return evaluated


def with_parents(config: EvaluationConfig, steps: Sequence[Step]) -> EvaluationConfig:
    """Return the evaluation, in which a policy of the recipe is compared with the one that it started from."""
    started: dict[str, str] = {}
    for step in steps:
        if step.key and step.output is PolicyRef and "policy" in step.inputs:
            start = str(step.inputs["policy"])
            rounds = zip(step.made, [start, *step.made], strict=False)
            started |= dict.fromkeys(step.made, start) if step.exported else dict(rounds)
    return config.model_copy(
        update={"evaluate": config.evaluate.model_copy(update={"parents": started | config.evaluate.parents})}
    )


def evaluate_lifecycle(
    config: EvaluationConfig,
    stages: Stages,
    state: LifecycleState,
    policies: dict[str, PolicyRef],
    champion: PolicyRef | None,
    judge: RewardModelRef | None,
) -> ReportRef:
    """Sample and compare all policies on the held-out prompts, and run the suites; return the comparison's report."""
    policies = policies if champion is None else policies | {CHAMPION: champion}
    prompts = part(state.data, "eval_prompts", PromptsRef)
    answers = sample_policies(
        config, stages, policies=policies, prompts=prompts, conditioned_prompts=state.conditioned_prompts
    )
    report = compare_policies(config, stages, policies, answers, judge)
    if config.suites:
        candidates = Candidates(dict(policies), prompts, dict(answers), state.conditions)
        evaluate_suites(config, stages, candidates, state.reward_models)
    return report


def check_prompts(step: Step, steps: Sequence[Step], stages: Stages, state: LifecycleState) -> None:
    """Raise ConfigError, before a step samples answers, for a prompt without a rubric that a reward of them reads."""
    rewards = {f"{step.path}.{key}": one for key, one in rewards_in(step.config).items()}
    for other in steps:
        if other.stage == "score" and step.name in listed(other.inputs["generations"]):
            rewards |= {f"{other.path}.{key}": one for key, one in rewards_in(other.config).items()}
    if "prompts" not in step.reads() or not any(list(columns_read(one)) for one in rewards.values()):
        return
    prompts = stages.prompts(state.one(stages, step, "prompts", PromptsRef))
    sampling = getattr(step.config, "generate", step.config)
    mixture = getattr(step.config, "mixture", {})
    rows = prompts[: getattr(sampling, "max_prompts", 0) or len(prompts)]
    for key, one in rewards.items():
        check_rubrics(one, [row for row in rows if not mixture or mixture.get(row.source)], key=key)


def run_stage(step: Step, stages: Stages, state: LifecycleState) -> None:
    """Run a step that is one stage, or one of a stage's members each."""
    declared, given = STAGES[step.stage], dict[str, Any]()
    for name in step.reads():
        kind = step.kinds[name]
        given[name] = state.many(stages, step, name, kind) if declared.inputs[name].many else None
        if given[name] is None and listed(step.inputs[name]):
            given[name] = state.one(stages, step, name, kind)
    configs = (
        step.config.stage_configs(step.name)
        if isinstance(step.config, RewardModelSection)
        else {step.name: step.config}
    )
    for label, config in configs.items():
        made = stages.run_as(step.output, declared, label, config, **given)
        state.artifacts[step.alias or label] = made
        if step.name in step.made:  # of an ensemble the first serves as the only one
            state.artifacts.setdefault(step.name, made)
    for name, number in step.exported.items():
        trained = state.artifacts[step.name]
        assert isinstance(trained, PolicyRef)
        state.artifacts[name] = stages.run(table.checkpoint, name, CheckpointConfig(step=number), policy=trained)


def learn_from_best(step: Step, stages: Stages, state: LifecycleState) -> None:
    """Fine-tune on the best of the policy's own answers."""
    assert isinstance(step.config, RejectionSamplingConfig)
    inputs = own_answers(step, stages, state)
    imitate = partial(sample_and_imitate, step.config, stages, step.name, *inputs)
    state.artifacts[step.name] = stages.group(step.name, imitate, after=flat(inputs))


def learn_conditionally(step: Step, stages: Stages, state: LifecycleState) -> None:
    """Fine-tune on the policy's own answers conditioned on their scores, and word held-out prompts so."""
    assert isinstance(step.config, ConditionalSFTConfig)
    inputs = own_answers(step, stages, state)
    imitate = partial(condition_and_imitate, step.config, stages, step.name, *inputs)
    state.artifacts[step.name], rollouts = stages.group(step.name, imitate, after=flat(inputs))
    if state.evaluated:
        ask = partial(ask_conditioned, step.config.condition, stages, rollouts)
        held_out = part(state.data, "eval_prompts", PromptsRef)
        state.conditioned_prompts[step.name] = ask(f"{step.name}/ask", held_out)
        state.conditions[step.name] = ask


def learn_from_pairs(step: Step, stages: Stages, state: LifecycleState) -> None:
    """Run rounds of DPO on pairs of the policy's own answers."""
    assert isinstance(step.config, IterativeDPORounds)
    state.artifacts[step.name] = iterate_dpo(step.config, stages, step.name, *own_answers(step, stages, state))


def learn_online(step: Step, stages: Stages, state: LifecycleState) -> None:
    """Run rounds of the online loop."""
    assert isinstance(step.config, OnlineRounds)
    start = state.one(stages, step, "policy", PolicyRef)
    pairs: PreferencesRef | None = None
    if step.inputs["preferences"] == "preferences":  # of the data, which may have none
        pairs = state.data.preferences
    elif step.inputs["preferences"]:
        pairs = state.one(stages, step, "preferences", PreferencesRef)
    state.artifacts |= run_online(
        step.config,
        stages,
        step.name,
        policy=start,
        reference=start,
        reward_start=state.one(stages, step, "reward_start", PolicyRef),
        reward_model=state.one(stages, step, "first_reward_model", RewardModelRef),
        preferences=pairs,
        prompts=state.one(stages, step, "prompts", PromptsRef),
        demonstrations=state.one(stages, step, "demonstrations", DemonstrationsRef)
        if step.config.uses_demonstrations
        else None,
    )


GROUP_RUNS: Mapping[str, Callable[[Step, Stages, LifecycleState], None]] = {
    "rejection_sampling": learn_from_best,
    "conditional_sft": learn_conditionally,
    "iterative_dpo": learn_from_pairs,
    "online": learn_online,
}
"""Functions of the steps that run several stages."""


def own_answers(step: Step, stages: Stages, state: LifecycleState) -> tuple[PolicyRef, PromptsRef, dict[str, ModelRef]]:
    """Return the inputs of a step that learns from a policy's own answers: policy, prompts, reward models."""
    return (
        state.one(stages, step, "policy", PolicyRef),
        state.one(stages, step, "prompts", PromptsRef),
        state.many(stages, step, "reward_models", ModelRef),
    )


def flat(inputs: tuple[PolicyRef, PromptsRef, dict[str, ModelRef]]) -> list[ArtifactRef]:
    """Return the artifacts among the inputs of `own_answers`."""
    policy, prompts, reward_models = inputs
    return [policy, prompts, *reward_models.values()]


def ask_conditioned(
    config: ConditionConfig, stages: Stages, rollouts: RolloutsRef, label: str, prompts: PromptsRef
) -> PromptsRef:
    """Return the prompts that request the best level of the rewards in `rollouts`."""
    return stages.run_as(PromptsRef, table.condition, label, config, rollouts=rollouts, prompts=prompts)


def sample_policies(
    config: EvaluationConfig,
    stages: Stages,
    *,
    policies: dict[str, PolicyRef],
    prompts: PromptsRef,
    conditioned_prompts: dict[str, PromptsRef],
) -> dict[str, GenerationsRef]:
    """Sample every policy's answers to the held-out prompts, or to its `conditioned_prompts`."""
    best_of = config.evaluate.best_of
    generations = {}
    for name, policy in policies.items():
        samples = best_of[name] if name in best_of else config.generate.samples_per_prompt
        generate = config.generate.model_copy(update={"samples_per_prompt": samples})
        generations[name] = stages.run(
            table.generate,
            f"evaluate/{name}/generate",
            generate,
            policy=policy,
            prompts=prompts,
            asked=conditioned_prompts[name] if name in conditioned_prompts else None,
        )
    return generations


def compare_policies(
    config: EvaluationConfig,
    stages: Stages,
    policies: dict[str, PolicyRef],
    answers: dict[str, GenerationsRef],
    reward_model: RewardModelRef | None,
) -> ReportRef:
    """Compare the policies by their answers to the held-out prompts."""
    return stages.run(
        table.evaluate,
        "evaluate",
        config.evaluate.of(answers),
        generations=answers,
        reference=policies[config.evaluate.reference],
        reward_model=reward_model,
    )


def evaluate_policies(
    config: EvaluationConfig,
    stages: Stages,
    *,
    policies: dict[str, PolicyRef],
    prompts: PromptsRef,
    conditioned_prompts: dict[str, PromptsRef],
    reward_models: dict[str, RewardModelRef],
) -> ReportRef:
    """Sample every policy's answers to the held-out prompts (or to its `conditioned_prompts`), and compare them."""
    answers = sample_policies(
        config, stages, policies=policies, prompts=prompts, conditioned_prompts=conditioned_prompts
    )
    return compare_policies(config, stages, policies, answers, reward_models.get("reward_model"))


def part(data: PreparedDataRef, name: str, kind: type[R]) -> R:
    """Return an artifact of the prepared data by name; raise ConfigError if this data has none."""
    ref = getattr(data, name)
    if not isinstance(ref, kind):
        raise ConfigError(
            f"prepare_data.{name}: has no rows, and a later stage reads them; "
            f"give {name} a larger share in `use` of a source, fix what drops its rows (listed in validation.json of prepare_data), "
            "or remove the section that reads it from the profile"
        )
    return ref
