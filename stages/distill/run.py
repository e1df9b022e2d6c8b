"""Knowledge distillation: a student policy learns its teachers' distributions at every token, not only the token.

Loss: (1 - a) * CE + a * sum_m w_m D(teacher m, student), token mean over the whole optimizer step, on assistant tokens;
D is the forward or reverse KL or the generalized JSD (arXiv 2306.13649 eq. 1). Teachers with other tokenizers are
compared on groups of tokens that spell the same text, by universal logit distillation (arXiv 2402.12030). The tokens
come from demonstrations or (`on_policy`) from the student's own answers, sampled with its current weights as in GKD.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rlhf_core.algorithms.distillation import normalized_weights
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.alignment import AlignedSample, aligned_answer, aligned_examples
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import held_out
from rlhf_core.data.tables import read_demonstrations, read_prompts
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.interfaces import Metrics, Objective, Sampler, Trainer
from rlhf_core.models.architecture import check_longest
from rlhf_core.models.loading import shared_vocabulary, vocabulary_size
from rlhf_core.rollouts.answers import expect_weights
from rlhf_core.stage.context import StageContext
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.fit import LookAhead, fit
from rlhf_core.training.objectives.cross_tokenizer import CrossTokenizerObjective
from rlhf_core.training.objectives.distillation import (
    ONE_TEACHER,
    DistillationObjective,
    OtherVocabularies,
    RoutedSample,
    RoutedTeachers,
    SameVocabulary,
    Teachers,
)
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    Message,
    PolicyRef,
    Prompt,
    PromptsRef,
    SamplingRequest,
    TokenSample,
    derive_seed,
    mask,
)
from stages.distill import DistillConfig

R = TypeVar("R", bound=ArtifactRef)


@dataclass(frozen=True, slots=True)
class Draw:
    """An answer to be sampled: the `number`-th to its prompt."""

    prompt: Prompt
    number: int


def run(
    config: DistillConfig,
    *,
    policy: PolicyRef,
    teacher: PolicyRef | None = None,
    teachers: dict[str, PolicyRef] | None = None,
    demonstrations: DemonstrationsRef | None = None,
    prompts: PromptsRef | None = None,
    context: StageContext,
) -> PolicyRef:
    """Distill `teacher`, or all `teachers`, into `policy`, the student, on `demonstrations` or on-policy `prompts`."""
    named = named_teachers(config, teacher, teachers or {}, context)
    for ref in (policy, *named.values()):
        if not config.on_policy:
            check_longest(f"{context.label}.max_length", config.max_length, context.path(ref))
    method = method_of(config, policy, named, context)
    splits = drawn(config, prompts, context) if config.on_policy else shown(config, method, demonstrations, context)

    with ExitStack() as leases:
        look_ahead = None
        if config.on_policy:
            sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))
            look_ahead = answering(sampler, method, config.sampling, seed=context.seed)
        own = leases.enter_context(
            context.runtime.trainer("policy", context.model(policy, lora=config.lora), config.optimizer)
        )
        trainers = [
            leases.enter_context(context.runtime.trainer("teacher", context.model(ref), None)) for ref in named.values()
        ]
        student = DistillationTrainer(own, method.teachers(trainers))
        # The draws already contain all epochs.
        loop = config.loop.model_copy(update={"epochs": 1}) if config.on_policy else config.loop
        result = fit(student, splits, method.objective, config.optimizer, loop, context, look_ahead=look_ahead)
        student.export(context.out)
    metrics: Metrics = {"steps": result.steps, "train_samples": len(splits["train"])}
    metrics |= {f"before/{name}": value for name, value in result.initial.items()}
    return context.commit(PolicyRef, metrics=metrics | result.final)


def named_teachers(
    config: DistillConfig, teacher: PolicyRef | None, teachers: Mapping[str, PolicyRef], context: StageContext
) -> dict[str, PolicyRef]:
    """The teachers by name, in the order of their weights.

    Raises ConfigError for a missing or an unweighted teacher.
    """
    if not config.teachers:
        return {"teacher": needed(teacher, "teacher", "distillation needs a teacher", context)}
    for name in sorted(config.teachers.keys() ^ teachers.keys()):
        rule = f"the teachers are {', '.join(sorted(teachers)) or 'none'}, and each needs a weight"
        remedy = "give as many policies as weights, with the same names"
        raise ConfigError(f"{context.label}.teachers.{name}", config.teachers.get(name), rule, remedy)
    return {name: teachers[name] for name in config.teachers}


# ---------------------------------------------------------------- the two ways to compare a student with a teacher


class Method(Protocol):
    """A distillation method: the trained tokens and the loss against the teachers."""

    @property
    def objective(self) -> Objective:
        """The loss."""

    @property
    def chat(self) -> ChatTemplate:
        """The chat template of the student."""

    def examples(self, messages: Sequence[Message], *, max_length: int) -> Sequence[Any]:
        """Render a demonstration as training samples."""

    def answer(self, messages: Sequence[Message], own: TokenSample) -> Any | None:
        """Render the student's own answer as a sample; None if no token can be compared."""

    def routed(self, sample: Any, source: str) -> Any:
        """Attach the teacher of its `source` to a sample, if teachers are assigned by source."""
        ...

    def teachers(self, trainers: Sequence[Trainer]) -> Teachers:
        """The teachers, in the order of their weights."""


