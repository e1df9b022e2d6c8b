"""Preference optimization without a reward model in the loop: DPO (arXiv 2305.18290) and its kin.

With a = log pi(y_c) - log pi_ref(y_c), b likewise for the rejected answer and h = a - b, the loss of a pair is
  dpo  -log sigmoid(beta h)          ipo  (h - 1/(2 beta))^2          simpo, orpo  without a reference
and so on (`rlhf_core.config.policy`); kto and bco judge every answer on its own, and learn from answers that were
never part of a pair. The reference is evaluated once over the dataset; its log-probs are stored with the checkpoints.
"""

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss
from rlhf_core.algorithms.preference.base import AnswerMethod
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Feedback, Preference, read_feedback, read_preferences
from rlhf_core.errors import DataError
from rlhf_core.interfaces import logprob_rows
from rlhf_core.models.architecture import check_longest
from rlhf_core.stage.context import StageContext
from rlhf_core.store.layout import write_json
from rlhf_core.training.fit import LookAhead, fit
from rlhf_core.training.objectives.preference import (
    BCOObjective,
    KTOObjective,
    PairObjective,
    RunningShift,
    answer_logprob,
)
from rlhf_core.types import AnswerSample, Column, PolicyRef, PreferenceSample, PreferencesRef, TokenSample, mask
from stages.dpo import DPOConfig
from stages.sft.run import open_exports

logger = logging.getLogger(__name__)

TokenPair = tuple[TokenSample, TokenSample]


REFERENCE_CHUNK = 512  # answers between two reports of progress


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """A rendered answer that is desirable or not: one side of a pair, or an answer that was judged on its own."""

    answer: TokenSample
    desirable: bool


def run(
    config: DPOConfig, *, policy: PolicyRef, reference: PolicyRef, preferences: PreferencesRef, context: StageContext
) -> PolicyRef:
    """Train `policy` to prefer the chosen answers, held near `reference`; return the new policy."""
    check_longest(f"{context.label}.max_length", config.max_length, context.path(policy))
    chat = ChatTemplate.load(context.path(policy))
    rows = {split: read_preferences(context.path(preferences) / f"{split}.parquet") for split in ("train", "eval")}
    pairs = {split: token_pairs(chat, rows[split], max_length=config.max_length) for split in rows}
    judged = {split: read_feedback(context.path(preferences), split) for split in rows}
    single = {split: token_answers(chat, judged[split], max_length=config.max_length) for split in rows}
    check_data(config, len(pairs["train"]), len(single["train"]), len(judged["train"]), context)

    objective, samples = prepared(config, pairs, single, reference, context)
    model = context.model(policy, lora=config.lora)
    exports = open_exports(config.exported_steps, config.loop, len(samples["train"]), context)
    with context.runtime.trainer("policy", model, config.optimizer) as trainer:
        ahead = look_ahead_of(objective)
        result = fit(
            trainer, samples, objective, config.optimizer, config.loop, context, look_ahead=ahead, exports=exports
        )
        trainer.export(context.out)
    exports.deliver(context.out)
    metrics = {
        "steps": result.steps,
        "train_pairs": len(pairs["train"]),
        "dropped_pairs": sum(len(rows[split]) - len(pairs[split]) for split in rows),
    }
    if any(judged.values()):
        on_answers = isinstance(config.loss, AnswerMethod)
        kept = sum(map(len, single.values())) if on_answers else 0
        metrics["train_answers"] = len(samples["train"]) if on_answers else 0
        metrics["dropped_answers"] = sum(map(len, judged.values())) - kept
    return context.commit(PolicyRef, metrics=metrics | result.final)


