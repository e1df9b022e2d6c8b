"""Evaluation suites: one policy's answers, measured in one way, with intervals over prompts.

A suite measures with a function (pass@k, gold, custom), a reward model, verifiable instructions, refusals, or a judge
who compares the answers with an opponent's answers. Suites of EleutherAI's harness are the stage `evaluate_harness`.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlhf_core.annotation.judge import JudgingStopped, ask_judge, judge_report, write_verdicts
from rlhf_core.annotation.proposing import Comparison
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_generations, read_index
from rlhf_core.errors import DataError
from rlhf_core.evaluation.intervals import bounds_of
from rlhf_core.rewards.model import Contract, score_with_reward_model, verify_contract
from rlhf_core.rewards.terms import open_elsewhere
from rlhf_core.stage.context import StageContext
from rlhf_core.suites.results import (
    HEADLINE,
    MEASURES,
    OVER_REFUSAL,
    UNSAFE_COMPLIANCE,
    Measured,
    check_counts,
    check_suite_rows,
    instruction_rows,
    length_controlled,
    mean_rows,
    pass_at_k_rows,
    record_suite,
    refusal_rows,
    row_of,
)
from rlhf_core.types import Generation, GenerationsRef, ReportRef, RewardModelRef, derive_seed
from stages.evaluate_suite import (
    RUBRIC,
    AnswerSuite,
    CustomSuite,
    FunctionSuite,
    GoldSuite,
    InstructionsSuite,
    JudgeSuite,
    PassAtKSuite,
    RefusalSuite,
    RewardModelSuite,
)
from stages.rubrics import rubric_text

VERDICTS = "verdicts.jsonl"
WINS: Mapping[str, float] = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}


def run(
    config: AnswerSuite,
    *,
    generations: GenerationsRef,
    opponent: GenerationsRef | None = None,
    reward_model: RewardModelRef | None = None,
    context: StageContext,
) -> ReportRef:
    """Evaluate one policy: report.json with every measure, rows.jsonl with a line per prompt."""
    folder = context.path(generations)
    everything = read_generations(folder)
    rows = [one for one in everything if not one.completion.failure]
    counted = everything if isinstance(config, (PassAtKSuite, JudgeSuite)) else rows  # where a failure is a loss
    if everything and not counted:
        rule = f"all {len(everything)} episodes failed; the first: {everything[0].completion.failure}"
        raise DataError("evaluate.suites", config.name, rule, "fix the environment, and generate again")
    result = measured(config, counted, opponent, reward_model, context)
    check_suite_rows(result.rows, rule="no prompt has a value", remedy="give the prompts of the suite labels")
    facts = {"answers": len(rows), "failed": len(everything) - len(rows), "prompts": len(result.rows)}
    result = replace(result, facts=facts | dict(result.facts))
    metrics = record_suite(result, kind=config.type, policy=read_index(folder)["policy"], context=context)
    return context.commit(ReportRef, metrics=metrics)


def measured(
    config: AnswerSuite,
    rows: Sequence[Generation],
    opponent: GenerationsRef | None,
    reward_model: RewardModelRef | None,
    context: StageContext,
) -> Measured:
    """Measure the answers according to the kind of suite."""
    match config:
        case PassAtKSuite():
            check_counts(rows, config.k)
            values = values_with_failures(config, rows, context)
            found = pass_at_k_rows(rows, values, config.k, threshold=config.threshold)
            return Measured(tuple(found), f"pass_at_{config.k[0]}", shares=tuple(f"pass_at_{k}" for k in config.k))
        case GoldSuite():
            return of_values(rows, gold_values(config, rows, context), "gold")
        case CustomSuite():
            result = of_values(rows, function_values(config, rows, context), config.measure)
            return replace(result, lower_is_better=(config.measure,)) if config.lower_is_better else result
        case RewardModelSuite():
            assert reward_model is not None
            scores = reward_scores(reward_model, rows, context)
            return Measured(tuple(mean_rows(rows, scores, "reward_model")), "reward_model")
        case InstructionsSuite():
            return Measured(tuple(instruction_rows(rows)), HEADLINE, shares=MEASURES)
        case RefusalSuite():
            found = refusal_rows(rows, config.phrases, characters=config.characters)
            has = {name for row in found for name in row.values}
            headline = UNSAFE_COMPLIANCE if UNSAFE_COMPLIANCE in has else OVER_REFUSAL
            rates = (OVER_REFUSAL, UNSAFE_COMPLIANCE)
            return Measured(tuple(found), headline, rates, shares=rates)
        case JudgeSuite():
            assert opponent is not None
            return compared(config, rows, opponent, context)


# ---------------------------------------------------------------- values of answers


def of_values(rows: Sequence[Generation], values: Sequence[float | None], measure: str) -> Measured:
    """Summarize the values, one for each answer, as a measure; it is a share if all of them are 0 or 1."""
    found = mean_rows(rows, values, measure)
    is_share = bounds_of([value for value in values if value is not None]) is not None
    return Measured(tuple(found), measure, shares=(measure,) if is_share else ())


def function_values(config: FunctionSuite, rows: Sequence[Generation], context: StageContext) -> list[float | None]:
    """The function's value for each answer; None where it does not apply."""
    spec = FunctionReward(
        function=config.function,
        arguments=config.arguments,
        protocol=config.protocol,
        timeout_s=config.timeout_s,
        workers=config.workers,
    )
    with ExitStack() as leases:
        reward = open_elsewhere(
            config.name, spec, context.work / "values", leases, functions=context.functions, notes=context.notes
        )
        return list(reward(rows).values)