def method_of(
    config: DistillConfig, policy: PolicyRef, teachers: Mapping[str, PolicyRef], context: StageContext
) -> Method:
    """Build the configured distillation method. Raises ConfigError if the vocabularies or `top_k` do not allow it."""
    divergence, weights = config.divergence, normalized_weights(config.teachers or {"teacher": 1.0})
    student, others = context.path(policy), [context.path(ref) for ref in teachers.values()]
    chat = ChatTemplate.load(student)
    method: Method
    shared = {"temperature": divergence.temperature, "kl_weight": config.kl_weight}
    if divergence.kind == "uld" or divergence.kind == "uld_text":
        sizes = [vocabulary_size(folder) for folder in (student, *others)]
        across = CrossTokenizerObjective(divergence.kind, k=divergence.top_k, weights=weights, **shared)
        method = AcrossTokenizers(across, chat, [ChatTemplate.load(folder) for folder in others], sizes[1:])
    else:
        keys = [
            f"{context.label}.teachers.{name}" if config.teachers else f"{context.label}.teacher" for name in teachers
        ]
        sizes = [shared_vocabulary(student, folder, key=key) for key, folder in zip(keys, others, strict=True)]
        weights = ONE_TEACHER if config.route else weights
        one = DistillationObjective(divergence.kind, jsd_beta=divergence.jsd_beta, weights=weights, **shared)
        route = {source: list(teachers).index(name) for name, named in config.route.items() for source in named}
        method = OneVocabulary(one, chat, divergence.top_k, sizes[0], route)
    if divergence.top_k >= min(sizes):
        rule = f"must be < {min(sizes)}, the size of the vocabulary"
        raise ConfigError(f"{context.label}.divergence.top_k", divergence.top_k, rule, "lower it, or set 0")
    return method


@dataclass(frozen=True)
class OneVocabulary:
    """A comparison token by token, with teachers that have the student's vocabulary."""

    objective: DistillationObjective
    chat: ChatTemplate
    top_k: int
    vocabulary: int
    route: Mapping[str, int]
    """Source -> number of its teacher; empty if all teachers teach all samples."""

    def examples(self, messages: Sequence[Message], *, max_length: int) -> list[TokenSample]:
        """Render the conversation with a loss mask over its answers."""
        return self.chat.examples(messages, max_length=max_length)

    def answer(self, messages: Sequence[Message], own: TokenSample) -> TokenSample:
        """The answer unchanged: all models read the same tokens."""
        return own

    def routed(self, sample: TokenSample, source: str) -> TokenSample | RoutedSample:
        """Attach the number of its teacher to a sample, if teachers are assigned by source."""
        return RoutedSample(sample.token_ids, sample.loss_mask, self.route[source]) if self.route else sample

    def teachers(self, trainers: Sequence[Trainer]) -> SameVocabulary | RoutedTeachers:
        """The teachers, which read the student's own tokens."""
        kind = RoutedTeachers if self.route else SameVocabulary
        return kind(tuple(trainers), self.top_k, self.objective.temperature, self.vocabulary)


