"""Comparison of reward models on the same preference pairs: how well each orders the answers of a policy that moved."""

import json
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Preference, read_preferences
from rlhf_core.errors import DataError
from rlhf_core.evaluation.reward_report import (
    SuiteRow,
    accuracy_difference,
    read_suite,
    suite_metrics,
    suite_report,
)
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.model import Contract, verify_contract
from rlhf_core.stage.context import StageContext
from rlhf_core.types import PreferencesRef, ReportRef, RewardModelRef
from stages.compare_reward_models import CompareRewardModelsConfig
from stages.reward_model import RewardModelConfig
from stages.reward_model.run import RenderedPair, pair_report, reward_pairs
from stages.suites import suites_as_planned


def run(
    config: CompareRewardModelsConfig,
    *,
    reward_models: dict[str, RewardModelRef],
    preferences: PreferencesRef,
    context: StageContext,
) -> ReportRef:
    """Report the accuracy, calibration and length dependence of each reward model on `preferences`.

    For every other model, `over/<other>` holds the paired difference of the accuracies with its interval.
    """
    with suites_as_planned(config, context.files):
        suites = {name: read_suite(name, suite) for name, suite in config.suites.items()}
    folder = context.path(preferences)
    splits = ("eval",) if config.split == "eval" else ("train", "eval")
    rows = [row for split in splits for row in read_preferences(folder / f"{split}.parquet")]
    if not rows:
        raise DataError(context.label, config.split, "holds no pair", 'set split = "all", or hold pairs out')
    seen = {name: rendered(ref, rows, context) for name, ref in sorted(reward_models.items())}
    shared = [at for at in range(len(rows)) if all(pairs[at] for pairs in seen.values())]
    if not shared:
        rule = "holds no pair whose answers differ within the tokens of every reward model"
        raise DataError(context.label, config.split, rule, "compare shorter answers")
    reports: dict[str, dict[str, Any]] = {}
    hits = {}
    metrics: Metrics = {"pairs": float(len(shared))}
    for name, ref in sorted(reward_models.items()):
        pairs = [pair for at in shared for pair in seen[name][at]]
        reports[name], hits[name] = measured(ref, pairs, suites, context)
        if suites:
            metrics |= {f"{name}/{key}": value for key, value in suite_metrics(reports[name]["suites"]).items()}
        for figure in ("accuracy", "accuracy_low", "accuracy_high", "prompts", "ece", "length_correlation"):
            metrics[f"{name}/{figure}"] = reports[name][figure]
    prompts = [rows[at].prompt for at in shared]
    for name, other in permutations(hits, 2):
        found = accuracy_difference(hits[name], hits[other], prompts)
        reports[name].setdefault("over", {})[other] = found
        metrics[f"{name}/over/{other}"] = found["mean"]
        metrics |= {f"{name}/over/{other}_{end}": found[end] for end in ("low", "high", "prompts")}
    (context.out / "report.json").write_text(json.dumps(reports, indent=2), encoding="utf-8")
    return context.commit(ReportRef, metrics=metrics)


def rendered(ref: RewardModelRef, rows: Sequence[Preference], context: StageContext) -> list[list[RenderedPair]]:
    """Render each pair as the reward model sees it; empty if both answers are equal within its token limit."""
    folder = context.path(ref)
    chat, config = ChatTemplate.load(folder), RewardModelConfig(max_length=Contract.read(folder).max_length)
    return [reward_pairs(chat, [row], config) for row in rows]


def measured(
    ref: RewardModelRef, seen: Sequence[RenderedPair], suites: Mapping[str, list[SuiteRow]], context: StageContext
) -> tuple[dict[str, Any], list[float]]:
    """Evaluate one reward model on the pairs (`reward_model_report`) and on the suites; also its hit per pair."""
    folder = context.path(ref)
    contract = Contract.read(folder)
    with context.runtime.trainer("reward_model", context.model(ref, "score"), None) as trainer:
        verify_contract(trainer, contract)
        report, _, hits = pair_report(trainer, seen, seed=context.seed)
        chat = ChatTemplate.load(folder)
        scored = {
            name: suite_report(rows, chat, trainer.scores, max_length=contract.max_length)
            for name, rows in suites.items()
        }
    return report | ({"suites": scored} if scored else {}), hits
