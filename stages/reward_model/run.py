"""Reward model: a scalar head on a language model, trained so that chosen answers score above rejected ones.

Loss (Bradley-Terry): -log sigmoid(r_chosen - r_rejected - margin) [+ c (r_chosen + r_rejected)^2], mean over pairs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import place
from rlhf_core.data.tables import Preference, read_feedback, read_preferences
from rlhf_core.data.turns import Turns
from rlhf_core.errors import DataError
from rlhf_core.evaluation.reward_report import (
    EDITS,
    SuiteRow,
    hits_of,
    probe_report,
    read_suite,
    reward_model_report,
    suite_metrics,
    suite_report,
)
from rlhf_core.interfaces import Metrics, Trainer
from rlhf_core.models.architecture import check_longest
from rlhf_core.stage.context import StageContext
from rlhf_core.training.fit import fit_and_measure
from rlhf_core.training.objectives.base import BradleyTerryObjective
from rlhf_core.types import Column, PolicyRef, PreferencesRef, RewardModelRef, RewardPair, derive_seed
from stages.reward_model import RewardModelConfig
from stages.suites import suites_as_planned

PROBES = 32  # answers whose scores are checked when the model is loaded


@dataclass(frozen=True, slots=True)
class Probed:
    """Rewards of unedited answers, and for each probe the prompt of each answer and the edit's change of its reward."""

    rewards: list[float]
    changes: dict[str, list[tuple[Turns, float]]]


class RenderedPair(NamedTuple):
    """A pair in tokens, with its source and the prompt of both answers."""

    source: str
    prompt: Turns
    pair: RewardPair


def run(
    config: RewardModelConfig, *, policy: PolicyRef, preferences: PreferencesRef, context: StageContext
) -> RewardModelRef:
    """Train a reward model from the weights of `policy`; return it with its report (accuracy, calibration, length)."""
    context = replace(context, seed=member_seed(config, context.seed))
    check_longest(f"{context.label}.max_length", config.max_length, context.path(policy))
    chat = ChatTemplate.load(context.path(policy))
    with suites_as_planned(config, context.files):
        suites = {name: read_suite(name, suite) for name, suite in config.suites.items()}
    rows = {split: read_preferences(context.path(preferences) / f"{split}.parquet") for split in ("train", "eval")}
    rows["train"] = without_fold(rows["train"], config)
    rendered = {split: reward_pairs(chat, rows[split], config) for split in rows}
    pairs = {split: [one.pair for one in rendered[split]] for split in rendered}
    if not pairs["train"]:
        raise no_pairs(context, preferences, dropped=len(rows["train"]))

    def measure(trainer: Trainer) -> Metrics:
        write_contract(trainer, pairs["eval"] or pairs["train"], chat, config, context.out)
        probes = probed(trainer, rows["eval"][: config.probe_answers], chat, config)
        report = write_report(trainer, rendered["eval"], probes, context)
        return report | write_suites(trainer, suites, chat, config.max_length, context)

    model = context.model(policy, "score", lora=config.lora)
    objective = BradleyTerryObjective(centering_coef=config.centering_coef)
    result, report = fit_and_measure(model, pairs, objective, config.optimizer, config.loop, measure, context)
    metrics = {
        "steps": result.steps,
        "train_pairs": len(pairs["train"]),
        "dropped_pairs": sum(len(rows[split]) - len(pairs[split]) for split in rows),
    }
    return context.commit(RewardModelRef, metrics=metrics | result.final | report)


def member_seed(config: RewardModelConfig, seed: int) -> int:
    """Seed of the member of an ensemble, or `seed` itself."""
    return derive_seed(seed, "member", config.member.number) if config.member else seed


def without_fold(rows: list[Preference], config: RewardModelConfig) -> list[Preference]:
    """The pairs without the prompts of the member's fold; a prompt is in one fold, by its content."""
    member = config.member
    if member is None or member.by == "seeds":
        return rows
    return [row for row in rows if int(place(row.prompt, "fold") * member.of) != member.number - 1]


def no_pairs(context: StageContext, preferences: PreferencesRef, *, dropped: int) -> DataError:
    """The error for preferences without a pair to train on; it lists their content."""
    feedback = len(read_feedback(context.path(preferences), "train"))
    if feedback:
        rule = f"a reward model compares two answers, but the data has {feedback} single labeled answers"
        remedy = "provide preference pairs, or train on single answers with dpo.loss = {type = 'kto'}"
    else:
        rule = f"no pairs are left to train on: {dropped} of {dropped} became equal or empty when they were cut"
        remedy = "raise max_length, or see the validation report of prepare_data"
    return DataError(f"{context.label}.preferences", 0, rule, remedy)


def reward_pairs(chat: ChatTemplate, rows: Sequence[Preference], config: RewardModelConfig) -> list[RenderedPair]:
    """Render the pairs; pairs that are cut to the same tokens, or to an empty answer, are left out."""
    pairs = []
    for row in rows:
        chosen = chat.continuation(row.prompt, row.chosen, max_length=config.max_length)
        rejected = chat.continuation(row.prompt, row.rejected, max_length=config.max_length)
        if chosen is None or rejected is None or chosen.token_ids == rejected.token_ids:
            continue
        margin = row.margin if config.use_margin else 0.0
        pair = RewardPair(chosen.until_trained(), rejected.until_trained(), margin)
        pairs.append(RenderedPair(row.source, row.prompt, pair))
    return pairs


