"""Score with a trained process reward model: each step of an answer, and the answer from its steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, cast, get_args

from rlhf_core.algorithms.lazy_torch import torch
from rlhf_core.algorithms.process_reward import StepReduction, reduce_steps
from rlhf_core.errors import ArtifactError, explain
from rlhf_core.interfaces import Trainer
from rlhf_core.rewards.model import PromptRenderer, check_rendering, check_scores
from rlhf_core.types import Generation, TokenSample

logger = logging.getLogger(__name__)


class Splitter(Protocol):
    """Finds where steps end, as `rlhf_core.data.steps.StepSplitter` does."""

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ProcessContract:
    """What `contract.json` of a process reward model promises: how answers are cut, and what the probes scored."""

    max_length: int
    separator: str
    reduce: StepReduction
    probe: tuple[TokenSample, ...]
    probe_scores: tuple[tuple[float, ...], ...]
    """The logit of each step."""

    @classmethod
    def read(cls, folder: Path) -> ProcessContract:
        """Return the contract of the model in `folder`; ArtifactError if it is missing, or not of such a model."""
        path = folder / "contract.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["reduce"] not in get_args(StepReduction):
                raise ValueError(f"reduce is {content['reduce']!r}")
            probe = zip(content["probe"], content["probe_step_ends"], strict=True)
            return cls(
                max_length=content["max_length"],
                separator=content["separator"],
                reduce=cast(StepReduction, content["reduce"]),
                probe=tuple(step_ends_sample(ids, ends) for ids, ends in probe),
                probe_scores=tuple(tuple(scores) for scores in content["probe_step_scores"]),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            rule = f"is not a valid contract of a process reward model ({error!r})"
            raise ArtifactError(
                explain("process_reward_model", str(path), rule, "train the process reward model again")
            ) from error


def verify_process_contract(trainer: Trainer, contract: ProcessContract) -> None:
    """Score the probes' steps again; ArtifactError if a score moved: wrong head, wrong padding, other weights."""
    found, expected = trainer.step_scores(contract.probe), contract.probe_scores
    scores = [score for row in found for score in row]
    check_scores("process_reward_model", scores, [score for row in expected for score in row])


def score_with_process_reward_model(
    trainer: Trainer,
    chat: PromptRenderer,
    splitter: Splitter,
    generations: Sequence[Generation],
    *,
    max_length: int,
    reduce: StepReduction,
) -> list[float]:
    """Return one score per generation, `reduce` over the probabilities that its steps are right, on the tokens as sampled.

    A step that the token limit or `max_length` cut off is read at its last token. ConfigError when `chat`, the model's
    own template, reads prompts or tokens in another way than the policy (`check_rendering`).
    """
    check_rendering(chat, generations)
    samples = [judged(generation, splitter, max_length=max_length) for generation in generations]
    cut = sum(len(generation.prompt_ids + generation.completion.token_ids) > max_length for generation in generations)
    if cut:
        rule = "truncated %d of %d sequences to the process reward model's %d tokens"
        logger.warning(rule, cut, len(samples), max_length)
    logits = trainer.step_scores(samples)
    return [float(reduce_steps(torch.tensor(row).sigmoid(), how=reduce)) for row in logits]


def judged(generation: Generation, splitter: Splitter, *, max_length: int) -> TokenSample:
    """Return prompt and completion, cut to `max_length` tokens, with the mask at the last token of each step.

    The steps are those of the policy: each of its turns is split alone, and what an environment wrote between them is no
    step. A completion without tokens is read at the prompt's last token.
    """
    before = len(generation.prompt_ids)
    completion = generation.completion
    ids = generation.prompt_ids + completion.token_ids
    last = min(len(ids), max_length) - 1
    turns = [
        (before + start, splitter.ends(completion.token_ids[start:end]))
        for start, end in turns_of(completion.action_mask)
    ]
    ends = [start + end for start, ends in turns for end in ends if start + end < last]
    sampled = last >= before and completion.action_mask[last - before]
    return step_ends_sample(ids[: last + 1], [*ends, last] if sampled or not ends else ends)


def turns_of(action_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each run of sampled tokens.

    >>> turns_of((1, 1, 0, 1))
    [(0, 2), (3, 4)]
    """
    borders = [at for at, pair in enumerate(pairwise((0, *action_mask, 0))) if pair[0] != pair[1]]
    return list(zip(borders[::2], borders[1::2], strict=True))


def step_ends_sample(token_ids: Sequence[int], ends: Sequence[int]) -> TokenSample:
    """Return `token_ids` with the mask 1 at the positions `ends`.

    >>> step_ends_sample((5, 6, 7), [1, 2]).loss_mask
    (0, 1, 1)
    """
    places = set(ends)
    return TokenSample(tuple(token_ids), tuple(int(position in places) for position in range(len(token_ids))))
