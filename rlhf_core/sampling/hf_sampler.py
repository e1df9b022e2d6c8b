"""Sample with plain transformers: for tests and machines without vLLM. Never chosen silently.

Legend: B rows of a batch, L positions, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import ModelSpec, SamplerEngine, Weights
from rlhf_core.models.architecture import caps_attention, implements_sdpa, length_limit, read_config
from rlhf_core.models.forward import backbone_of, compute_in_float32
from rlhf_core.models.loading import load_model, renamed_weights
from rlhf_core.models.router_replay import ExpertRecorder
from rlhf_core.sampling.requests import PolicyFolder, most_tokens, received_tensors
from rlhf_core.types import Completion, SamplingRequest, chunks


class HFSampler:
    """A `Sampler` over one transformers model in this process, on CPU or the current GPU.

    Each request draws its uniforms from a separate generator, so its completion depends on the other rows of its batch
    only through rounding.

    >>> HFSampler(Path("policy"), HFSamplerConfig()).generate(requests, SamplingConfig())   # doctest: +SKIP
    """

    def __init__(self, policy: Path, config: HFSamplerConfig) -> None:
        spec = ModelSpec(path=str(policy), head="lm", lora=None, seed=0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # Attention is fixed here: sdpa would omit the cap on attention logits that some models have, and others lack it.
        stored = read_config(policy)
        attention = "sdpa" if implements_sdpa(stored) and not caps_attention(stored) else "eager"
        self._model: Any = load_model(
            spec, dtype=config.dtype, attention=attention, gradient_checkpointing=False, device=device
        )
        if config.fp32_lm_head:
            compute_in_float32(self._model.get_output_embeddings())  # type: ignore[operator]
        model_config: Any = self._model.config
        stated = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        longest = length_limit(model_config) or stated or sys.maxsize  # recurrent models have no positions
        self._policy = PolicyFolder.read(policy, max_model_len=longest)
        self._batch_size = config.batch_size
        self._version = 0

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self._policy.check(requests, sampling)
        completions: list[Completion] = []
        for batch in chunks(requests, self._batch_size):
            rows = [_Row.start(request, sampling) for request in batch]
            records = any(request.routed_experts for request in batch)
            recording = closing(ExpertRecorder(backbone_of(self._model))) if records else nullcontext()
            with torch.inference_mode(), recording as recorder:
                self._fill(rows, sampling, recorder)
            completions += [
                self._policy.completion(
                    row.request,
                    tuple(row.token_ids),
                    tuple(row.logprobs),
                    version=self._version,
                    stop=sampling.stop,
                    experts=np.concatenate(row.experts) if row.experts else None,
                )
                for row in rows
            ]
        return completions

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        """Generate the completions of all of `new`: this engine has no running batch that requests could join."""
        completions = self.generate([request for _, request in new], sampling)
        return [(number, completion) for (number, _), completion in zip(new, completions, strict=True)]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace the policy by `weights` (payload: name -> tensor). Raises SamplingError if they are not the policy's."""
        tensors = received_tensors(weights)
        if not tensors.keys() <= self._model.state_dict().keys():
            tensors = renamed_weights(self._model, tensors)
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        tied = set(self._model.all_tied_weights_keys)
        if unexpected or set(missing) - tied:
            wrong = sorted({*unexpected, *(set(missing) - tied)})[:3]
            rule = "do not match the policy"
            raise SamplingError("weights", wrong, rule, "train and sample the same architecture")
        self._model.tie_weights()
        self._version = version

    def accepts(self, policy: Path) -> bool:
        """Always False: opening another policy costs as little as loading its weights in place."""
        return False

    def load_policy(self, policy: Path) -> None:
        """Raise SamplingError: this sampler accepts no other policy."""
        rule = "a sampler of transformers cannot load another policy"
        raise SamplingError("policy", str(policy), rule, "close this sampler and open a new one, which is as fast")

    def versions(self) -> dict[str, str]:
        """Versions of torch and transformers."""
        return {name: installed_version(name) for name in ("torch", "transformers")}

    def close(self) -> None:
        """Free the model."""
        self._model = None

    # ------------------------------------------------------------ one batch

    def _fill(self, rows: list[_Row], sampling: SamplingConfig, recorder: ExpertRecorder | None) -> None:
        """Run the rows together, left-padded, until each has a stop token or its maximum number of tokens."""
        ids_BL, mask_BL = _left_pad([row.request.prompt_ids for row in rows], device=self._model.device)
        positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        cache, penalizes = None, bool(sampling.penalties)
        for step in range(max(row.most for row in rows)):
            output = self._model(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                position_ids=positions_BL,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            for row, experts_LW in zip(rows, recorder.take(len(rows)), strict=True) if recorder else ():
                if not row.finished:
                    row.experts.append(experts_LW[-len(row.request.prompt_ids) :].numpy())  # later passes: one token
            logits_BV = output.logits[:, -1].float()
            if penalizes:
                logits_BV = penalized(
                    logits_BV, [row.request.prompt_ids for row in rows], [row.token_ids for row in rows], sampling
                )
            logprobs_BV = processed_logprobs(logits_BV, sampling)
            tokens_B = self._draw(rows, logprobs_BV, step, greedy=sampling.temperature == 0)
            if all(row.finished for row in rows):
                return
            ids_BL = tokens_B[:, None]
            positions_BL = positions_BL[:, -1:] + 1
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(rows), 1)], dim=-1)

    def _draw(self, rows: list[_Row], logprobs_BV: Tensor, step: int, *, greedy: bool) -> Tensor:
        """Append a token to every unfinished row; return the next input `tokens_B` (a finished row repeats its last)."""
        uniforms_B = torch.stack([row.uniforms[min(step, row.most - 1)] for row in rows]).to(logprobs_BV.device)
        tokens_B = logprobs_BV.argmax(-1) if greedy else inverse_cdf(logprobs_BV, uniforms_B)
        drawn_B = logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        for row, token, logprob in zip(rows, tokens_B.tolist(), drawn_B.tolist(), strict=True):
            if not row.finished:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.finished = token in self._policy.stops or len(row.token_ids) == row.most
        return torch.tensor([row.token_ids[-1] for row in rows], device=logprobs_BV.device)


