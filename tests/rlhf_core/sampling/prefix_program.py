"""A process of its own for vLLM: `python prefix_program.py <policy> <result>`; writes how many tokens each request found cached."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlhf_core.config.engines import SamplingConfig, VllmSamplerConfig
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.vllm_sampler import VllmSampler
from rlhf_core.types import SamplingRequest

PREFIX = tuple(10 + index % 200 for index in range(300))
REQUESTS = [SamplingRequest((*PREFIX, 20 + index), seed=index) for index in range(4)]
SAMPLING = SamplingConfig(max_tokens=4)


def main(policy: Path, result: Path) -> None:
    config = VllmSamplerConfig(max_model_len=320, kv_cache_gib=0.25, prefix_caching=True)
    sampler = VllmSampler(policy, config, threads=1, transfer="")
    found: list[list[int]] = []
    generate = sampler._llm.generate

    def watched(*arguments: Any, **options: Any) -> Any:
        outputs = generate(*arguments, **options)
        found.append([output.num_cached_tokens for output in outputs])
        return outputs

    sampler._llm.generate = watched
    first = sampler.generate(REQUESTS, SAMPLING)
    again = sampler.generate(REQUESTS, SAMPLING)
    sampler._llm.reset_prefix_cache = lambda: True  # the salt alone must keep old prefixes from being found
    payload = {name: tensor * 1.5 for name, tensor in load_file(policy / "model.safetensors").items()}
    sampler.load_weights(Weights(payload, weights_digest(payload)), version=1)
    updated = sampler.generate(REQUESTS, SAMPLING)
    seen = {
        "cached": found,
        "same_tokens": [one.token_ids for one in first] == [one.token_ids for one in again],
        "other_logprobs": [one.logprobs for one in updated] != [one.logprobs for one in first],
    }
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # nothing is left to clean up, and interpreter exit under vLLM is slow
