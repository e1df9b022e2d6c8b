"""Run the suites of `[[evaluate.suites]]` on every policy and on the baselines, and report on all of them together.

A suite with the held-out prompts and the sampling of `[evaluate.generate]` reads the answers that the report of `[evaluate]`
is about; suites with the same prompts and sampling of their own share theirs.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pipelines.flows.graph import Stages
from pipelines.flows.sections import EvaluationConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import CHAMPION, GenerationsRef, PolicyRef, PromptsRef, ReportRef, RewardModelRef
from stages import table
from stages.config.evaluate_harness import HarnessSuite
from stages.config.evaluate_suite import AnswerSuite, JudgeSuite, RewardModelSuite
from stages.config.generate import GenerateConfig
from stages.config.import_policy import ImportPolicyConfig
from stages.config.report_suites import ReportSuitesConfig
from stages.config.suite_prompts import SuitePromptsConfig

logger = logging.getLogger(__name__)

PARENT = "parent"
Condition: TypeAlias = Callable[[str, PromptsRef], PromptsRef]
"""Returns the prompts for a policy that was trained on conditioned ones; a stage of the label."""


@dataclass
class Candidates:
    """The policies that are evaluated, and their answers so far by prompts and sampling."""

    policies: dict[str, PolicyRef]
    prompts: PromptsRef
    """The held-out prompts."""
    held_out: dict[str, GenerationsRef]
    """The answers to the held-out prompts."""
    conditioned: Mapping[str, Condition] = field(default_factory=dict)
    answers: dict[tuple[SuitePromptsConfig | None, str], dict[str, GenerationsRef]] = field(default_factory=dict)


def import_baselines(config: EvaluationConfig, stages: Stages, candidates: Candidates) -> None:
    """Add the policies of `[[evaluate.baselines]]`, with their answers to the held-out prompts if a suite reads these."""
    for baseline in config.baselines:
        policy = stages.run(
            table.import_policy, f"evaluate/{baseline.name}/import", ImportPolicyConfig(model=baseline.model)
        )
        candidates.policies[baseline.name] = policy
        if any(reads_held_out(config, suite) for suite in config.suites):
            candidates.held_out[baseline.name] = stages.run(
                table.generate,
                f"evaluate/{baseline.name}/generate",
                config.generate,
                policy=policy,
                prompts=candidates.prompts,
            )


def evaluate_suites(
    config: EvaluationConfig, stages: Stages, candidates: Candidates, reward_models: Mapping[str, RewardModelRef]
) -> ReportRef | None:
    """Run every suite on every candidate; return the report over all of them, None if there is nothing to report."""
    import_baselines(config, stages, candidates)
    results: dict[str, ReportRef] = {}
    for suite in config.suites:
        label = f"evaluate/suites/{suite.name}"
        if isinstance(suite, HarnessSuite):
            for name, policy in candidates.policies.items():
                results[f"{suite.name}/{name}"] = stages.run(
                    table.evaluate_harness, f"{label}/{name}", suite, policy=policy
                )
        else:
            results |= evaluate_answers(config, suite, stages, candidates, reward_models)
    if not results:
        return None
    about = ReportSuitesConfig(
        reference=config.evaluate.reference,
        regressions_shown=config.evaluate.samples_shown,
        opponents={
            f"{suite.name}/{name}": opponent_of(config, suite, name)
            for suite in config.suites
            for name in candidates.policies
            if isinstance(suite, JudgeSuite) and f"{suite.name}/{name}" in results
        },
    )
    return stages.run(table.report_suites, "evaluate/suites", about, results=results)


def evaluate_answers(
    config: EvaluationConfig,
    suite: AnswerSuite,
    stages: Stages,
    candidates: Candidates,
    reward_models: Mapping[str, RewardModelRef],
) -> dict[str, ReportRef]:
    """Return `<suite>/<policy>` -> the report of a suite that measures answers."""
    label = f"evaluate/suites/{suite.name}"
    model = reward_model_of(suite, reward_models)
    answers = answers_to(config, suite, stages, candidates)
    # What the answers were drawn from is in their digest; the stage reads neither field.
    measure = suite.model_copy(update={"prompts": None, "generate": None})
    results = {}
    for name, generations in answers.items():
        opponent = None
        if isinstance(suite, JudgeSuite):
            against = opponent_of(config, suite, name)
            if against not in answers:
                continue  # the champion, before there is one; or a policy without a parent
            opponent = answers[against]
        results[f"{suite.name}/{name}"] = stages.run(
            table.evaluate_suite,
            f"{label}/{name}",
            measure,
            generations=generations,
            opponent=opponent,
            reward_model=model,
        )
    return results


def answers_to(
    config: EvaluationConfig, suite: AnswerSuite, stages: Stages, candidates: Candidates
) -> dict[str, GenerationsRef]:
    """Return the answers of every candidate to the prompts of a suite, drawn once for all suites that want the same."""
    if reads_held_out(config, suite):
        return candidates.held_out
    generate = suite.generate or config.generate
    key = (suite.prompts, generate.model_dump_json())
    if key not in candidates.answers:
        candidates.answers[key] = sample_candidates(config, suite, generate, stages, candidates)
    return candidates.answers[key]


def prompts_of(config: EvaluationConfig, suite: AnswerSuite) -> SuitePromptsConfig | None:
    """Return the prompts of a suite, with all that the suites of the same prompts read in their labels."""
    if suite.prompts is None:
        return None
    kinds = {other.type for other in config.suites if isinstance(other, AnswerSuite) and other.prompts == suite.prompts}
    return suite.prompts.model_copy(update={"label_kinds": tuple(sorted(kinds & {"instructions", "refusal"}))})


def suites_to_avoid(ngram: int, config: EvaluationConfig | None, stages: Stages) -> dict[str, PromptsRef]:
    """Return the prompts of the suites that have some of their own, by suite; training rows are compared with them.

    Raises ConfigError if there are none. Those of lm_eval are in the harness, and are left out with a warning.
    """
    key, found = "prepare_data.suite_ngram", dict[str, PromptsRef]()
    for suite in config.suites if config else ():
        if isinstance(suite, HarnessSuite):
            logger.warning(
                "%s: training rows are not compared with the tasks of the suite %s (lm_eval)", key, suite.name
            )
        elif config and (own := prompts_of(config, suite)):
            found[suite.name] = stages.run(table.suite_prompts, f"prepare_data/suites/{suite.name}", own)
    if not found:
        rule, remedy = "no suite has prompts of its own", "add [[evaluate.suites]] with prompts, or set it to 0"
        raise ConfigError(key, ngram, rule, remedy)
    return found


def sample_candidates(
    config: EvaluationConfig, suite: AnswerSuite, generate: GenerateConfig, stages: Stages, candidates: Candidates
) -> dict[str, GenerationsRef]:
    """Draw the answers of every candidate to a suite's prompts."""
    label, own = f"evaluate/suites/{suite.name}", prompts_of(config, suite)
    prompts = stages.run(table.suite_prompts, f"{label}/prompts", own) if own else candidates.prompts
    return {
        name: stages.run(
            table.generate,
            f"{label}/{name}/generate",
            generate,
            policy=policy,
            prompts=prompts,
            asked=candidates.conditioned[name](f"{label}/{name}/ask", prompts)
            if name in candidates.conditioned
            else None,
        )
        for name, policy in candidates.policies.items()
    }