@dataclass(frozen=True)
class AcrossTokenizers:
    """A comparison of groups of tokens, with teachers that have different tokenizers and chat templates."""

    objective: CrossTokenizerObjective
    chat: ChatTemplate
    chats: Sequence[ChatTemplate]
    vocabularies: Sequence[int]

    def examples(self, messages: Sequence[Message], *, max_length: int) -> list[AlignedSample]:
        """Render the conversation in the tokens of each model."""
        return aligned_examples(self.chat, self.chats, messages, max_length=max_length)

    def answer(self, messages: Sequence[Message], own: TokenSample) -> AlignedSample | None:
        """Render the answer's text in the tokens of each model."""
        return aligned_answer(self.chat, self.chats, messages, own)

    def routed(self, sample: AlignedSample, source: str) -> AlignedSample:
        """The sample unchanged: all teachers teach it."""
        return sample

    def teachers(self, trainers: Sequence[Trainer]) -> OtherVocabularies:
        """The teachers, which read the text in their own tokens."""
        return OtherVocabularies(
            tuple(trainers), self.objective.k, self.objective.temperature, tuple(self.vocabularies)
        )


# ---------------------------------------------------------------- data


def shown(
    config: DistillConfig, method: Method, demonstrations: DemonstrationsRef | None, context: StageContext
) -> dict[str, list[Any]]:
    """The demonstrations by split, with a loss mask over their assistant turns."""
    ref = needed(demonstrations, "demonstrations", f"on_policy = {on(config)} trains on demonstrations", context)
    rows = {split: read_demonstrations(context.path(ref) / f"{split}.parquet") for split in ("train", "eval")}
    config.check_sources({row.source for found in rows.values() for row in found}, key=context.label)
    return {
        split: [
            method.routed(one, row.source)
            for row in found
            for one in method.examples(row.messages, max_length=config.max_length)
        ]
        for split, found in rows.items()
    }


def drawn(config: DistillConfig, prompts: PromptsRef | None, context: StageContext) -> dict[str, list[Draw]]:
    """List the answers to sample: one for each prompt and epoch, and one for each held-out prompt."""
    ref = needed(prompts, "prompts", f"on_policy = {on(config)} trains on prompts", context)
    rows = read_prompts(context.path(ref))
    if not rows:
        raise DataError(f"{context.label}.prompts", 0, "there are no prompts to answer", "prepare more prompts")
    config.check_sources({row.source for row in rows}, key=context.label)
    evaluation = held_out((row.id for row in rows), fraction=config.eval_fraction, seed=context.seed)
    return {
        "train": [Draw(row, epoch) for epoch in range(config.loop.epochs) for row in rows if row.id not in evaluation],
        "eval": [Draw(row, 0) for row in rows if row.id in evaluation],
    }


def on(config: DistillConfig) -> str:
    """The option `on_policy` as a profile writes it."""
    return str(config.on_policy).lower()


def needed(ref: R | None, name: str, rule: str, context: StageContext) -> R:
    """The input `ref`. Raises ConfigError if it was not given."""
    if ref is None:
        raise ConfigError(f"{context.label}.{name}", None, rule, f"give {name}, or change the setting that needs it")
    return ref


def answering(sampler: Sampler, method: Method, sampling: SamplingConfig, *, seed: int) -> LookAhead:
    """Build a function that samples the student's answers before each step (on-policy distillation).

    An answer depends on the student's weights and its own seed, and all answers of a step are sampled in one call, so a
    resumed run samples the same answers.
    """
    versions = itertools.count(1)

    def answer(student: Trainer, draws: Sequence[Draw]) -> tuple[Objective, list[Any]]:
        sampler.load_weights(student.weights(), version=next(versions))
        prompts = [method.chat.prompt_ids(draw.prompt.messages) for draw in draws]
        seeds = [derive_seed(seed, "distill", draw.prompt.id, draw.number) for draw in draws]
        requests = [SamplingRequest(ids, own) for ids, own in zip(prompts, seeds, strict=True)]
        completions = sampler.generate(requests, sampling)
        expect_weights(sampler)
        answers = [
            TokenSample(asked + made.token_ids, mask(bytes(len(asked)) + b"\1" * len(made.token_ids)))
            for asked, made in zip(prompts, completions, strict=True)
        ]
        samples = [method.answer(draw.prompt.messages, own) for draw, own in zip(draws, answers, strict=True)]
        made = zip(samples, draws, strict=True)
        return method.objective, [
            method.routed(sample, draw.prompt.source) for sample, draw in made if sample is not None
        ]

    return answer
