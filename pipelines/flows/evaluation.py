"""The nodes that sample and compare all policies, and the suites of `[[evaluate.suites]]` with a report over all of them.

A suite with the held-out prompts and the sampling of `[evaluate.generate]` reads the same answers as the report of
`[evaluate]`. Suites with the same prompts and the same sampling share their answers.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pipelines.flows.groups import ask_node
from pipelines.flows.nodes import Names, Node
from pipelines.flows.sections import ConditionalSFTConfig, EvaluationConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import CHAMPION
from stages.evaluate_harness import HarnessSuite
from stages.evaluate_suite import AnswerSuite, JudgeSuite, RewardModelSuite
from stages.generate import GenerateConfig
from stages.import_policy import ImportPolicyConfig
from stages.report_suites import ReportSuitesConfig
from stages.suite_prompts import SuitePromptsConfig

logger = logging.getLogger(__name__)

PARENT = "parent"
GROUP = "evaluation"
HELD_OUT = "eval_prompts"


@dataclass(frozen=True)
class Compared:
    """The policies and models of an evaluation, by the names of the nodes that make them."""

    policies: Mapping[str, str]
    """Policy -> name of its node."""
    reward_models: tuple[str, ...] = ()
    judge: str = ""
    """The reward model that judges all answers; "" for none."""
    conditioned: Mapping[str, ConditionalSFTConfig] = field(default_factory=dict)
    """Policies that are asked for the best level, and the options of their training."""
    held_out: Mapping[str, str] = field(default_factory=dict)
    """Policy -> node of its held-out prompts, if they are in other words than `prompts`."""


def evaluation_nodes(config: EvaluationConfig, compared: Compared) -> Iterator[Node]:
    """Yield the nodes that sample and compare the policies, and the nodes of all suites."""
    answers = {}
    for name, policy in compared.policies.items():
        samples = config.evaluate.best_of.get(name, config.generate.samples_per_prompt)
        sampling = config.generate.model_copy(update={"samples_per_prompt": samples})
        answers[name] = f"evaluate/{name}/generate"
        yield answer_node(answers[name], sampling, policy, HELD_OUT, compared.held_out.get(name, ""))
    reference = compared.policies[config.evaluate.reference]
    inputs: dict[str, Names] = {"generations": answers, "reference": reference, "reward_model": compared.judge}
    yield Node("evaluate", "evaluate", config.evaluate.of(answers), inputs, group=GROUP)
    if config.suites:
        yield from suite_nodes(config, compared, answers)


def answer_node(label: str, sampling: GenerateConfig, policy: str, prompts: str, reworded: str = "") -> Node:
    """The answers of a policy."""
    inputs = {"policy": policy, "prompts": prompts, "asked": reworded}
    return Node(label, "generate", sampling, inputs, group=GROUP)


def suite_nodes(config: EvaluationConfig, compared: Compared, answers: Mapping[str, str]) -> Iterator[Node]:
    """Yield the nodes of every suite for every policy and baseline, and the report over all of them."""
    policies, held_out = dict(compared.policies), dict(answers)
    for baseline in config.baselines:
        policies[baseline.name] = f"evaluate/{baseline.name}/import"
        yield Node(policies[baseline.name], "import_policy", ImportPolicyConfig(model=baseline.model), group=GROUP)
        if any(reads_held_out(config, suite) for suite in config.suites):
            held_out[baseline.name] = f"evaluate/{baseline.name}/generate"
            yield answer_node(held_out[baseline.name], config.generate, policies[baseline.name], HELD_OUT)
    results, opponents = dict[str, str](), dict[str, str]()
    sampled: dict[tuple[SuitePromptsConfig | None, str], dict[str, str]] = {}
    for suite in config.suites:
        label = f"evaluate/suites/{suite.name}"
        if isinstance(suite, HarnessSuite):
            for name, policy in policies.items():
                results[f"{suite.name}/{name}"] = f"{label}/{name}"
                yield Node(f"{label}/{name}", "evaluate_harness", suite, {"policy": policy}, group=GROUP)
            continue
        model = reward_model_of(suite, compared.reward_models)
        found = held_out
        if not reads_held_out(config, suite):
            drawn = (suite.prompts, (suite.generate or config.generate).model_dump_json())
            if drawn not in sampled:
                yield from suite_answers(config, suite, policies, compared)
                sampled[drawn] = {name: f"{label}/{name}/generate" for name in policies}
            found = sampled[drawn]
        # The prompts and the sampling are in the digests of the answers; the stage reads neither field.
        measure = suite.model_copy(update={"prompts": None, "generate": None})
        for name, generations in found.items():
            against = ""
            if isinstance(suite, JudgeSuite):
                against = opponent_of(config, suite, name)
                if against not in found:
                    continue  # the champion, before one exists; or a policy without a parent
                opponents[f"{suite.name}/{name}"] = against
            results[f"{suite.name}/{name}"] = f"{label}/{name}"
            inputs = {"generations": generations, "opponent": found.get(against, ""), "reward_model": model}
            yield Node(f"{label}/{name}", "evaluate_suite", measure, inputs, group=GROUP)
    if results:
        shown = config.evaluate.samples_shown
        about = ReportSuitesConfig(reference=config.evaluate.reference, regressions_shown=shown, opponents=opponents)
        yield Node("evaluate/suites", "report_suites", about, {"results": results}, group=GROUP)


def suite_answers(
    config: EvaluationConfig, suite: AnswerSuite, policies: Mapping[str, str], compared: Compared
) -> Iterator[Node]:
    """Yield the nodes that draw every policy's answers to the prompts of a suite."""
    label, own, prompts = f"evaluate/suites/{suite.name}", prompts_of(config, suite), HELD_OUT
    if own:
        prompts = f"{label}/prompts"
        yield Node(prompts, "suite_prompts", own, group=GROUP)
    for name, policy in policies.items():
        reworded = ""
        if name in compared.conditioned:
            reworded = f"{label}/{name}/ask"
            yield ask_node(reworded, name, compared.conditioned[name], prompts, GROUP)
        yield answer_node(f"{label}/{name}/generate", suite.generate or config.generate, policy, prompts, reworded)