def write_contract(
    trainer: Trainer, pairs: Sequence[RewardPair], chat: ChatTemplate, config: RewardModelConfig, folder: Path
) -> None:
    """Write `contract.json`: the conditions for reproducing the scores, with probe scores to check it by."""
    probe = [pair.chosen_ids for pair in pairs[:PROBES]]
    scores = trainer.scores(probe)
    contract = {
        "max_length": config.max_length,
        "eos_token_id": chat.eos_id,
        "template": chat.digest,
        "probe": [one.tolist() for one in probe],
        "probe_scores": scores,
        "mean": fmean(scores),
        "std": pstdev(scores),
    }
    (folder / "contract.json").write_text(json.dumps(contract), encoding="utf-8")


def write_report(trainer: Trainer, rendered: Sequence[RenderedPair], probes: Probed, context: StageContext) -> Metrics:
    """Write `report.json` and its figures into the artifact; return the headline figures of the held-out pairs."""
    if not rendered:
        return {}
    report, figures, _ = pair_report(trainer, rendered, seed=context.seed)
    if probes.rewards:
        report["probes"] = probe_report(rewards=probes.rewards, changes=probes.changes, spread=report["score_std"])
    (context.out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    context.figures(figures)
    return headline(report)


def pair_report(
    trainer: Trainer, rendered: Sequence[RenderedPair], *, seed: int
) -> tuple[dict[str, Any], dict[str, bytes], list[float]]:
    """Score the pairs; their report (`reward_model_report`), its figures, and the hits."""
    chosen, rejected = [one.pair.chosen_ids for one in rendered], [one.pair.rejected_ids for one in rendered]
    scores = trainer.scores(chosen), trainer.scores(rejected)
    report, figures = reward_model_report(
        chosen_scores=scores[0],
        rejected_scores=scores[1],
        chosen_lengths=list(map(len, chosen)),
        rejected_lengths=list(map(len, rejected)),
        sources=[one.source for one in rendered],
        prompts=[one.prompt for one in rendered],
        seed=seed,
    )
    return report, figures, hits_of(*scores)


def write_suites(
    trainer: Trainer, suites: Mapping[str, list[SuiteRow]], chat: ChatTemplate, max_length: int, context: StageContext
) -> Metrics:
    """Write `suites.json`, the accuracy on each suite and its subsets, if there are suites; return it as metrics."""
    if not suites:
        return {}
    reports = {name: suite_report(rows, chat, trainer.scores, max_length=max_length) for name, rows in suites.items()}
    (context.out / "suites.json").write_text(json.dumps(reports, indent=2), encoding="utf-8")
    return dict(suite_metrics(reports))


def headline(report: dict[str, Any]) -> Metrics:
    """The figures of a report that are metrics of the stage."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "prompts", "ece", "length_correlation")
    metrics: Metrics = {f"held_out/{name}": report[name] for name in names}
    if calibration := report["calibration"]:
        metrics["held_out/temperature"] = calibration["temperature"]
        for name in ("ece_before", "ece_after", "ece_change"):
            figures = calibration[name]
            metrics |= {
                f"held_out/{name}": figures["value"],
                f"held_out/{name}_low": figures["low"],
                f"held_out/{name}_high": figures["high"],
            }
    for name, figures in (report["probes"] if "probes" in report else {}).items():
        if isinstance(figures, dict) and "effect" in figures:
            metrics[f"probes/{name}"] = figures["effect"]
            metrics |= {f"probes/{name}_{end}": figures[end] for end in ("low", "high", "prompts") if end in figures}
    return metrics


def probed(trainer: Trainer, rows: Sequence[Preference], chat: ChatTemplate, config: RewardModelConfig) -> Probed:
    """Rewards of unedited chosen answers, and the change of reward by each edit of `EDITS`.

    Edits that would be cut at `max_length`, or that leave the answer unchanged, are left out.
    """
    asked: list[Column[int]] = []
    places: list[tuple[int, str]] = []
    for at, row in enumerate(rows):
        *turns, last = row.chosen
        edited = {name: edit(last.content) for name, edit in EDITS.items()}
        texts = {"": last.content} | {name: text for name, text in edited.items() if text != last.content}
        for name, text in texts.items():
            answer = (*turns, replace(last, content=text))
            sample = chat.continuation(row.prompt, answer, max_length=config.max_length + 1)
            if sample is not None and len(sample.token_ids) <= config.max_length:
                asked.append(sample.until_trained())
                places.append((at, name))
    scores = dict(zip(places, trainer.scores(asked) if asked else [], strict=True))
    return Probed(
        [score for (_, name), score in scores.items() if not name],
        {
            name: [
                (rows[at].prompt, score - scores[at, ""])
                for (at, edit), score in scores.items()
                if edit == name and (at, "") in scores
            ]
            for name in EDITS
        },
    )
