"""Supervised fine-tuning: maximise the likelihood of the assistant's tokens in demonstrations.

Loss: -log pi(y_t | y_<t, x), token mean over the whole optimizer step, on assistant tokens and their end-of-turn token,
or on all tokens, as in pretraining. `dft` weights each token by its own probability (arXiv 2508.05629).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.interfaces import Metrics, ModelSpec
from rlhf_core.models.architecture import check_longest, read_config
from rlhf_core.models.shared_rows import check_packing
from rlhf_core.stage.context import StageContext
from rlhf_core.training.fit import fit
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import DemonstrationsRef, Message, PolicyRef, TokenSample
from stages.config.sft import SFTConfig


def run(config: SFTConfig, *, policy: PolicyRef, demonstrations: DemonstrationsRef, context: StageContext) -> PolicyRef:
    """Fine-tune `policy` on `demonstrations`; return the new policy with its evaluation loss before and after."""
    check_longest(f"{context.label}.max_length", config.max_length, context.path(policy))
    if config.packing:
        check_packing(read_config(context.path(policy)))
    chat = ChatTemplate.load(context.path(policy))
    splits = {}
    for split in ("train", "eval"):
        rows = read_demonstrations(context.path(demonstrations) / f"{split}.parquet")
        splits[split] = [one for row in rows for one in samples_of(row.messages, chat, config)]
    context.tracker.dataset("demonstrations", demonstrations.digest, "training")
    context.tracker.input_model(policy.digest)
    context.tracker.table("preview", ["what is trained on"], [[chat.preview(sample)] for sample in splits["train"][:8]])

    objective = SftObjective(pack_to=config.max_length if config.packing else None, dft=config.loss == "dft")
    model = ModelSpec(path=str(context.path(policy)), head="lm", lora=config.lora, seed=context.seed)
    with context.runtime.trainer("policy", model, config.optimizer) as trainer:
        result = fit(
            trainer,
            splits["train"],
            splits["eval"],
            objective,
            optimizer=config.optimizer,
            loop=config.loop,
            context=context,
        )
        trainer.export(context.out)
    metrics: Metrics = {"steps": result.steps, "train_samples": len(splits["train"])}
    metrics |= {f"before/{name}": value for name, value in result.initial.items()}
    return context.commit(PolicyRef, metrics=metrics | result.final)


def samples_of(messages: Sequence[Message], chat: ChatTemplate, config: SFTConfig) -> list[TokenSample]:
    """Return the samples of a demonstration: one, or one for each answer where the template rewrites earlier turns."""
    if config.train_on == "assistant":
        return chat.examples(messages, max_length=config.max_length)
    whole = chat.transcript(messages, max_length=config.max_length)
    return [] if whole is None else [whole]
