"""Read a policy's folder, check requests before sampling and completions after it, for every sampler."""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat_templates import Decoder, declared_ends
from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.types import NO_EXPERTS, Column, Completion, SamplingRequest, floats, ids


def most_tokens(request: SamplingRequest, max_tokens: int) -> int:
    """The maximum number of tokens for `request`; `max_tokens` is the limit of the sampling configuration.

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
            raise SamplingError(where, (), "the prompt has no tokens", "render it with the chat template")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            rule = f"token ids must lie in [0, {vocab_size})"
            raise SamplingError(where, request.prompt_ids[:8], rule, "render it with this policy's tokenizer")
        most = most_tokens(request, max_tokens)
        needed = len(request.prompt_ids) + most
        if needed > max_model_len:
            rule = f"{len(request.prompt_ids)} prompt tokens + max_tokens {most} exceed max_model_len {max_model_len}"
            remedy = "raise runtime.sampler.max_model_len, lower max_tokens (or max_episode_tokens) or drop the prompt"
            raise SamplingError(where, needed, rule, remedy)


def check_logprobs(request: SamplingRequest, logprobs: Sequence[float]) -> None:
    """Raise SamplingError, naming the request, if a log-probability is not finite: a policy of NaNs still samples."""
    if not all(map(math.isfinite, logprobs)):
        where = f"request (seed {request.seed}).logprobs"
        raise SamplingError(
            where, logprobs[:4], "must be finite", "the policy has diverged: return to an earlier checkpoint"
        )


def stop_token_ids(policy: Path, *, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Ids that end an answer: from `generation_config.json` and `config.json`, and the tokenizer's own.

    Raises ConfigError if none is found: such a policy would always run to `max_tokens`.
    """
    ids = declared_ends(policy) | (set() if tokenizer_eos is None else {tokenizer_eos})
    if not ids:
        rule = "no end-of-sequence token"
        raise ConfigError("policy", str(policy), rule, "set eos_token_id in its config.json")
    return tuple(sorted(ids))


# ---------------------------------------------------------------- weights through host memory


def tensors_of(weights: Weights) -> Mapping[str, Any]:
    """The payload of `weights`, Hugging Face name -> CPU tensor. Raises SamplingError if it is anything else.

    >>> tensors_of(Weights(payload={}, digest=""))
    {}
    """
    if not isinstance(weights.payload, Mapping):
        kind = type(weights.payload).__name__
        raise SamplingError("weights.payload", kind, "must map names to tensors", "resolve it first")
    return weights.payload


def received_tensors(weights: Weights) -> Mapping[str, Any]:
    """Unpack name -> CPU tensor. Raises SamplingError if the digest differs from the digest of the sent tensors."""
    from rlhf_core.models.lora import weights_digest  # imports torch, which planning must not

    tensors = tensors_of(weights)
    received = weights_digest(tensors)
    if received != weights.digest:
        rule = f"the trainer sent {weights.digest[:12]}"
        raise SamplingError("weights.digest", received[:12], rule, "please report this as a bug in the transfer")
    return tensors


# ---------------------------------------------------------------- the folder of a policy

NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
}
"""Config keys that a re-export may change. The engine does not read them, or gets their values from us."""


