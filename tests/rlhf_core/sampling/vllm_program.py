"""A process of its own for vLLM, which changes torch for good: `python vllm_program.py <policy> <other policy> <result>`.

Writes JSON of what it saw. Without another policy it only generates, to be compared with the first process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.errors import RlhfError
from rlhf_core.interfaces import Weights
from rlhf_core.sampling.vllm_sampler import VllmSampler
from rlhf_core.types import Completion, SamplingRequest
from tests.support.hostname import listening, reachable_address, rename

REQUESTS = [SamplingRequest(tuple(range(10, 13 + index % 7)), seed=100 + index) for index in range(24)]
SAMPLING = SamplingConfig(max_tokens=24)
RESHAPED: dict[str, dict[str, Any]] = {
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "presence": {"temperature": 0.0, "presence_penalty": 0.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.3},
    "all penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "stop": {"temperature": 0.0, "stop": ("a", "e", "t")},
    "min_p": {"temperature": 0.7, "min_p": 0.9},
}
"""Settings of which each changes what is sampled."""
CONFIG = VllmSamplerConfig(max_model_len=96, kv_cache_gib=0.25)


def main(policy: Path, other: Path | None, result: Path) -> None:
    renamed = rename(reachable_address())
    sampler = VllmSampler(policy, CONFIG, threads=1, transfer="")
    seen: dict[str, Any] = {"first": plain(sampler.generate(REQUESTS, SAMPLING))}
    seen |= {"listening": listening(), "renamed": renamed}
    if other is not None:
        seen["again"] = plain(sampler.generate(REQUESTS, SAMPLING))
        seen["advanced"] = advanced(sampler)
        sampler.advance([(99, REQUESTS[5])], SamplingConfig(max_tokens=1))
        sampler.advance([(index, REQUESTS[index]) for index in range(3)], SAMPLING)  # two of them are given up
        seen["after_advancing"] = plain(sampler.generate(REQUESTS, SAMPLING))
        seen["filtered"] = plain(sampler.generate(REQUESTS, SamplingConfig(max_tokens=24, temperature=0.7, top_k=5)))
        seen["greedy"] = plain(sampler.generate(REQUESTS, SamplingConfig(max_tokens=24, temperature=0)))
        seen["reshaped"] = {
            name: plain(sampler.generate(REQUESTS, SamplingConfig(max_tokens=24, **options)))
            for name, options in RESHAPED.items()
        }
        crowd = [SamplingRequest(tuple(range(10, 90)), seed=index) for index in range(120)]  # 9600 tokens at once
        seen["crowd"] = len(sampler.generate(crowd, SamplingConfig(max_tokens=2)))
        seen["errors"] = [refusal(lambda: sampler.generate([REQUESTS[0]], SamplingConfig(max_tokens=94)))]
        seen["reloads"] = reloads(sampler, policy, other)
        seen["errors"].append(refusal(lambda: sampler.load_weights(Weights({}, "0000"), version=2)))
        sampler.close()
        too_long = CONFIG.model_copy(update={"max_model_len": 97})
        seen["errors"].append(refusal(lambda: VllmSampler(policy, too_long, threads=1, transfer="")))
        fresh = VllmSampler(other, CONFIG, threads=1, transfer="")
        seen["fresh_other"] = plain(fresh.generate(REQUESTS, SAMPLING))
    result.write_text(json.dumps(seen))


def advanced(sampler: VllmSampler) -> dict[str, Any]:
    """Six requests, then another one whenever one has finished: the order in which they finish, and what they got."""
    waiting = list(enumerate(REQUESTS))
    new, waiting = waiting[:6], waiting[6:]
    done: dict[str, Any] = {}
    while finished := sampler.advance(new, SAMPLING):
        done |= {str(number): plain([completion])[0] for number, completion in finished}
        new, waiting = waiting[: len(finished)], waiting[len(finished) :]
    return done


def reloads(sampler: VllmSampler, policy: Path, other: Path) -> dict[str, Any]:
    """Weights from memory, then a policy from its folder, then memory that lies about what it holds."""
    from safetensors.torch import load_file

    from rlhf_core.models.lora import weights_digest

    payload = load_file(other / "model.safetensors")
    sampler.load_weights(Weights(payload, weights_digest(payload)), version=5)
    from_memory = plain(sampler.generate(REQUESTS, SAMPLING))
    accepted = sampler.accepts(policy)
    sampler.load_policy(policy)
    from_folder = plain(sampler.generate(REQUESTS, SAMPLING))
    return {"from_memory": from_memory, "accepted": accepted, "from_folder": from_folder}


def refusal(call: Any) -> str:
    try:
        call()
    except RlhfError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def plain(completions: list[Completion]) -> list[dict[str, Any]]:
    per_token = ("token_ids", "logprobs", "routed_experts")
    return [asdict(one) | {name: getattr(one, name).tolist() for name in per_token} for one in completions]


if __name__ == "__main__":
    others = [Path(argument) for argument in sys.argv[2:-1]]
    main(Path(sys.argv[1]), others[0] if others else None, Path(sys.argv[-1]))
    os._exit(0)  # nothing is left to clean up, and interpreter exit under vLLM is slow
