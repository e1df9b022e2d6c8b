"""Read the tokenizer, stop tokens and architecture from a policy's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat_templates import Decoder
from rlhf_core.errors import ConfigError, SamplingError, explain
from rlhf_core.sampling.requests import check_logprobs, check_requests, finish_reason, stop_token_ids
from rlhf_core.types import Completion, SamplingRequest

NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype"),
    *("eos_token_id", "bos_token_id", "pad_token_id"),
}
"""Config keys that a re-export may change. The engine does not read them, or gets their values from us."""


@dataclass(frozen=True)
class PolicyFolder:
    """A policy that a vLLM engine serves; `stops` are the ids that end an answer."""

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
        from rlhf_core.models.architecture import check_longest
        from rlhf_core.models.loading import load_tokenizer

        text_config = _text_config(policy)
        positions = text_config.get("max_position_embeddings")
        if positions is not None and max_model_len > positions:
            rule = f"the policy has {positions} positions"
            remedy = f"set it to {positions} or less"
            raise ConfigError(explain("runtime.sampler.max_model_len", max_model_len, rule, remedy))
        check_longest("runtime.sampler.max_model_len", max_model_len, policy)
        tokenizer = load_tokenizer(policy)
        stops = stop_token_ids(policy, tokenizer_eos=tokenizer.eos_token_id)
        return cls(policy, Decoder(tokenizer, ends=stops), stops, int(text_config["vocab_size"]), max_model_len)

    def check(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> None:
        """Raise SamplingError, naming the request, if one does not fit."""
        check_requests(
            requests,
            vocab_size=self.vocab_size,
            max_tokens=sampling.max_tokens,
            max_model_len=self.max_model_len,
        )

    def completion(
        self, request: SamplingRequest, token_ids: tuple[int, ...], logprobs: tuple[float, ...], *, version: int
    ) -> Completion:
        """Return the engine's output as a `Completion`. Raises SamplingError if a log-probability is not finite."""
        if not token_ids:
            raise SamplingError(
                explain(f"request (seed {request.seed})", (), "no tokens were returned", "see the log of the engine")
            )
        check_logprobs(request, logprobs)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=self.decode(token_ids),
            finish_reason=finish_reason(token_ids[-1], self.stops),
            policy_version=version,
            seed=request.seed,
        )


def architecture(policy: Path) -> dict[str, Any]:
    """Return the config entries that two policies must share to be served by one engine."""
    return {key: value for key, value in _read_config(policy).items() if key not in NOT_ARCHITECTURE}


def _read_config(policy: Path) -> dict[str, Any]:
    file = policy / "config.json"
    if not file.is_file():
        raise ConfigError(explain("policy", str(policy), "has no config.json", "give a Hugging Face model folder"))
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _text_config(policy: Path) -> dict[str, Any]:
    """Return the language model's part of the config: multimodal models nest it."""
    config = _read_config(policy)
    nested: dict[str, Any] = config["text_config"] if "text_config" in config else config
    return nested
