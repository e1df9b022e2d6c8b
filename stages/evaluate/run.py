"""Evaluation: every policy's answers to the same held-out prompts, side by side, with intervals.

Gold reward (which nothing was trained on), reward-model score, KL to the reference, win rates, length, entropy,
repetition. KL(mu || ref) is the mean over answers y ~ mu of sum_t [log mu(y_t | y_<t, x) - log ref(y_t | y_<t, x)].
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_generations, read_index
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation import plots
from rlhf_core.evaluation.comparison import Answers, best_of, by_source, challenges, improvement, summary, win_rate
from rlhf_core.evaluation.intervals import ends
from rlhf_core.evaluation.lineage import lineage
from rlhf_core.evaluation.metrics import best_of_n_kl, log_ratios
from rlhf_core.evaluation.report import Sample, render_report
from rlhf_core.rewards.batches import checked
from rlhf_core.rewards.isolation import IsolatedReward, WorkerSettings
from rlhf_core.rewards.model import Contract, score_with_reward_model, verify_contract
from rlhf_core.schema.base import keyed
from rlhf_core.stage.context import StageContext
from rlhf_core.store import attempts
from rlhf_core.types import CHAMPION, Generation, GenerationsRef, PolicyRef, ReportRef, RewardModelRef
from stages.evaluate import HEADLINES, NO_BRACKETS, EvaluateConfig


def run(
    config: EvaluateConfig,
    *,
    generations: dict[str, GenerationsRef],
    reference: PolicyRef | None = None,
    reward_model: RewardModelRef | None = None,
    context: StageContext,
) -> ReportRef:
    """Compare the policies whose answers are given; return the report (report.json, report.html, figures/)."""
    check_names(config, list(generations))
    config = with_reference(config, generations, reference, context)
    policies = measured(config, generations, reference, reward_model, context)
    report = compare(config, policies, context)
    report["lineage"], curves = ancestry(generations, context)
    figures = draw(report, policies, curves)
    write(report, figures, side_by_side(policies, config.samples_shown), context)
    return context.commit(ReportRef, metrics=headline(report))


def check_names(config: EvaluateConfig, names: Sequence[str]) -> None:
    """Raise ConfigError for a policy that is named in the configuration and not evaluated."""
    named = {f"parents.{ours}": ours for ours in config.parents}
    named |= {f"parents.{ours}": theirs for ours, theirs in config.parents.items() if ours in names}
    named |= {f"best_of.{name}": name for name in config.best_of}
    for key, name in named.items():
        if name not in names:
            raise ConfigError(f"evaluate.{key}", name, f"is not evaluated ({', '.join(names)})", "name one of these")


def with_reference(
    config: EvaluateConfig,
    generations: Mapping[str, GenerationsRef],
    reference: PolicyRef | None,
    context: StageContext,
) -> EvaluateConfig:
    """Set `reference` in `config` to the name of the policy that is the actual reference, where that has a name."""
    digests = {name: read_index(context.path(ref))["policy"] for name, ref in generations.items()}
    names = [name for name, digest in digests.items() if reference is not None and digest == reference.digest]
    return config if not names or config.reference in names else config.model_copy(update={"reference": names[0]})


# ---------------------------------------------------------------- measuring


def measured(
    config: EvaluateConfig,
    generations: Mapping[str, GenerationsRef],
    reference: PolicyRef | None,
    reward_model: RewardModelRef | None,
    context: StageContext,
) -> list[Answers]:
    """Measure every policy's answers: gold reward, score and log-ratio, followed by the best-of-n rows.

    Episodes that failed are counted and not measured: a partial episode is no measure of the policy.
    """
    folders = {name: context.path(ref) for name, ref in generations.items()}
    everything = {name: read_generations(folder) for name, folder in folders.items()}
    rows = {name: ended(name, items) for name, items in everything.items()}
    facts = {name: read_index(folder) for name, folder in folders.items()}
    gold = gold_rewards(config, rows, context)
    scores = reward_scores(reward_model, rows, context)
    ratios = log_ratios(reference, rows, {name: SamplingConfig(**facts[name]["sampling"]) for name in rows}, context)
    policies = []
    for name in rows:
        failed = len(everything[name]) - len(rows[name])
        measures = (gold[name], scores[name], ratios[name])
        answers = Answers(name, facts[name]["policy"], tuple(rows[name]), *measures, failed=failed)
        policies.append(answers)
        if name in config.best_of:
            n = config.best_of[name]
            bound = best_of_n_kl(n) if name == config.reference else math.nan  # it is a bound to the policy itself
            policies.append(best_of(answers, n, kl_bound=bound))
    return policies


def ended(name: str, generations: Sequence[Generation]) -> list[Generation]:
    """The answers of a policy without failed episodes. Raises DataError if all of its episodes failed."""
    kept = [one for one in generations if not one.completion.failure]
    if generations and not kept:
        rule = f"all {len(generations)} episodes failed; the first: {generations[0].completion.failure}"
        raise DataError("evaluate.generations", name, rule, "fix the environment, and generate again")
    return kept


def gold_rewards(
    config: EvaluateConfig, rows: Mapping[str, Sequence[Generation]], context: StageContext
) -> dict[str, tuple[float, ...]]:
    """Gold reward of each answer by policy; empty tuples without a gold reward."""
    if not config.gold:
        return dict.fromkeys(rows, ())
    settings = WorkerSettings(code=dict(context.functions), notes=context.notes)
    with IsolatedReward("gold", config.gold, timeout_s=config.gold_timeout_s, settings=settings) as reward:
        return {name: tuple(checked("gold", reward(items), items)) for name, items in rows.items()}


def reward_scores(
    ref: RewardModelRef | None, rows: Mapping[str, Sequence[Generation]], context: StageContext
) -> dict[str, tuple[float, ...]]:
    """The reward model's score of each answer by policy; empty tuples without a reward model."""
    if ref is None:
        return dict.fromkeys(rows, ())
    folder = context.path(ref)
    contract, chat = Contract.read(folder), ChatTemplate.load(folder)
    with context.runtime.trainer("reward_model", context.model(ref, "score"), None) as trainer:
        verify_contract(trainer, contract)
        return {
            name: tuple(score_with_reward_model(trainer, chat, items, max_length=contract.max_length))
            for name, items in rows.items()
        }