def prompts_of(config: EvaluationConfig, suite: AnswerSuite) -> SuitePromptsConfig | None:
    """The prompts of a suite, with all labels that suites of the same prompts read."""
    if suite.prompts is None:
        return None
    kinds = {other.type for other in config.suites if isinstance(other, AnswerSuite) and other.prompts == suite.prompts}
    return suite.prompts.model_copy(update={"label_kinds": tuple(sorted(kinds & {"instructions", "refusal"}))})


def suites_to_avoid(ngram: int, config: EvaluationConfig | None) -> Iterator[Node]:
    """Yield the prompts of suites with separate prompts, which training rows are compared with.

    Raises ConfigError if no suite has any. The prompts of lm_eval are in the harness; they are left out with a warning.
    """
    key, found = "prepare_data.suite_ngram", False
    for suite in config.suites if config else ():
        if isinstance(suite, HarnessSuite):
            logger.warning(
                "%s: training rows are not compared with the tasks of the suite %s (lm_eval)", key, suite.name
            )
        elif config and (own := prompts_of(config, suite)):
            found = True
            yield Node(f"prepare_data/suites/{suite.name}", "suite_prompts", own)
    if not found:
        rule, remedy = "no suite has prompts of its own", "add [[evaluate.suites]] with prompts, or set it to 0"
        raise ConfigError(key, ngram, rule, remedy)


def reads_held_out(config: EvaluationConfig, suite: AnswerSuite | HarnessSuite) -> bool:
    """True if a suite reads the answers of `[evaluate.generate]` to the held-out prompts."""
    return not isinstance(suite, HarnessSuite) and suite.prompts is None and suite.generate in (None, config.generate)


def reward_model_of(suite: AnswerSuite, reward_models: Iterable[str]) -> str:
    """The reward model of a suite, "" if it needs none. Raises ConfigError if the pipeline makes none of that name."""
    if not isinstance(suite, RewardModelSuite):
        return ""
    if suite.model not in reward_models:
        rule = f"this profile makes {', '.join(reward_models) or 'no reward model'}"
        raise ConfigError(
            f"evaluate.suites.{suite.name}.model", suite.model, rule, "name one of them, or add [reward_model]"
        )
    return suite.model


def opponent_of(config: EvaluationConfig, suite: JudgeSuite, name: str) -> str:
    """The policy that a judge compares `name` with; "" for the opponent itself and for a policy without a parent."""
    against = suite.against
    if against == PARENT:
        parents, reference = config.evaluate.parents, config.evaluate.reference
        against = parents[name] if name in parents else reference
    return "" if against == name or (name == CHAMPION and suite.against == PARENT) else against