def reads_held_out(config: EvaluationConfig, suite: AnswerSuite | HarnessSuite) -> bool:
    """Return whether a suite reads the answers of `[evaluate.generate]` to the held-out prompts."""
    return not isinstance(suite, HarnessSuite) and suite.prompts is None and suite.generate in (None, config.generate)


def reward_model_of(suite: AnswerSuite, reward_models: Mapping[str, RewardModelRef]) -> RewardModelRef | None:
    """Return the reward model of a suite that has one; raise ConfigError if the pipeline makes none of that name."""
    if not isinstance(suite, RewardModelSuite):
        return None
    if suite.model not in reward_models:
        rule = f"this profile makes {', '.join(reward_models) or 'no reward model'}"
        raise ConfigError(
            f"evaluate.suites.{suite.name}.model", suite.model, rule, "name one of them, or add [reward_model]"
        )
    return reward_models[suite.model]


def opponent_of(config: EvaluationConfig, suite: JudgeSuite, name: str) -> str:
    """Return whom a judge compares `name` with; "" for the opponent itself and for a policy without a parent."""
    against = suite.against
    if against == PARENT:
        parents, reference = config.evaluate.parents, config.evaluate.reference
        against = parents[name] if name in parents else reference
    return "" if against == name or (name == CHAMPION and suite.against == PARENT) else against