# ---------------------------------------------------------------- comparing


def compare(config: EvaluateConfig, policies: Sequence[Answers], context: StageContext) -> dict[str, Any]:
    """Build the content of report.json: a row per policy, and how it was made."""
    by_name = {answers.name: answers for answers in policies}
    names = [answers.name for answers in policies if not answers.picked_from]
    rows = {answers.name: summary(answers, level=config.level) for answers in policies}
    for answers in policies:
        if parts := by_source(answers):
            rows[answers.name]["sources"] = {name: summary(part, level=config.level) for name, part in parts.items()}
    for name, answers in by_name.items():
        parent = opponent(config, name, names)
        if parent and answers.rewards:
            rows[name]["win_rate"] = win_rate(answers, by_name[parent], level=config.level)
            rows[name]["improvement"] = improvement(answers, by_name[parent], level=config.level)
        if CHAMPION in by_name and name in names and name != CHAMPION:
            rows[name] |= challenges(answers, by_name[CHAMPION], level=config.level)
    return {
        "key": context.key,
        "reference": config.reference,
        "compared_by": "gold" if config.gold else "reward_model" if policies[0].scores else "",
        "order": names,
        "policies": rows,
        "settings": keyed(config) | {"seed": context.seed},
    }


def opponent(config: EvaluateConfig, name: str, names: Sequence[str]) -> str:
    """Name of the policy that `name` is compared with, "" if it has no opponent.

    It is the parent if `name` has one, else the reference. The reference itself is compared with the policy before it.
    """
    if name in config.parents:
        return config.parents[name]
    if name != config.reference and config.reference in names:
        return "" if name in names and names.index(name) < names.index(config.reference) else config.reference
    return names[names.index(name) - 1] if name in names[1:] else ""


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """Numbers for the key record: `<policy>/gold`, `<policy>/kl`, `<policy>/win_rate` ..."""
    rows = {name.translate(NO_BRACKETS): row for name, row in report["policies"].items()}
    means = {
        f"{name}/{measure}": row[measure]["mean"]
        for name, row in rows.items()
        for measure in HEADLINES
        if measure in row
    }
    means |= {
        f"{name}/source/{source}/{measure}": part[measure]["mean"]
        for name, row in rows.items()
        for source, part in row.get("sources", {}).items()
        for measure in HEADLINES
        if measure in part
    }
    means |= {f"{name}/prompts": float(row["prompts"]) for name, row in rows.items()}
    return means | {f"{name}/failed": float(row["failed"]) for name, row in rows.items() if "failed" in row}


# ---------------------------------------------------------------- showing


def ancestry(
    generations: Mapping[str, GenerationsRef], context: StageContext
) -> tuple[list[dict[str, Any]], dict[str, Path]]:
    """Find the stages that led to the answers, and the metrics.jsonl of each stage that trained a model, by label.

    Metrics files that no longer exist are left out.
    """
    records = context.store.records()
    nodes = lineage(records, [ref.digest for ref in generations.values()])
    models = {record.key for record in records if isinstance(record.handle, (PolicyRef, RewardModelRef))}
    files = {node.label: attempts.metrics(context.store.attempts(node.key)) for node in nodes if node.key in models}
    trained = {label: path for label, path in files.items() if path.exists()}
    return [node.plain() for node in nodes], trained


