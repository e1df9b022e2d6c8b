"""A process of its own for vLLM: `python prefix_program.py <policy> <result>`; writes how many tokens each request found cached."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig, TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec, Weights, logprob_rows
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.vllm_sampler import VllmSampler
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import SamplingRequest, TokenSample, mask

PREFIX = tuple(10 + index % 200 for index in range(300))
REQUESTS = [SamplingRequest((*PREFIX, 20 + index), seed=index) for index in range(4)]
SAMPLING = SamplingConfig(max_tokens=4)


def main(policy: Path, result: Path) -> None:
    config = VllmSamplerConfig(
        max_model_len=320, kv_cache_gib=0.25, prefix_caching=True, lora_sync="adapter", max_lora_rank=8
    )
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
    sampler.load_policy(policy)
    adapted, expected = with_adapters(sampler, policy)
    seen = {
        "cached": found,
        "adapted": adapted,
        "expected": expected,
        "same_tokens": [one.token_ids for one in first] == [one.token_ids for one in again],
        "other_logprobs": [one.logprobs for one in updated] != [one.logprobs for one in first],
    }
    result.write_text(json.dumps(seen))


def with_adapters(sampler: VllmSampler, policy: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Return the log-probs under two versions of an adapter, each sampled twice, and those of the trainer for them."""
    lora = LoraConfig(rank=4, alpha=8.0, variant="rslora", target_modules="all-linear")
    spec = ModelSpec(str(policy), "lm", lora, 3)
    engine = TrainerConfig(engine="torch")
    trainer = LocalTrainer(spec, OptimizerConfig(schedule="constant"), engine, adapters_alone=True)
    drawn, expected = [], []
    for version in (1, 2):
        row = TokenSample(REQUESTS[0].prompt_ids, mask((0, *[1] * (len(PREFIX)))))
        trainer.forward_backward([row], SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-2)
        weights = trainer.weights()
        for _ in range(2):  # the second time it is loaded again, and must not have changed what was sent
            sampler.load_weights(weights, version=version)
            made = sampler.generate(REQUESTS, SAMPLING)
        assert weights_digest(weights.payload) == weights.digest
        made = sampler.generate(REQUESTS, SAMPLING)  # finds the prefix that was computed with this adapter
        rows = [
            TokenSample(
                request.prompt_ids + one.token_ids, mask([0] * len(request.prompt_ids) + [1] * len(one.token_ids))
            )
            for request, one in zip(REQUESTS, made, strict=True)
        ]
        assert {one.policy_version for one in made} == {version}
        drawn += [one.logprobs.tolist() for one in made]
        expected += [one[len(PREFIX) + 1 :] for one in logprob_rows(trainer, rows)]
    return drawn, expected


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # nothing is left to clean up, and interpreter exit under vLLM is slow
