"""Score with a trained reward model, on inputs formatted as in its training."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_core.errors import ArtifactError, ConfigError, explain
from rlhf_core.interfaces import Trainer
from rlhf_core.types import Generation, Message

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 1e-1
"""Largest difference of a probe score, relative above 1. Training keeps float32 weights under autocast and serving rounds
them to bfloat16; a head that is not the trained one is off by about 1."""
RENDERED = 8
"""Prompts per batch whose rendering is compared with the policy's."""


class PromptRenderer(Protocol):
    """The part of a chat template that scoring needs."""

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Contract:
    """What `contract.json` of a reward model promises: the longest input, and what it scored on leaving training."""

    max_length: int
    probe: tuple[tuple[int, ...], ...]
    probe_scores: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """Return the contract of the reward model in `folder`; ArtifactError if it is missing or not readable."""
        path = folder / "contract.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                max_length=content["max_length"],
                probe=tuple(tuple(ids) for ids in content["probe"]),
                probe_scores=tuple(content["probe_scores"]),
            )
        except (OSError, KeyError, ValueError) as error:
            raise ArtifactError(
                explain(
                    "reward_model", str(path), f"is not a valid contract ({error!r})", "train the reward model again"
                )
            ) from error


def verify_contract(trainer: Trainer, contract: Contract) -> None:
    """Score the probe sequences again; ArtifactError if a score moved: wrong head, wrong padding, other weights."""
    check_scores("reward_model", trainer.scores(contract.probe), contract.probe_scores)


def check_scores(kind: str, scores: Sequence[float], expected: Sequence[float]) -> None:
    """Raise ArtifactError if a probe score is not the `expected` one, as close as the precision of both allows."""
    reduced = _in_bfloat16(scores) or _in_bfloat16(expected)
    tolerance = BFLOAT16_TOLERANCE if reduced else FLOAT32_TOLERANCE
    for index, (score, wanted) in enumerate(zip(scores, expected, strict=True)):
        if not abs(score - wanted) <= tolerance * max(1.0, abs(wanted)):  # NaN fails too
            raise ArtifactError(
                explain(
                    f"{kind}.probe[{index}]",
                    score,
                    f"was {wanted!r} after training, and differs by more than the tolerance of {tolerance:g}",
                    "load the model with the score head, padding and precision it was trained with, or train it again",
                )
            )


def score_with_reward_model(
    trainer: Trainer, chat: PromptRenderer, generations: Sequence[Generation], *, max_length: int
) -> list[float]:
    """Return one score per generation of its prompt and completion tokens as sampled, read at the last token.

    Nothing is decoded and tokenized again, and no end token is added to an answer that was cut off. Beyond
    `max_length` tokens the sequence is cut, as it was in training. ConfigError when `chat`, the reward model's own
    template, reads prompts or tokens in another way than the policy (`check_rendering`).
    """
    check_rendering(chat, generations)
    sequences = [generation.prompt_ids + generation.completion.token_ids for generation in generations]
    cut = sum(len(sequence) > max_length for sequence in sequences)
    if cut:
        logger.warning("truncated %d of %d sequences to the reward model's %d tokens", cut, len(sequences), max_length)
    return trainer.scores([sequence[:max_length] for sequence in sequences])


def check_rendering(chat: PromptRenderer, generations: Sequence[Generation]) -> None:
    """Raise ConfigError when `chat` renders one of the first prompts to other tokens than the policy saw.

    An agent may have added tools or text to the prompt, which no template renders from the prompt alone: for a completion
    with spans it is enough that the tokens mean the same text.
    """
    for generation in generations[:RENDERED]:
        _check_rendering(chat, generation)


def _in_bfloat16(scores: Sequence[float]) -> bool:
    """Return whether every score is a bfloat16 number, as only a model that computes in bfloat16 makes them."""
    return all(struct.pack(">f", score)[2:] == b"\0\0" for score in scores)


def _check_rendering(chat: PromptRenderer, generation: Generation) -> None:
    if chat.prompt_ids(generation.prompt.messages) == generation.prompt_ids:
        return
    completion = generation.completion
    rule = "the reward model's tokenizer or chat template turns it into other tokens than the policy's"
    remedy = "train the reward model from a model with the policy's tokenizer and template"
    if completion.spans:
        if chat.decode(completion.token_ids) == completion.text:
            return
        rule = "the reward model's tokenizer decodes the tokens of the episode to another text"
        remedy = "train the reward model from a model with the policy's tokenizer"
    raise ConfigError(explain("reward_model", f"prompt {generation.prompt.id}", rule, remedy))