def values_with_failures(config: PassAtKSuite, rows: Sequence[Generation], context: StageContext) -> list[float | None]:
    """The function's value for each answer; a failed episode counts as wrong, unless its prompt has no values."""
    kept = [place for place, one in enumerate(rows) if not one.completion.failure]
    found = (
        dict(zip(kept, function_values(config, [rows[place] for place in kept], context), strict=True)) if kept else {}
    )
    left_out = {rows[place].prompt.id for place, value in found.items() if value is None}
    left_out -= {rows[place].prompt.id for place, value in found.items() if value is not None}
    wrong = [None if one.prompt.id in left_out else -math.inf for one in rows]
    return [found[place] if place in found else wrong[place] for place in range(len(rows))]


def gold_values(config: GoldSuite, rows: Sequence[Generation], context: StageContext) -> list[float | None]:
    """Gold reward of each answer. Raises DataError for an answer without one."""
    values = function_values(config, rows, context)
    for value, row in zip(values, rows, strict=True):
        if value is None:
            key, rule = f"evaluate.suites.{config.name}.function", f"gives no value for the prompt {row.prompt.id}"
            raise DataError(key, config.function, rule, 'return a number, or use type = "custom"')
    return values


def reward_scores(ref: RewardModelRef, rows: Sequence[Generation], context: StageContext) -> list[float]:
    """The reward model's score of each answer."""
    folder = context.path(ref)
    contract, chat = Contract.read(folder), ChatTemplate.load(folder)
    with context.runtime.trainer("reward_model", context.model(ref, "score"), None) as trainer:
        verify_contract(trainer, contract)
        return score_with_reward_model(trainer, chat, rows, max_length=contract.max_length)


# ---------------------------------------------------------------- pairwise


def compared(
    config: JudgeSuite, rows: Sequence[Generation], opponent: GenerationsRef, context: StageContext
) -> Measured:
    """Judge the first answer to each prompt against the opponent's first answer, in both orders, and compute win rates.

    A failed episode of one side is its loss, of both sides a tie; the judge does not see them.
    """
    ours, theirs = first_answers(rows), first_answers(read_generations(context.path(opponent)))
    pairs = [(mine, theirs[prompt]) for prompt, mine in ours.items() if prompt in theirs]
    failed = [(bool(mine.completion.failure), bool(other.completion.failure)) for mine, other in pairs]
    if not pairs:
        key, rule = f"evaluate.suites.{config.name}.against", "has answered none of the prompts of this policy"
        raise DataError(key, config.against, rule, "give both the same prompts")
    asked = [pair for pair, one in zip(pairs, failed, strict=True) if not any(one)]
    comparisons = [comparison(mine, other, seed=context.seed) for mine, other in asked]
    wins, about_judge = judged(config, comparisons, context) if comparisons else ([], {})
    by_judge = {
        one.id: win if one.first_policy == "ours" else 1 - win for one, win in zip(comparisons, wins, strict=True)
    }
    preferences = [
        by_judge[mine.prompt.id] if mine.prompt.id in by_judge else (1 + theirs_failed - ours_failed) / 2
        for (mine, _), (ours_failed, theirs_failed) in zip(pairs, failed, strict=True)
    ]
    # A failure has no length.
    both = [
        (0, 0) if any(one) else (len(pair[0].completion.text), len(pair[1].completion.text))
        for pair, one in zip(pairs, failed, strict=True)
    ]
    lengths, their_lengths = [mine for mine, _ in both], [other for _, other in both]
    found = [row_of(mine, {"win_rate": value}) for (mine, _), value in zip(pairs, preferences, strict=True)]
    controlled = length_controlled(preferences, lengths, their_lengths)
    facts = {
        "opponent": read_index(context.path(opponent))["policy"],
        "unmatched": len(ours.keys() ^ theirs.keys()),
        "opponent_failed": sum(theirs_failed for _, theirs_failed in failed),
        "characters": sum(lengths) / max(1, len(asked)),
        "opponent_characters": sum(their_lengths) / max(1, len(asked)),
        "judge": about_judge,
    }
    measures = {"length_controlled_win_rate": controlled}
    return Measured(tuple(found), "length_controlled_win_rate", (), measures, facts, ("win_rate",))


def first_answers(rows: Sequence[Generation]) -> dict[str, Generation]:
    """The first answer to each prompt. It may be a failed episode: taking a later answer would grant a second try."""
    found: dict[str, Generation] = {}
    for one in rows:
        found.setdefault(one.prompt.id, one)
    return found


def comparison(mine: Generation, other: Generation, *, seed: int) -> Comparison:
    """Build the comparison of two answers. Seed and prompt decide the side of ours; both orders are judged anyway."""
    prompt = mine.prompt
    sides = [("ours", mine.completion.text), ("theirs", other.completion.text)]
    if derive_seed(seed, "judge", prompt.id) % 2:
        sides.reverse()
    (first_policy, first), (second_policy, second) = sides
    return Comparison(
        prompt.id, prompt.messages, prompt.label, prompt.source, first, second, first_policy, second_policy
    )


def judged(
    config: JudgeSuite, comparisons: Sequence[Comparison], context: StageContext
) -> tuple[list[float], dict[str, Any]]:
    """Judge each comparison: how far its first side won, and the report on the judge.

    A stage that is killed keeps the verdicts so far.
    """
    try:
        found = ask_judge(
            config.judge,
            comparisons,
            rubric=rubric_text(config.judge, RUBRIC, context.files),
            key=f"evaluate.suites.{config.name}.judge",
            journal=context.work / VERDICTS,
            stopping=context.stopping,
            progress=context.progress,
        )
    except JudgingStopped:
        context.stop()
    write_verdicts(context.out / VERDICTS, found.verdicts)
    choices = {one.comparison: one.choice for one in found.judgments}
    return [WINS[choices[one.id]] for one in comparisons], judge_report(found.verdicts, comparisons)
