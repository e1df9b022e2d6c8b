"""Check requests before sampling, and stop tokens and log-probabilities after it, for every sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.data.chat_templates import declared_ends
from rlhf_core.errors import ConfigError, SamplingError, explain
from rlhf_core.types import FinishReason, SamplingRequest


def most_tokens(request: SamplingRequest, max_tokens: int) -> int:
    """Return the maximum number of tokens for `request`; `max_tokens` is the limit of the sampling configuration.

    >>> most_tokens(SamplingRequest((1, 2), seed=7, max_tokens=3), 64)
    3
    """
    return min(request.max_tokens, max_tokens) if request.max_tokens else max_tokens


def check_requests(
    requests: Sequence[SamplingRequest], *, vocab_size: int, max_tokens: int, max_model_len: int
) -> None:
    """Raise SamplingError, naming the request, for a prompt that is empty, too long or not of this vocabulary."""
    for index, request in enumerate(requests):
        where = f"requests[{index}] (seed {request.seed})"
        if not request.prompt_ids:
            raise SamplingError(explain(where, (), "the prompt has no tokens", "render it with the chat template"))
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            rule = f"token ids must lie in [0, {vocab_size})"
            raise SamplingError(explain(where, request.prompt_ids[:8], rule, "render it with this policy's tokenizer"))
        most = most_tokens(request, max_tokens)
        needed = len(request.prompt_ids) + most
        if needed > max_model_len:
            rule = f"{len(request.prompt_ids)} prompt tokens + max_tokens {most} exceed max_model_len {max_model_len}"
            remedy = "raise runtime.sampler.max_model_len, lower max_tokens (or max_episode_tokens) or drop the prompt"
            raise SamplingError(explain(where, needed, rule, remedy))


def check_logprobs(request: SamplingRequest, logprobs: Sequence[float]) -> None:
    """Raise SamplingError, naming the request, if a log-probability is not finite: a policy of NaNs still samples."""
    if not all(map(math.isfinite, logprobs)):
        where = f"request (seed {request.seed}).logprobs"
        raise SamplingError(
            explain(where, logprobs[:4], "must be finite", "the policy has diverged: return to an earlier checkpoint")
        )


def stop_token_ids(policy: Path, *, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end an answer: those of `generation_config.json` and `config.json`, and the tokenizer's own.

    Raises ConfigError if there is none: such a policy would always run to `max_tokens`.
    """
    ids = declared_ends(policy) | (set() if tokenizer_eos is None else {tokenizer_eos})
    if not ids:
        raise ConfigError(
            explain("policy", str(policy), "no end-of-sequence token", "set eos_token_id in its config.json")
        )
    return tuple(sorted(ids))


def finish_reason(last_token: int, stops: Sequence[int]) -> FinishReason:
    """Return `stop` if the answer ended with a stop token, else `length`.

    >>> finish_reason(2, (2, 5))
    'stop'
    """
    return "stop" if last_token in stops else "length"
