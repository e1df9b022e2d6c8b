"""Process reward model: a scalar head on a language model that judges every step of an answer at the step's last token.

Loss (arXiv 2305.20050, 2312.08935): -y log sigmoid(x) - (1 - y) log sigmoid(-x), mean over steps, labels hard or soft.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import SteppedAnswer, StepSplitter, read_steps
from rlhf_core.data.turns import Turns
from rlhf_core.errors import DataError
from rlhf_core.evaluation.reward_report import step_report
from rlhf_core.interfaces import Metrics, Trainer
from rlhf_core.models.architecture import check_longest
from rlhf_core.stage.context import StageContext
from rlhf_core.training.fit import fit_and_measure
from rlhf_core.training.objectives.base import StepObjective
from rlhf_core.types import Column, PolicyRef, ProcessRewardModelRef, StepSample, StepsRef, TokenSample, mask
from stages.process_reward_model import ProcessRewardModelConfig

PROBES = 32  # answers whose scores are checked when the model is loaded
TABLE_ROWS = 8  # in the tracker
_UNLIMITED = 1 << 40  # tokens: the cut comes after the steps are found


def run(
    config: ProcessRewardModelConfig, *, policy: PolicyRef, steps: StepsRef, context: StageContext
) -> ProcessRewardModelRef:
    """Train a process reward model from the weights of `policy`; return it with its report."""
    check_longest(f"{context.label}.max_length", config.max_length, context.path(policy))
    chat = ChatTemplate.load(context.path(policy))
    splitter = StepSplitter(chat, config.separator)
    rows = {split: read_steps(context.path(steps) / f"{split}.parquet") for split in ("train", "eval")}
    found = {split: step_samples(chat, splitter, rows[split], config) for split in rows}
    samples = {split: [sample for _, sample in found[split]] for split in found}
    if not samples["train"]:
        rule = f"none of the {len(rows['train'])} answers can be split into its steps at the separator"
        remedy = "use a separator that no step contains, or raise max_length"
        raise DataError(f"{context.label}.separator", config.separator, rule, remedy)

    def measure(trainer: Trainer) -> Metrics:
        write_contract(trainer, samples["eval"] or samples["train"], chat, config, context.out)
        return write_report(trainer, found["eval"], chat, context)

    model = context.model(policy, "score", lora=config.lora)
    result, report = fit_and_measure(model, samples, StepObjective(), config.optimizer, config.loop, measure, context)
    metrics = {
        "steps": result.steps,
        "train_answers": len(samples["train"]),
        "train_steps": sum(sample.loss_mask.count(1) for sample in samples["train"]),
        "dropped_answers": sum(len(rows[split]) - len(samples[split]) for split in rows),
    }
    return context.commit(ProcessRewardModelRef, metrics=metrics | result.final | report)


def step_samples(
    chat: ChatTemplate, splitter: StepSplitter, rows: Sequence[SteppedAnswer], config: ProcessRewardModelConfig
) -> list[tuple[Turns, StepSample]]:
    """Render the answers with a label at each step's last token, up to the last step that `max_length` leaves.

    Each comes with its prompt. Answers are left out if their steps cannot be found again, since a step contains the
    separator, or if no step is left after the cut.
    """
    samples = []
    for row in rows:
        whole = chat.continuation(row.prompt, row.answer(config.separator), max_length=_UNLIMITED)
        if whole is None:
            continue
        trained = [position for position, one in enumerate(whole.loss_mask) if one]
        first, last = trained[0], trained[-1]  # where a sampled answer begins and ends, too
        ends = [first + end for end in splitter.ends(whole.token_ids[first : last + 1])]
        kept = [end for end in ends if end < config.max_length]
        if len(ends) != len(row.labels) or not kept:
            continue
        label_at = dict(zip(kept, row.labels, strict=False))
        places = range(kept[-1] + 1)
        sample = StepSample(
            whole.token_ids[: kept[-1] + 1],
            mask([place in label_at for place in places]),
            Column("d", [label_at.get(place, 0.0) for place in places]),
        )
        samples.append((row.prompt, sample))
    return samples


def write_contract(
    trainer: Trainer, samples: Sequence[StepSample], chat: ChatTemplate, config: ProcessRewardModelConfig, folder: Path
) -> None:
    """Write `contract.json`: the conditions for reproducing the scores, with the probes' step scores to check it by."""
    probe = [unlabeled(sample) for sample in samples[:PROBES]]
    scores = trainer.step_scores(probe)
    every = [score for row in scores for score in row]
    contract = {
        "max_length": config.max_length,
        "separator": config.separator,
        "reduce": config.reduce,
        "eos_token_id": chat.eos_id,
        "template": chat.digest,
        "probe": [sample.token_ids.tolist() for sample in probe],
        "probe_step_ends": [[place for place, one in enumerate(sample.loss_mask) if one] for sample in probe],
        "probe_step_scores": [row.tolist() for row in scores],
        "mean": fmean(every),
        "std": pstdev(every),
    }
    (folder / "contract.json").write_text(json.dumps(contract), encoding="utf-8")


def write_report(
    trainer: Trainer, found: Sequence[tuple[Turns, StepSample]], chat: ChatTemplate, context: StageContext
) -> dict[str, float]:
    """Write `report.json` and its figures into the artifact; return the headline figures of the held-out answers."""
    if not found:
        return {}
    samples = [sample for _, sample in found]
    logits = trainer.step_scores([unlabeled(sample) for sample in samples])
    labels = [judgements(sample) for sample in samples]
    report, figures = step_report(logits=logits, labels=labels, prompts=[prompt for prompt, _ in found])
    (context.out / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    context.figures(figures)
    shown = zip(samples[:TABLE_ROWS], labels, logits, strict=False)
    table = [
        [chat.decode(sample.token_ids), json.dumps(said), json.dumps(scores.tolist())] for sample, said, scores in shown
    ]
    context.tracker.table("samples/steps", ["answer", "labels", "scores"], table)
    rates = ("accuracy", "first_error_accuracy")
    headline = (*rates, *(f"{name}_{end}" for name in rates for end in ("low", "high")), "prompts", "f1", "ece")
    return {f"held_out/{name}": report[name] for name in headline if report[name] is not None}


def unlabeled(sample: StepSample) -> TokenSample:
    """The sample in the form that the trainer scores."""
    return TokenSample(sample.token_ids, sample.loss_mask)


def judgements(sample: StepSample) -> tuple[float, ...]:
    """Labels of the steps, in order."""
    return tuple(label for label, one in zip(sample.labels, sample.loss_mask, strict=True) if one)
