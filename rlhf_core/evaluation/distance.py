"""Measure the distance of answers from the reference policy by log-ratios, whose mean is KL(mu || ref)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.stage.context import StageContext
from rlhf_core.types import Generation, PolicyRef, TokenSample

KL_BATCH = 256
"""Number of answers per call of the reference, so that progress can be reported."""


def log_ratios(
    ref: PolicyRef | None,
    rows: Mapping[str, Sequence[Generation]],
    sampling: Mapping[str, SamplingConfig],
    context: StageContext,
) -> dict[str, tuple[float, ...]]:
    """Return log mu(y) - log ref(y) of each answer y by policy, in nats, where mu is the sampler's distribution.

    For an episode it is the sum over the tokens that the policy sampled. The environment's tokens are given to both.

    The result is empty without a reference, and has no greedy or filtered answers. Greedy answers are not samples of a
    distribution, and top_p and top_k renormalize mu over the remaining tokens, but not the reference.
    """
    if ref is None:
        return dict.fromkeys(rows, ())
    ratios: dict[str, tuple[float, ...]] = {}
    total, done = sum(len(items) for items in rows.values()), 0
    model = ModelSpec(str(context.path(ref)), "lm", None, context.seed)
    with context.runtime.trainer("reference", model, None) as trainer:
        for name, items in rows.items():
            values: list[float] = []
            temperature = sampling[name].temperature
            for start in range(0, len(items) if _comparable(sampling[name]) else 0, KL_BATCH):
                piece = items[start : start + KL_BATCH]
                logprobs = trainer.logprobs([_as_sample(item) for item in piece], temperature=temperature)
                values += [_log_ratio(item, row) for item, row in zip(piece, logprobs, strict=True)]
                context.progress(
                    done + len(values), total, f"log-probabilities of the answers of {name} under the reference"
                )
            ratios[name] = tuple(values)
            done += len(items)
    return ratios


def _comparable(sampling: SamplingConfig) -> bool:
    return sampling.temperature > 0 and sampling.top_p == 1 and sampling.top_k == 0


def _as_sample(generation: Generation) -> TokenSample:
    prompt, answer = generation.prompt_ids, generation.completion
    return TokenSample(prompt + answer.token_ids, (0,) * len(prompt) + answer.action_mask)


def _log_ratio(generation: Generation, ref_logprobs: Sequence[float]) -> float:
    return math.fsum(generation.completion.logprobs) - math.fsum(ref_logprobs[len(generation.prompt_ids) :])