def draw(
    report: Mapping[str, Any], policies: Sequence[Answers], training: Mapping[str, Path]
) -> dict[str, tuple[str, bytes]]:
    """Draw the figures: file name -> (caption, PNG)."""
    figures: dict[str, tuple[str, bytes]] = {}
    measure, reference = report["compared_by"], report["reference"]
    label = {"gold": "gold reward", "reward_model": "reward-model score", "": ""}[measure]
    rows = report["policies"]
    colors = policy_colors(report)
    points = [
        plots.FrontierPoint(name, rows[name]["kl"]["mean"], rows[name][measure]["mean"], *ends(rows[name][measure]))
        for name in colors
        if measure and "kl" in rows[name]
    ]
    if points:
        caption = f"Reward against distance from {reference}, with {report['settings']['level']:.0%} intervals"
        figures["frontier"] = (caption, plots.frontier(points, reward_name=label, reference=reference, colors=colors))
    groups = {
        answers.name: ([item.completion.action_mask.count(1) for item in answers.generations], answers.rewards)
        for answers in policies
        if answers.rewards and answers.name in report["order"]
    }
    if groups:
        figures["length"] = (
            f"{label.capitalize()} against length",
            plots.length_scatter(groups, x_label="tokens", y_label=label, colors=colors),
        )
    return figures | training_figures(training, colors)


def policy_colors(report: Mapping[str, Any]) -> dict[str, str]:
    """The color of each policy in all figures and tables; best-of-n rows come last."""
    return plots.colors(sorted(report["policies"], key=lambda name: name not in report["order"]))


def training_figures(training: Mapping[str, Path], colors: Mapping[str, str]) -> dict[str, tuple[str, bytes]]:
    """Draw one figure per trained stage: reward for policy optimization, loss for the others.

    It has the color of the policy that the stage made, or contributed to: `iterative_dpo/round_1/dpo`.
    """
    figures = {}
    for label, path in training.items():
        series = {name.removeprefix(f"{label}/"): curve for name, curve in plots.read_curves(path).items()}
        losses = {name: curve for name, curve in series.items() if name in ("train/loss", "eval/loss")}
        shown = {"reward/mean": series["reward/mean"]} if "reward/mean" in series else losses
        if shown and max(len(curve) for curve in shown.values()) > 1:
            y_label = "reward" if "reward/mean" in shown else "loss"
            policy = label if label in colors else label.partition("/")[0]
            color = colors[policy] if policy in colors else plots.INK
            png = plots.curves(shown, title=label, y_label=y_label, color=color)
            figures["training_" + label.replace("/", "_").replace(" ", "_")] = (f"Training of {label}", png)
    return figures


def side_by_side(policies: Sequence[Answers], count: int) -> list[Sample]:
    """The first `count` prompts that all policies answered, with the first answer of each."""
    first = [_first_answers(answers) for answers in policies]
    shared = [prompt for prompt in first[0] if all(prompt in answers for answers in first)][:count]
    samples = []
    for prompt in shared:
        shown = []
        for answers, places in zip(policies, first, strict=True):
            index = places[prompt]
            numbers = {
                name: values[index] for name, values in (("gold", answers.gold), ("RM", answers.scores)) if values
            }
            shown.append((answers.name, answers.generations[index].completion.text, numbers))
        messages = policies[0].generations[first[0][prompt]].prompt.messages
        samples.append(Sample(messages[-1].content, tuple(shown)))
    return samples


def _first_answers(answers: Answers) -> dict[str, int]:
    places: dict[str, int] = {}
    for index, generation in enumerate(answers.generations):
        places.setdefault(generation.prompt.id, index)
    return places


def write(
    report: Mapping[str, Any],
    figures: Mapping[str, tuple[str, bytes]],
    samples: Sequence[Sample],
    context: StageContext,
) -> None:
    """Write the artifact and hand the same to the tracker."""
    (context.out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False), encoding="utf-8")
    page = render_report(
        report,
        title="Evaluation of policies",
        figures=list(figures.values()),
        samples=samples,
        colors=policy_colors(report),
    )
    (context.out / "report.html").write_text(page, encoding="utf-8")
    context.figures({name: png for name, (_, png) in figures.items()})
    context.tracker.file(context.out / "report.json", "")
    context.tracker.file(context.out / "report.html", "")
    columns = ["prompt", "policy", "answer", "gold", "reward model"]
    rows = [
        [sample.prompt, name, text, *_numbers(values)] for sample in samples for name, text, values in sample.answers
    ]
    content = json.dumps({"columns": columns, "data": rows}, ensure_ascii=False)
    (context.out / "samples.json").write_text(content, encoding="utf-8")
    context.tracker.table("samples", columns, rows)
    context.metrics(0, headline(report))


def _numbers(values: Mapping[str, float]) -> list[float | str]:
    return [values.get(name, "") for name in ("gold", "RM")]