def check_data(config: DPOConfig, pairs: int, single: int, judged: int, context: StageContext) -> None:
    """Raise DataError if `loss` has nothing to train on; log if it leaves `judged` single answers out."""
    key, loss = f"{context.label}.loss.type", config.loss.type
    if isinstance(config.loss, AnswerMethod):
        if not pairs and not single:
            rule = "no answers are left to train on"
            raise DataError(key, loss, rule, "raise max_length, or see the validation report of prepare_data")
        return
    if not pairs and judged:
        rule = f"compares two answers, but the data has {judged} single labeled answers"
        raise DataError(key, loss, rule, "set loss = {type = 'kto'} or 'bco', or provide preference pairs")
    if not pairs:
        rule = "no pairs are left to train on"
        raise DataError(key, loss, rule, "raise max_length, or see the validation report of prepare_data")
    if judged:
        logger.warning(
            "%s = %r compares two answers: %d single labeled answers are ignored; kto and bco can train on them, too",
            key,
            loss,
            judged,
        )


def token_pairs(chat: ChatTemplate, rows: Sequence[Preference], *, max_length: int) -> list[TokenPair]:
    """Tokenize pairs as (chosen, rejected); pairs that truncation makes identical or empty are left out."""
    pairs = []
    for row in rows:
        chosen = chat.continuation(row.prompt, row.chosen, max_length=max_length)
        rejected = chat.continuation(row.prompt, row.rejected, max_length=max_length)
        if chosen is not None and rejected is not None and chosen.token_ids != rejected.token_ids:
            pairs.append((chosen, rejected))
    return pairs


def token_answers(chat: ChatTemplate, rows: Sequence[Feedback], *, max_length: int) -> list[JudgedAnswer]:
    """Render the answers with their judgments; answers that truncation leaves empty are left out."""
    rendered = [(chat.continuation(row.prompt, row.answer, max_length=max_length), row.desirable) for row in rows]
    return [JudgedAnswer(answer, desirable) for answer, desirable in rendered if answer is not None]


def prepared(
    config: DPOConfig,
    pairs: Mapping[str, Sequence[TokenPair]],
    single: Mapping[str, Sequence[JudgedAnswer]],
    reference: PolicyRef,
    context: StageContext,
) -> tuple[PairObjective | KTOObjective | BCOObjective, dict[str, list[Any]]]:
    """Build the objective and its samples by split, with the reference's log-probs."""
    if isinstance(config.loss, KTOLoss | BCOLoss):
        answers = {split: [*sides(pairs[split]), *single[split]] for split in pairs}
        strangers = config.loss.needs_mismatches
        made = {
            split: answer_samples(split, answers[split], answers["train"], reference, context, strangers=strangers)
            for split in pairs
        }
        if isinstance(config.loss, KTOLoss):
            return KTOObjective(loss=config.loss, kl=0.0), made
        return BCOObjective(loss=config.loss), made
    function = context.user_function(config.loss)
    objective = PairObjective(config.loss, config.nll_coef, config.length_alpha, function)
    return objective, {split: pair_samples(config, split, pairs[split], reference, context) for split in pairs}


def look_ahead_of(objective: PairObjective | KTOObjective | BCOObjective) -> LookAhead | None:
    """The step-level pre-pass of the loss; None if the loss is a sum over samples."""
    if isinstance(objective, BCOObjective):
        return RunningShift(objective)
    return objective.look_ahead if objective.loss.looks_ahead else None


def pair_samples(
    config: DPOConfig, split: str, pairs: Sequence[TokenPair], reference: PolicyRef, context: StageContext
) -> list[PreferenceSample]:
    """The pairs with the reference's summed log-probs; losses without a reference get zeros."""
    if not config.loss.uses_reference:
        return [PreferenceSample(chosen, rejected, 0.0, 0.0) for chosen, rejected in pairs]
    flat = [answer for pair in pairs for answer in pair]
    others = [answer for chosen, rejected in pairs for answer in (rejected, chosen)]

    def summed(row: Sequence[float], index: int) -> float:
        if config.length_alpha == 1:
            return sum(row)
        return answer_logprob(row, flat[index], others[index], alpha=config.length_alpha)

    sums = reference_sums(split, flat, summed, reference, context)
    return [PreferenceSample(*pair, sums[2 * i], sums[2 * i + 1]) for i, pair in enumerate(pairs)]