@dataclass(frozen=True)
class PolicyFolder:
    """The folder of the policy that an engine samples; `stops` are the ids that end an answer."""

    path: Path
    decode: Callable[[Sequence[int]], str]
    stops: tuple[int, ...]
    vocab_size: int
    max_model_len: int

    @classmethod
    def read(cls, policy: Path, *, max_model_len: int) -> Self:
        """Read the folder. Raises ConfigError if it is no policy folder, if it has fewer positions than
        `max_model_len`, or if the engine would compute rotary positions differently from the trainer.
        """
        # These import torch and transformers, before which a sampler may have to set variables.
        from rlhf_core.models.architecture import check_longest, read_config, stated_positions
        from rlhf_core.pretrained import load_tokenizer

        config = _read_config(policy)
        text_config = config["text_config"] if "text_config" in config else config  # of multimodal models
        positions = text_config.get("max_position_embeddings")
        if positions is not None and max_model_len > positions:
            rule = f"the policy has {positions} positions"
            remedy = f"set it to {positions} or less"
            stated = stated_positions(read_config(policy)) or 0
            if stated > positions:  # vLLM takes no more than the configuration states
                remedy += f", or max_position_embeddings in its config.json to {stated}, for which its scaling was made"
            raise ConfigError("runtime.sampler.max_model_len", max_model_len, rule, remedy)
        check_longest("runtime.sampler.max_model_len", max_model_len, policy)
        tokenizer = load_tokenizer(policy)
        stops = stop_token_ids(policy, tokenizer_eos=tokenizer.eos_token_id)
        return cls(policy, Decoder(tokenizer, ends=stops), stops, int(text_config["vocab_size"]), max_model_len)

    def check(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> None:
        """Raise SamplingError, naming the request, if a request does not fit."""
        check_requests(
            requests, vocab_size=self.vocab_size, max_tokens=sampling.max_tokens, max_model_len=self.max_model_len
        )

    def completion(
        self,
        request: SamplingRequest,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int,
        stop: Sequence[str] = (),
        experts: NDArray[Any] | None = None,
    ) -> Completion:
        """Convert the engine's output to a `Completion`, up to the first text in `stop`.

        Later tokens were drawn afterwards and change nothing before them, so that cutting them off is exact. `experts`
        [L, ...] belong to the prompt's tokens and the next ones: an engine does not compute the last token that it
        draws. Raises SamplingError if a log-probability is not finite, or if experts are requested but missing.
        """
        if not token_ids:
            rule = "no tokens were returned"
            raise SamplingError(f"request (seed {request.seed})", (), rule, "see the log of the engine")
        check_logprobs(request, logprobs)
        ends = first_end(token_ids, stop, self.decode)
        if ends:
            token_ids, logprobs = token_ids[:ends], logprobs[:ends]
        return Completion(
            token_ids=ids(token_ids),
            logprobs=floats(logprobs),
            finish_reason="stop" if ends or token_ids[-1] in self.stops else "length",
            text=self.decode(token_ids),
            policy_version=version,
            seed=request.seed,
            routed_experts=recorded_experts(request, len(request.prompt_ids) + len(token_ids), experts),
        )


def recorded_experts(request: SamplingRequest, tokens: int, experts: NDArray[Any] | None) -> Column[int]:
    """The record of a completion, if the request asks for it: the experts, cut or filled with -1 to so many tokens."""
    if not request.routed_experts:
        return NO_EXPERTS
    if experts is None:
        where = f"request (seed {request.seed}).routed_experts"
        remedy = "set runtime.sampler.routed_experts = true, or ppo.router_replay = false"
        raise SamplingError(where, True, "the engine recorded no experts", remedy)
    whole = np.full((tokens, *experts.shape[1:]), -1, np.int16)
    whole[: len(experts)] = experts[:tokens]
    return Column("h", whole.ravel())


def first_end(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """Count the tokens up to the token that completes the first text in `stop`; 0 if none occurs.

    >>> first_end([65, 66, 67, 66], ["BC"], lambda ids: bytes(ids).decode())
    3
    """

    def has_one(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(one in text for one in stop)

    if not stop or not has_one(len(token_ids)):
        return 0
    return 1 + bisect_left(range(1, len(token_ids) + 1), True, key=has_one)


def further_options(sampling: SamplingConfig) -> dict[str, float]:
    """Options of vLLM's `SamplingParams` besides temperature, top_p and top_k, if they are set.

    >>> further_options(SamplingConfig(min_p=0.1, presence_penalty=0.5))
    {'min_p': 0.1, 'presence_penalty': 0.5}
    """
    filters = {"min_p": sampling.min_p} if sampling.min_p and sampling.temperature else {}
    return filters | sampling.penalties


def architecture(policy: Path) -> dict[str, Any]:
    """The config entries that two policies must share to be served by one engine."""
    return {key: value for key, value in _read_config(policy).items() if key not in NOT_ARCHITECTURE}


def _read_config(policy: Path) -> dict[str, Any]:
    file = policy / "config.json"
    if not file.is_file():
        raise ConfigError("policy", str(policy), "has no config.json", "give a Hugging Face model folder")
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