ENGINE = SamplerEngine[HFSamplerConfig](open=lambda policy, config, *, threads, transfer: HFSampler(policy, config))


def processed_logprobs(logits_BV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities after temperature, min-p, top-k and top-p, in this order; -inf for tokens filtered out.

    Temperature 0 leaves the logits unchanged, as vLLM does for greedy requests.
    """
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)
    scaled_BV = logits_BV / sampling.temperature
    if sampling.min_p:  # p < min_p * max p, in logs
        least_B1 = scaled_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    if sampling.top_k:
        kth_B1 = scaled_BV.topk(min(sampling.top_k, scaled_BV.shape[-1])).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        # A token stays if the tokens before it hold less than top_p, so the most likely one always stays.
        before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
        drop_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV >= sampling.top_p)
        scaled_BV = scaled_BV.masked_fill(drop_BV, -torch.inf)
    return scaled_BV.log_softmax(-1)


def penalized(
    logits_BV: Tensor, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], sampling: SamplingConfig
) -> Tensor:
    """Apply the penalties on tokens of each row's prompt and answer so far to the logits, in vLLM's order."""
    counts_BV = torch.zeros_like(logits_BV)
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        drawn = torch.tensor(answer, dtype=torch.long, device=logits_BV.device)
        counts_BV[row].index_add_(0, drawn, torch.ones_like(drawn, dtype=counts_BV.dtype))
        seen_BV[row, [*prompt, *answer]] = True
    factor = sampling.repetition_penalty
    repeated_BV = torch.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    logits_BV = torch.where(seen_BV, repeated_BV, logits_BV)
    return logits_BV - sampling.frequency_penalty * counts_BV - sampling.presence_penalty * (counts_BV > 0).float()


def inverse_cdf(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Choose `tokens_B`: the first token at which the cumulative probability exceeds the uniform of its row."""
    cumulative_BV = (
        logprobs_BV.double().exp().cumsum(-1)
    )  # F(v) = sum of p up to v; the token is min {v: F(v) > u F(V)}
    thresholds_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(-1)
    return tokens_B.clamp(max=logprobs_BV.shape[-1] - 1)  # NaN falls past the end; its log-probability reveals it


@dataclass
class _Row:
    """A request in progress, of at most `most` tokens; `uniforms` are the draws in [0, 1) of all its steps."""

    request: SamplingRequest
    most: int
    uniforms: Tensor
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    experts: list[NDArray[np.int16]]
    """Experts of the tokens of each forward pass, if they are recorded."""

    @classmethod
    def start(cls, request: SamplingRequest, sampling: SamplingConfig) -> _Row:
        generator = torch.Generator().manual_seed(request.seed)
        most = most_tokens(request, sampling.max_tokens)
        uniforms = torch.rand(most, generator=generator, dtype=torch.float64)
        return cls(request, most, uniforms, [], [], False, [])


def _left_pad(prompts: Sequence[Sequence[int]], *, device: Any) -> tuple[Tensor, Tensor]:
    """Pad to `ids_BL` and `mask_BL`, prompts flush right; the padding id is 0 and never attended to."""
    rows = [torch.tensor(list(prompt), device=device) for prompt in prompts]
    filled = partial(pad_sequence, batch_first=True, padding_side="left")
    return filled(rows), filled(list(map(torch.ones_like, rows)))