def sides(pairs: Sequence[TokenPair]) -> list[JudgedAnswer]:
    """Split each pair into its two answers."""
    return [JudgedAnswer(answer, place == 0) for pair in pairs for place, answer in enumerate(pair)]


def answer_samples(
    split: str,
    judged: Sequence[JudgedAnswer],
    others: Sequence[JudgedAnswer],
    reference: PolicyRef,
    context: StageContext,
    *,
    strangers: bool,
) -> list[AnswerSample]:
    """Pair each answer with an answer to another prompt, on which KTO's KL is estimated.

    The mismatched answer comes from the same split, or else from `others`, and is the same in all epochs, so the
    reference scores it once. Without `strangers`, each answer is paired with itself.
    """
    answers = [row.answer for row in judged]
    if not strangers:
        sums = reference_sums(split, answers, lambda row, _: sum(row), reference, context)
        return [
            AnswerSample(one.answer, one.desirable, ref, one.answer, ref) for one, ref in zip(judged, sums, strict=True)
        ]
    more = [row.answer for row in others]
    mismatches = [mismatched(answer, answer_to_another_prompt(i, answers, more)) for i, answer in enumerate(answers)]
    sums = reference_sums(split, [*answers, *mismatches], lambda row, _: sum(row), reference, context)
    return [
        AnswerSample(row.answer, row.desirable, sums[i], stranger, sums[len(answers) + i])
        for i, (row, stranger) in enumerate(zip(judged, mismatches, strict=True))
    ]


def answer_to_another_prompt(index: int, answers: Sequence[TokenSample], others: Sequence[TokenSample]) -> TokenSample:
    """Find the next answer to another prompt in `answers`, or else in `others`.

    Raises DataError if all share one prompt.
    """
    prompt = prompt_of(answers[index])
    own = (answers[(index + step) % len(answers)] for step in range(1, len(answers)))
    for other in itertools.chain(own, others):
        if prompt_of(other) != prompt:
            return other
    rule = "all answers belong to the same prompt"
    raise DataError("preferences", len(answers), rule, "kto needs answers to at least two prompts")


def prompt_of(sample: TokenSample) -> Column[int]:
    """The tokens before the first trained one."""
    return sample.token_ids[: sample.loss_mask.index(1)]


def mismatched(sample: TokenSample, other: TokenSample) -> TokenSample:
    """Join the prompt of `sample` with the answer of `other`, cut to the longer one's length."""
    prompt, start = prompt_of(sample), other.loss_mask.index(1)
    length = max(len(sample.token_ids), len(other.token_ids))
    token_ids = prompt + other.token_ids[start:]
    loss_mask = mask(bytes(len(prompt))) + other.loss_mask[start:]
    return TokenSample(token_ids[:length], loss_mask[:length])


def reference_sums(
    split: str,
    sequences: Sequence[TokenSample],
    summed: Callable[[Sequence[float], int], float],
    reference: PolicyRef,
    context: StageContext,
) -> list[float]:
    """Compute `summed(log-probs, index)` of the reference for each sequence; the values are kept for a resumed run."""
    if not sequences:
        return []
    path = context.work / f"reference_logprobs_{split}.json"
    if path.exists():
        return list(json.loads(path.read_text(encoding="utf-8"))["logprobs"])
    model = context.model(reference)
    sums: list[float] = []
    with context.runtime.trainer("reference", model, None) as trainer:
        for start in range(0, len(sequences), REFERENCE_CHUNK):
            rows = logprob_rows(trainer, sequences[start : start + REFERENCE_CHUNK])
            sums.extend(summed(row, start + i) for i, row in enumerate(rows))
            context.progress(len(sums), len(sequences), f"reference log-probs, {split}")
    write_json(path, {"logprobs": sums})
    return sums
