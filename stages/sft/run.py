"""Supervised fine-tuning: maximize the likelihood of the assistant's tokens in demonstrations.

Loss: -log pi(y_t | y_<t, x), token mean over the whole optimizer step, on assistant tokens and their end-of-turn token,
or on all tokens, as in pretraining. `dft` weights each token by its own probability (arXiv 2508.05629).
"""

import logging
from collections.abc import Sequence
from itertools import pairwise

from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics
from rlhf_core.models.architecture import check_longest, read_config
from rlhf_core.models.batches import check_packing
from rlhf_core.stage.context import StageContext
from rlhf_core.training.exports import Exports
from rlhf_core.training.fit import fit, total_steps
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import DemonstrationsRef, Message, PolicyRef, TokenSample
from stages.sft import SFTConfig

logger = logging.getLogger(__name__)


def run(config: SFTConfig, *, policy: PolicyRef, demonstrations: DemonstrationsRef, context: StageContext) -> PolicyRef:
    """Fine-tune `policy` on `demonstrations`; return the new policy with its evaluation loss before and after."""
    check_longest(f"{context.label}.max_length", config.max_length, context.path(policy))
    if config.packing:
        check_packing(read_config(context.path(policy)))
    chat = ChatTemplate.load(context.path(policy))
    splits, dropped, documents = {}, 0, {}
    for split in ("train", "eval"):
        rows = read_demonstrations(context.path(demonstrations) / f"{split}.parquet")
        splits[split] = [one for row in rows for one in samples_of(row.messages, chat, config)]
        documents[split] = len(rows)
        dropped += dropped_answers([row.messages for row in rows], splits[split])
    if dropped and config.train_on == "assistant":
        logger.warning("%s: %d answers begin beyond max_length = %d", context.label, dropped, config.max_length)
    if config.window_overlap:
        given = f"of at most {config.max_length} tokens from {documents['train']:,} documents"
        logger.info("%s: %s windows %s", context.label, f"{len(splits['train']):,}", given)
    context.tracker.table("preview", ["what is trained on"], [[chat.preview(sample)] for sample in splits["train"][:8]])

    objective = SftObjective(pack_to=config.max_length if config.packing else None, dft=config.loss == "dft")
    exports = open_exports(config.exported_steps, config.loop, len(splits["train"]), context)
    model = context.model(policy, lora=config.lora)
    with context.runtime.trainer("policy", model, config.optimizer) as trainer:
        result = fit(trainer, splits, objective, config.optimizer, config.loop, context, exports=exports)
        trainer.export(context.out)
    exports.deliver(context.out)
    metrics: Metrics = {"steps": result.steps, "train_samples": len(splits["train"])}
    if config.train_on == "assistant":
        metrics["dropped_answers"] = dropped
    if config.window_overlap:
        metrics["train_documents"] = documents["train"]
    metrics |= {f"before/{name}": value for name, value in result.initial.items()}
    return context.commit(PolicyRef, metrics=metrics | result.final)


def open_exports(steps: tuple[int, ...], loop: LoopConfig, samples: int, context: StageContext) -> Exports:
    """Open the exports after `steps`. Raises ConfigError if the data end before one of these steps."""
    last = total_steps(samples, loop) if samples else 0
    if steps and last < loop.max_steps:
        rule = f"there are {last} steps in the data, and the policies of `export_every` are named by this number"
        raise ConfigError(f"{context.label}.loop.max_steps", loop.max_steps, rule, "lower it, or raise loop.epochs")
    return Exports(steps, context.work)


def dropped_answers(conversations: Sequence[Sequence[Message]], samples: Sequence[TokenSample]) -> int:
    """Count the answers without a trained token in their samples: they lie beyond `max_length`."""
    answers = sum(message.role == "assistant" for messages in conversations for message in messages)
    # An answer is a run of trained tokens: the header of the next answer always lies between two runs.
    runs = sum(now > before for one in samples for before, now in pairwise((0, *one.loss_mask)))
    return answers - runs


def samples_of(messages: Sequence[Message], chat: ChatTemplate, config: SFTConfig) -> list[TokenSample]:
    """Samples of a demonstration.

    Usually one; one for each answer where the template rewrites earlier turns; several for windows of a long text.
    """
    if config.train_on == "assistant":
        return chat.examples(messages, max_length=config.max_length)
    whole = chat.transcript(messages, max_length=UNLIMITED if config.window_overlap else config.max_length)
    return [] if whole is None else windows(whole, length=config.max_length, overlap=config.window_overlap)


def windows(whole: TokenSample, *, length: int, overlap: int) -> list[TokenSample]:
    """Split a sample into parts of at most `length` tokens, each starting with `overlap` tokens of the part before.

    These are context without a loss, so that each token has it once.

    >>> parts = windows(TokenSample((1, 2, 3, 4, 5, 6), (0, 1, 1, 1, 1, 1)), length=4, overlap=2)
    >>> [(part.token_ids, part.loss_mask) for part in parts]
    [((1, 2, 3, 4), (0, 1, 1, 1)), ((3, 4, 5, 6), (0, 0, 1, 1))]
    """
    if len(whole.token_ids) <= length:
        return [whole]
    return [
        TokenSample(
            whole.token_ids[start : start + length],
            (0,) * (overlap if start else 0) + whole.loss_mask[start + (overlap if start else 0) : start + length],
        )
        for start in range(0, len(whole.token_ids) - overlap, length - overlap)
    ]
