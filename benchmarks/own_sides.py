"""Run this project's side of `train_step`, and the plain loop: one process, one model, steps on request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.sides import Turn, root
from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.preference.dpo import DPOLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.sequences import Sequences
from rlhf_core.training.objectives.base import PolicyObjective, SftObjective
from rlhf_core.training.objectives.preference import PairObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import PreferenceSample, TokenSample, ids, mask

BETA, CLIP = 0.1, 0.2


def work(job: dict[str, Any], turn: Turn) -> None:
    """Serve steps until the comparison ends."""
    step = plain_step(job) if job["engine"] == "plain" else our_step(job)
    shape = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))

    def peak(dtype: torch.dtype) -> Callable[[], float]:
        return lambda: matmul_gflops(shape["hidden_size"], shape["intermediate_size"], dtype)

    turn.serve(step, fp32_gflops=peak(torch.float32), bf16_gflops=peak(torch.bfloat16))


def our_step(job: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """Build a step of `LocalTrainer`; the reference's log-probs are measured beforehand, as the stages do."""
    config = TrainerConfig(engine=job["engine"], micro_batch=job["micro_batch"])
    trainer = LocalTrainer(ModelSpec(job["model"], "lm", None, 17), OptimizerConfig(), config)
    samples: Any
    objective: Any
    match job["kind"]:
        case "sft":
            samples = [token_sample(row, "answer_ids") for row in job["rows"]]
            objective = SftObjective(pack_to=job["pack_to"] if job["layout"] == "ours packed" else None)
        case "dpo":
            samples = preference_samples(job["rows"], trainer)
            objective = PairObjective(DPOLoss(beta=BETA), nll_coef=0.0, length_alpha=1.0)
        case _:
            samples = policy_batch(job["rows"])
            objective = PolicyObjective(
                loss=ClipLoss(clip_low=CLIP, clip_high=CLIP), max_length=1, temperature=1.0, kl_coef=0.0,
                entropy_coef=0.0, correction=CorrectionConfig(),
            )  # fmt: skip

    def step() -> dict[str, float]:
        metrics = trainer.forward_backward(samples, objective)
        metrics |= trainer.optim_step(learning_rate=job["learning_rate"])
        return {name: metrics[name] for name in ("loss", "grad_norm")}

    return step


def token_sample(row: dict[str, Any], answer: str) -> TokenSample:
    """Prompt and answer as a sequence that trains on the answer."""
    trained = [0] * len(row["prompt_ids"]) + [1] * len(row[answer])
    return TokenSample(ids([*row["prompt_ids"], *row[answer]]), mask(trained))


def preference_samples(rows: list[dict[str, Any]], trainer: LocalTrainer) -> list[PreferenceSample]:
    """The pairs, with the model before its first step as reference."""
    chosen = [token_sample(row, "chosen_ids") for row in rows]
    rejected = [token_sample(row, "rejected_ids") for row in rows]
    sums = [sum(one) for one in logprob_rows(trainer, [*chosen, *rejected])]
    return [
        PreferenceSample(*four) for four in zip(chosen, rejected, sums[: len(rows)], sums[len(rows) :], strict=True)
    ]


def policy_batch(rows: list[dict[str, Any]]) -> Sequences:
    """Rollouts with their old log-probs, and their advantage on every token of the answers."""
    made = Sequences.of([token_sample(row, "answer_ids") for row in rows])
    logprobs, advantages = (
        np.repeat(np.array([row[name] for row in rows], np.float32), made.lengths) * made.loss_mask
        for name in ("logprob", "advantage")
    )
    return made.with_fields(
        rollout_logprobs=logprobs, old_logprobs=logprobs, ref_logprobs=logprobs, advantages=advantages
    )


# ---------------------------------------------------------------- the plain loop


def plain_step(job: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """Build a hand-written step: padded micro-batches in the order of the rows, logits, loss, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    rows, size = job["rows"], job["micro_batch"]
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    tokens = sum(len(row[name]) for row in rows for name in ("answer_ids",) if name in row)
    references: list[Tensor] = []
    if job["kind"] == "dpo":
        with torch.no_grad():
            references = [pair_logprobs(model, batch) for batch in batches]

    def step() -> dict[str, float]:
        total = 0.0
        for number, batch in enumerate(batches):
            match job["kind"]:
                case "sft":
                    loss = answer_nll(model, batch) / tokens
                case "dpo":
                    chosen, rejected = (pair_logprobs(model, batch) - references[number]).chunk(2)
                    loss = -F.logsigmoid(BETA * (chosen - rejected)).sum() / len(rows)
                case _:
                    loss = clipped_loss(model, batch) / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "grad_norm": float(norm)}

    return step


def answer_nll(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """The summed cross entropy of the answers' tokens."""
    ids, mask, labels = padded_batch([(row["prompt_ids"], row["answer_ids"]) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def pair_logprobs(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """The summed log-probs of all chosen answers, then of all rejected ones."""
    pairs = [(row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids") for row in rows]
    logprobs, labels = answer_logprobs(model, pairs)
    return (logprobs * (labels != -100)).sum(dim=1)


def clipped_loss(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """PPO's clipped loss, summed over the answers' tokens."""
    logprobs, labels = answer_logprobs(model, [(row["prompt_ids"], row["answer_ids"]) for row in rows])
    old = torch.tensor([[row["logprob"]] for row in rows])
    advantages = torch.tensor([[row["advantage"]] for row in rows])
    ratio = (logprobs - old).exp()
    terms = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(terms * (labels != -100)).sum()


def answer_logprobs(model: Any, pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """The log-prob of every label, and the labels."""
    ids, mask, labels = padded_batch(pairs)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = labels[:, 1:]
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1), labels


def padded_batch(pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and labels of prompts with answers, padded on the right."""
    ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs]
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True), mask, pad_sequence(labels, batch_first=True, padding_value=-100)


# ---------------------------------------------------------------- peak rate


def matmul_gflops(
    hidden: int, intermediate: int, dtype: torch.dtype, *, rows: int = 512, seconds: float = 1.0
) -> float:
    """Measure the best rate of the model's widest product, in both directions, over `seconds` each."""
    best = 0.0
    for inner, outer in ((hidden, intermediate), (intermediate, hidden)):
        a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, outer, dtype=dtype)
        a @ b
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            clock = time.perf_counter()
            a @ b
            best = max(best, 2 * rows * inner * outer / (time.perf_counter() - clock) / 1e9)
    return best


if __name__ == "__main__":
    import deepspeed  # noqa: F401  # imported before the forks
    from transformers.models.llama import modeling_llama  # noqa: F401

    root(work)
