"""Knowledge distillation: a student policy learns a teacher's distribution at every token, not only the token.

Loss: (1 - a) * CE + a * D(teacher, student), token mean over the whole optimizer step, on assistant tokens; D is the
forward or reverse KL or the generalised JSD (arXiv 2306.13649 eq. 1). The tokens are those of demonstrations, or
(`on_policy`) of the student's own answers, drawn anew with its weights of the moment, as GKD does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.holdout import held_out
from rlhf_core.data.tables import read_demonstrations, read_prompts
from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.interfaces import Metrics, ModelSpec, Sampler, Trainer
from rlhf_core.models.architecture import check_longest
from rlhf_core.models.vocabulary import shared_vocabulary
from rlhf_core.stage.context import StageContext
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.fit import LookAhead, fit
from rlhf_core.training.objectives.distillation import DistillationObjective
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    PolicyRef,
    Prompt,
    PromptsRef,
    SamplingRequest,
    TokenSample,
    derive_seed,
)
from stages.config.distill import DistillConfig


@dataclass(frozen=True, slots=True)
class Draw:
    """An answer to be sampled: the `number`-th to its prompt."""

    prompt: Prompt
    number: int


def run(
    config: DistillConfig,
    *,
    policy: PolicyRef,
    teacher: PolicyRef,
    demonstrations: DemonstrationsRef | None = None,
    prompts: PromptsRef | None = None,
    context: StageContext,
) -> PolicyRef:
    """Teach `policy`, the student, what `teacher` knows, on `demonstrations` or, on-policy, `prompts`."""
    divergence = config.divergence
    vocabulary = shared_vocabulary(context.path(policy), context.path(teacher))
    if divergence.top_k >= vocabulary:
        rule = f"must be < {vocabulary}, the size of the vocabulary"
        raise ConfigError(explain(f"{context.label}.divergence.top_k", divergence.top_k, rule, "lower it, or set 0"))
    objective = DistillationObjective(
        kind=divergence.kind,
        jsd_beta=divergence.jsd_beta,
        temperature=divergence.temperature,
        kl_weight=config.kl_weight,
    )
    chat = ChatTemplate.load(context.path(policy))
    for ref in (policy, teacher):
        if not config.on_policy:
            check_longest(f"{context.label}.max_length", config.max_length, context.path(ref))
        context.tracker.input_model(ref.digest)
    splits = drawn(config, prompts, context) if config.on_policy else shown(config, chat, demonstrations, context)

    student_spec = ModelSpec(path=str(context.path(policy)), head="lm", lora=config.lora, seed=context.seed)
    teacher_spec = ModelSpec(path=str(context.path(teacher)), head="lm", lora=None, seed=context.seed)
    with ExitStack() as leases:
        look_ahead = None
        if config.on_policy:
            sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))
            look_ahead = answering(sampler, chat, config.sampling, objective, seed=context.seed)
        student = DistillationTrainer(
            leases.enter_context(context.runtime.trainer("policy", student_spec, config.optimizer)),
            leases.enter_context(context.runtime.trainer("teacher", teacher_spec, None)),
            k=divergence.top_k,
            temperature=divergence.temperature,
            vocabulary=vocabulary,
        )
        result = fit(
            student,
            splits["train"],
            splits["eval"],
            objective,
            optimizer=config.optimizer,
            # The draws are those of all epochs.
            loop=config.loop.model_copy(update={"epochs": 1}) if config.on_policy else config.loop,
            context=context,
            look_ahead=look_ahead,
        )
        student.export(context.out)
    metrics: Metrics = {"steps": result.steps, "train_samples": len(splits["train"])}
    metrics |= {f"before/{name}": value for name, value in result.initial.items()}
    return context.commit(PolicyRef, metrics=metrics | result.final)


def shown(
    config: DistillConfig, chat: ChatTemplate, demonstrations: DemonstrationsRef | None, context: StageContext
) -> dict[str, list[TokenSample]]:
    """Return the demonstrations by split, their assistant turns masked."""
    ref = needed(demonstrations, "demonstrations", config, context)
    context.tracker.dataset("demonstrations", ref.digest, "training")
    splits = {}
    for split in ("train", "eval"):
        rows = read_demonstrations(context.path(ref) / f"{split}.parquet")
        splits[split] = [one for row in rows for one in chat.examples(row.messages, max_length=config.max_length)]
    return splits


def drawn(config: DistillConfig, prompts: PromptsRef | None, context: StageContext) -> dict[str, list[Draw]]:
    """Return the answers to be sampled: one to each prompt and epoch, and one to each prompt that is held out."""
    ref = needed(prompts, "prompts", config, context)
    context.tracker.dataset("prompts", ref.digest, "training")
    rows = read_prompts(context.path(ref))
    if not rows:
        raise DataError(
            explain(f"{context.label}.prompts", 0, "there are no prompts to answer", "prepare more prompts")
        )
    evaluation = held_out((row.id for row in rows), fraction=config.eval_fraction, seed=context.seed)
    return {
        "train": [Draw(row, epoch) for epoch in range(config.loop.epochs) for row in rows if row.id not in evaluation],
        "eval": [Draw(row, 0) for row in rows if row.id in evaluation],
    }


def needed(ref: Any, name: str, config: DistillConfig, context: StageContext) -> ArtifactRef:
    """Return the input `ref`; ConfigError if it was not given."""
    if not isinstance(ref, ArtifactRef):
        rule = f"on_policy = {str(config.on_policy).lower()} trains on {name}"
        raise ConfigError(explain(f"{context.label}.{name}", None, rule, f"give {name}, or change on_policy"))
    return ref


def answering(
    sampler: Sampler, chat: ChatTemplate, sampling: SamplingConfig, objective: DistillationObjective, *, seed: int
) -> LookAhead:
    """Return what lets the student of the moment answer the prompts of a step before it is taught on its answers.

    An answer depends on the student's weights and on a seed of its own, and a step asks for all of its answers together: a
    resumed run draws what the killed one drew.
    """
    versions = itertools.count(1)

    def answer(student: Trainer, draws: Sequence[Draw]) -> tuple[DistillationObjective, list[TokenSample]]:
        sampler.load_weights(student.weights(), version=next(versions))
        prompts = [chat.prompt_ids(draw.prompt.messages) for draw in draws]
        seeds = [derive_seed(seed, "distill", draw.prompt.id, draw.number) for draw in draws]
        requests = [SamplingRequest(ids, own) for ids, own in zip(prompts, seeds, strict=True)]
        completions = sampler.generate(requests, sampling)
        return objective, [
            TokenSample(ids + made.token_ids, (0,) * len(ids) + (1,) * len(made.token_ids))
            for ids, made in zip(prompts, completions, strict=True)
        ]

    return answer
