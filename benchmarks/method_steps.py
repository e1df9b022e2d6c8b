"""Train a process reward model on worked sums, and measure its judgment and the answers that it prefers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from benchmarks.method_rows import Bench
from pipelines.flows.full import artifact, run_nodes
from pipelines.flows.nodes import Names, Node, expand, part
from rlhf_contrib.worlds.arithmetic import exact_match
from rlhf_core.data.shards import read_rollouts
from rlhf_core.types import DemonstrationsRef, PolicyRef, PreparedDataRef, PromptsRef, RewardModelRef, StepsRef
from stages.generate import generate
from stages.prepare_data import prepare_data
from stages.process_reward_model import process_reward_model
from stages.score import score
from stages.sft import sft

BEST_OF = 8
STEPPED = (
    'runtime.type="ray"',
    'runtime.trainer={engine = "deepspeed", micro_batch = 32}',
    'runtime.sampler={type = "vllm", max_model_len = 96, kv_cache_gib = 0.5, max_num_seqs = 128}',
    "prepare_data.model.heads=2",
    "prepare_data.model.kv_heads=2",
)
"""`tiny/prm` on the real engines; vLLM has no heads of width 16 on CPUs, so half as many of width 32 are used."""


def judge_of_steps(bench: Bench, seed: int) -> dict[str, float]:
    """Train a process reward model on worked sums; returns the quality of its judgments and of its preferred answers.

    Exact match over the held-out prompts is measured for SFT, for the best of eight answers by the model, for any of
    the eight, and for the policy that imitated the preferred answers.
    """
    config = bench.config
    assert config.sft is not None
    assert config.process_reward_model is not None
    assert config.rejection_sampling is not None
    assert config.evaluate is not None
    first, stages = bench.stages("start"), bench.stages("prm", seed)
    data: PreparedDataRef = first.run(prepare_data, "prepare_data", config.prepare_data)
    demonstrations, prompts = part(data, "demonstrations", DemonstrationsRef), part(data, "prompts", PromptsRef)
    held_out = part(data, "eval_prompts", PromptsRef)
    tuned = first.run(sft, "sft", config.sft, policy=part(data, "base", PolicyRef), demonstrations=demonstrations)
    model = stages.run(
        process_reward_model,
        "process_reward_model",
        config.process_reward_model,
        policy=tuned,
        steps=part(data, "steps", StepsRef),
    )
    models: dict[str, RewardModelRef] = {"process_reward_model": model}
    own = config.rejection_sampling
    inputs: dict[str, Names] = {"policy": "sft", "prompts": "prompts", "reward_models": {name: name for name in models}}
    group = Node("rejection_sampling", "rejection_sampling", own, inputs)
    made = run_nodes(expand(group), stages, {"sft": tuned, "prompts": prompts, **models})
    imitator = artifact("rejection_sampling", PolicyRef, made)
    many = config.evaluate.generate.model_copy(update={"samples_per_prompt": BEST_OF})

    def answers(label: str, policy: PolicyRef) -> list[list[tuple[float, float]]]:
        generations = stages.run(generate, f"{label}/generate", many, policy=policy, prompts=held_out)
        scored = stages.run(score, f"{label}/score", own.score, generations=generations, reward_models=models)
        return rewards_by_prompt(bench.store.path(scored))

    ours, theirs = answers("judged/sft", tuned), answers("judged/imitator", imitator)
    report = json.loads((bench.store.path(model) / "report.json").read_text(encoding="utf-8"))
    return {
        "accuracy": report["accuracy"],
        "first_error_accuracy": report["first_error_accuracy"],
        "f1": report["f1"],
        "sft": fmean(exact for group in ours for _, exact in group),
        "best": fmean(max(group, key=lambda one: one[0])[1] for group in ours),
        "any": fmean(max(exact for _, exact in group) for group in ours),
        "imitator": fmean(exact for group in theirs for _, exact in group),
        "seconds": bench.seconds_of("prm", seed),
    }


def rewards_by_prompt(folder: Path) -> list[list[tuple[float, float]]]:
    """The (score, exact match) of every answer, by prompt."""
    groups: dict[str, list[tuple[float, float]]] = {}
    rollouts = read_rollouts(folder)
    for rollout, exact in zip(rollouts, exact_match(rollouts), strict=True):  # type: ignore[arg-type]
        groups.setdefault(rollout.prompt.id, []).append((rollout.reward, exact))
    return list(groups.values())
