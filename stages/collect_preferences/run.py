"""Collection of preferences: annotators judge comparisons, and their judgments become training pairs.

While people have not judged enough, the stage ends as waiting. Run the same command again to resume it when they have.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.annotation.agreement import judgment_report
from rlhf_core.annotation.annotators import NotJudgedYet, ask_program, rewards_of_sides
from rlhf_core.annotation.judge import JudgingStopped, ask_judge, judge_report, write_verdicts
from rlhf_core.annotation.people import ask_people, condition
from rlhf_core.annotation.proposing import Comparison, Judgment, read_comparisons, write_judgments
from rlhf_core.config.annotators import FileAnnotator, JudgeAnnotator, ProgramAnnotator, ReviewAnnotator
from rlhf_core.data.mixing import held_out
from rlhf_core.data.tables import Preference, write_preferences
from rlhf_core.errors import DataError
from rlhf_core.interfaces import Metrics
from rlhf_core.stage.context import StageContext
from rlhf_core.types import ComparisonsRef, Message, PreferencesRef, derive_seed
from stages.collect_preferences import RUBRIC, CollectPreferencesConfig
from stages.rubrics import rubric_text

logger = logging.getLogger(__name__)

TABLE_ROWS = 16  # in the tracker
VERDICTS = "verdicts.jsonl"
"""Verdicts of a language model, by comparison and order."""
GOLD_TIMEOUT_S = 600.0  # of a known reward for all answers


def run(config: CollectPreferencesConfig, *, comparisons: ComparisonsRef, context: StageContext) -> PreferencesRef:
    """Collect judgments and write the preferred pairs, `judgments.parquet`, and `report.json` about the annotators."""
    asked = read_comparisons(context.path(comparisons))
    judgments, extra = judge(config, asked, comparisons, context)
    gold = known_rewards(config, asked, context)
    report = judgment_report(asked, judgments, gold=gold) | extra
    trusted = attentive(config, judgments, report)
    verdicts = settled(config, asked, trusted)
    if not verdicts.pairs:
        rule = f"the {len(trusted)} judgments that count prefer no answer"
        raise DataError(context.label, len(judgments), rule, "propose more pairs, or lower min_attention")
    counts = write_pairs(config, verdicts.pairs, context)
    write_judgments(context.out, judgments)
    (context.out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    context.tracker.file(context.out / "report.json", "annotators")
    record_table(verdicts, context)
    metrics = counts | verdicts.dropped | headline(report)
    metrics |= {"judgments/trusted": float(len(trusted)), "judgments/all": float(len(judgments))}
    by_people = isinstance(config.annotator, FileAnnotator | ReviewAnnotator)
    return context.commit(PreferencesRef, metrics=metrics, pin="judgments of people" if by_people else "")


def judge(
    config: CollectPreferencesConfig, asked: Sequence[Comparison], comparisons: ComparisonsRef, context: StageContext
) -> tuple[list[Judgment], dict[str, Any]]:
    """Collect the judgments of the annotator, and its part of the report.

    The stage ends as waiting while people have not judged enough.
    """
    annotator, name = config.annotator, comparisons.digest[:12]
    match annotator:
        case ProgramAnnotator():
            return ask_program(annotator, asked, code=context.functions, notes=context.notes, seed=context.seed), {}
        case JudgeAnnotator():
            return judged_by_model(annotator, asked, context)
        case FileAnnotator() | ReviewAnnotator():
            try:
                return ask_people(annotator, asked, name=name, uri=context.tracker.uri)
            except NotJudgedYet as missing:
                context.wait(str(missing), condition(annotator, context.path(comparisons), name=name))


def judged_by_model(
    config: JudgeAnnotator, asked: Sequence[Comparison], context: StageContext
) -> tuple[list[Judgment], dict[str, Any]]:
    """Judge with a language model, and report on it. A killed stage keeps the verdicts that it has received."""
    path = f"{context.label.replace('/', '.')}.annotator"
    try:
        judged = ask_judge(
            config,
            asked,
            rubric=rubric_text(config, RUBRIC, context.files),
            key=path,
            journal=context.work / VERDICTS,
            stopping=context.stopping,
            progress=context.progress,
        )
    except JudgingStopped:
        context.stop()
    context.failed(0, {"annotator": (len(judged.failures), len(asked))})
    write_verdicts(context.out / VERDICTS, judged.verdicts)
    context.tracker.file(context.out / VERDICTS, "annotators")
    for reason, count in Counter(judged.failures.values()).most_common(1):
        logger.warning("%s: %d comparisons got no verdict, e.g. (%d) %s", path, len(judged.failures), count, reason)
    return judged.judgments, {"judge": judge_report(judged.verdicts, asked)}


def known_rewards(
    config: CollectPreferencesConfig, asked: Sequence[Comparison], context: StageContext
) -> dict[str, float]:
    """Reward difference (first side minus second side) of each comparison; {} without a known reward."""
    if not config.gold:
        return {}
    pairs = rewards_of_sides(config.gold, asked, code=context.functions, notes=context.notes, timeout_s=GOLD_TIMEOUT_S)
    return {one.id: first - second for one, (first, second) in zip(asked, pairs, strict=True)}


def attentive(
    config: CollectPreferencesConfig, judgments: Sequence[Judgment], report: Mapping[str, object]
) -> list[Judgment]:
    """The judgments of annotators that passed enough attention checks, or that were shown none."""
    annotators = report["annotators"]
    assert isinstance(annotators, dict)
    passed = {name: row["attention"] for name, row in annotators.items()}
    return [one for one in judgments if passed[one.annotator] is None or passed[one.annotator] >= config.min_attention]


@dataclass
class Verdicts:
    """Aggregated judgments: the preferred pairs, and why other comparisons gave none."""

    pairs: list[tuple[str, Preference]] = field(default_factory=list)
    """Id of the comparison, and its pair."""
    dropped: Metrics = field(default_factory=lambda: {"ties": 0.0, "disagreed": 0.0, "unjudged": 0.0})


def settled(config: CollectPreferencesConfig, asked: Sequence[Comparison], judgments: Sequence[Judgment]) -> Verdicts:
    """Turn the judged comparisons that are used for training into pairs.

    The margin of a pair is the share of its annotators that chose it less the share that chose the other answer.
    """
    choices: dict[str, Counter[str]] = {one.id: Counter() for one in asked if one.trains}
    for judgment in judgments:
        if judgment.comparison in choices:
            choices[judgment.comparison][judgment.choice] += 1
    verdicts = Verdicts()
    for one in asked:
        if not one.trains:
            continue
        said = choices[one.id]
        first, second, everyone = said["first"], said["second"], said.total()
        if not everyone:
            verdicts.dropped["unjudged"] += 1
        elif not first and not second:
            verdicts.dropped["ties"] += 1
        elif first == second or (config.several == "unanimous" and max(first, second) < everyone):
            verdicts.dropped["disagreed"] += 1
        else:
            verdicts.pairs.append((one.id, preference(one, first > second, abs(first - second) / everyone)))
    return verdicts


def preference(one: Comparison, first_won: bool, margin: float) -> Preference:
    """The training pair of a comparison."""
    won, lost = (one.first, one.second) if first_won else (one.second, one.first)
    chosen, rejected = (Message("assistant", won),), (Message("assistant", lost),)
    return Preference(one.id, one.prompt, chosen, rejected, margin, one.source)


def write_pairs(
    config: CollectPreferencesConfig, pairs: Sequence[tuple[str, Preference]], context: StageContext
) -> Metrics:
    """Write the pairs, split by prompt into train and eval, and count the pairs of each split."""
    prompts = {name: json.dumps([[m.role, m.content] for m in pair.prompt]) for name, pair in pairs}
    evaluation = always_held_out(prompts.values(), fraction=config.eval_fraction, seed=context.seed)
    split = {
        "train": [pair for name, pair in pairs if prompts[name] not in evaluation],
        "eval": [pair for name, pair in pairs if prompts[name] in evaluation],
    }
    for name, rows in split.items():
        write_preferences(context.out / f"{name}.parquet", rows)
    return {name: float(len(rows)) for name, rows in split.items()}


def always_held_out(prompts: Iterable[str], *, fraction: float, seed: int) -> set[str]:
    """Hold out about `fraction` of the prompts by their text alone: a prompt is held out in every round or in none.

    If this would select no prompt or all of them, `held_out` chooses instead.
    """
    different = set(prompts)
    chosen = {prompt for prompt in different if derive_seed(seed, "eval", prompt) < fraction * 2**31}
    return chosen if 0 < len(chosen) < len(different) else held_out(different, fraction=fraction, seed=seed)


def headline(report: Mapping[str, object]) -> Metrics:
    """Figures of the report for the key record, without missing values."""
    metrics: Metrics = {}
    shares = {name: report[name] for name in ("agreement", "consistency", "attention", "first_chosen", "gold")}
    judge = report.get("judge")
    if isinstance(judge, dict):
        shares |= {f"judge/{name}": judge[name] for name in ("changed", "toward_first", "toward_second")}
        metrics |= {f"judge/{name}": float(judge[name]) for name in ("malformed", "failed")}
    metrics |= {name: share["mean"] for name, share in shares.items() if isinstance(share, dict)}
    alpha = report["alpha"]
    return metrics | ({"alpha": alpha} if isinstance(alpha, float) else {})


def record_table(verdicts: Verdicts, context: StageContext) -> None:
    """Record the first pairs as a table."""
    rows = [
        [pair.prompt[-1].content, pair.chosen[-1].content, pair.rejected[-1].content, pair.margin]
        for _, pair in verdicts.pairs[:TABLE_ROWS]
    ]
    context.tracker.table("samples/judged", ["prompt", "chosen", "rejected", "margin"], rows)
