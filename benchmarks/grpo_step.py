"""Compare the seconds of one GRPO step (sample, score, measure, update) with TRL's GRPOTrainer, in one run.

    python -m benchmarks.grpo_step --trl-python /path/to/venv-with-trl/bin/python
    python -m benchmarks.grpo_step --before v0.1.0 --sides "ours HF" "ours vLLM"     # also of a revision

Both sides use the same random weights, prompts, group, answer limit, reward, KL to the reference, micro-batches and
AdamW in float32. TRL generates with transformers; ours with transformers and with vLLM, in this process. Answers of
`mixed` lengths end at any of a dozen tokens of the vocabulary, so that few of them reach the limit; nearly all of the
others do. Each side is a separate warm process; they take turns. OMP_NUM_THREADS applies to all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sides import Root, Side, Turn, root, share_of_even
from benchmarks.train_step import REPEATS, ratio, roots, tiny
from rlhf_core.algorithms.advantage.group import GRPOAdvantage
from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, Precision, SamplingConfig, TrainerConfig
from rlhf_core.config.runtime import HFSamplerConfig, SamplerConfig, VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec, Sampler
from rlhf_core.runtime.samplers import open_sampler
from rlhf_core.training.experience import (
    ALL,
    Experience,
    estimate_in_blocks,
)
from rlhf_core.training.objectives.base import PolicyObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import Message, Prompt, Rollout, SamplingRequest, derive_seed, ids

KL_COEF = 0.04
STOPS = range(500, 512)
"""12 of 512 tokens that a policy with random weights samples about equally often: answers of about 40 tokens."""
SAMPLERS = {"ours HF": "hf", "ours vLLM": "vllm", "ours HF, its log-probs": "hf", "ours vLLM, its log-probs": "vllm"}
"""With `its log-probs`, pi_old are the sampler's (`correction.pi_old = "sampler"`), and the policy computes none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--lengths", nargs="*", default=["uniform", "mixed"], choices=["uniform", "mixed"])
    parser.add_argument("--sides", nargs="*", default=[*SAMPLERS, "TRL HF"])
    parser.add_argument("--trl-python", metavar="PATH", help="an interpreter that has TRL")
    parser.add_argument("--before", metavar="REVISION", help="measure our sides as they were, too")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on GPUs all compute in bfloat16")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model in place of the tiny one")
    parser.add_argument("--root", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.root:
        root(work)
        return 0
    lines = [
        "| answers | side | seconds of a step | tokens/s | TRL's time over its own | that of before | peak GiB |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    if options.before:
        options.sides += [side.replace("ours", "before") for side in options.sides if side in SAMPLERS]
    own = ["benchmarks.grpo_step", "--root"]
    with tempfile.TemporaryDirectory() as place, roots(own, Path(place), options) as known:
        for spread in options.lengths:
            folder = Path(place) / spread
            folder.mkdir()
            for line in compare(options, spread, folder, known):
                lines.append(f"| {spread} | {line} |")
                print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def compare(options: argparse.Namespace, spread: str, folder: Path, roots: Mapping[str, Root]) -> list[str]:
    """Run the sides in turns; returns one table line per side."""
    model = options.model or tiny(folder / "model").folder
    if spread == "mixed":
        end_at(model, STOPS)
    draw = random.Random(17)
    prompts = [[draw.randrange(10, 256) for _ in range(draw.randrange(8, 33))] for _ in range(options.prompts)]
    job = {
        "kind": "grpo", "model": str(model), "prompts": prompts, "group": options.group, "answer": options.answer,
        "micro_batch": 8, "learning_rate": 1e-5, "kl_coef": KL_COEF, "folder": str(folder), "device": options.device,
    }  # fmt: skip
    sides = [
        Side(name, roots[name.split()[0]], job | {"side": name.replace("before", "ours")}, folder)
        for name in options.sides
        if name.split()[0] in roots
    ]
    for side in sides:
        side.wait()
    turns: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            turns[side.name].append(side.step())
    peaks = {side.name: side.stop()["peak_gib"] for side in sides}
    answers = options.prompts * options.group
    seconds = {name: [one[options.clock] for one in taken] for name, taken in turns.items()}
    lines = []
    for name, taken in turns.items():
        rate = statistics.median(one["mean_length"] * answers / one[options.clock] for one in taken)
        middle, least, most = statistics.median(seconds[name]), min(seconds[name]), max(seconds[name])
        lines.append(
            f"{name} | {middle:.2f} ({least:.2f}-{most:.2f}) | {rate:.0f} | {ratio(seconds, name, 'TRL HF')} "
            f"| {ratio(seconds, name, name.replace('ours', 'before'))} | {peaks[name]:.2f}"
        )
    return lines


def end_at(model: Path, stops: Sequence[int]) -> None:
    """Make the model's answers end at these tokens, too."""
    file = model / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *stops]}), encoding="utf-8")


# ---------------------------------------------------------------- our side


def work(job: dict[str, Any], turn: Turn) -> None:
    """Serve GRPO steps until the comparison ends."""
    turn.serve(grpo_step(job))


def grpo_step(job: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """Build a step that does the work of `stages.ppo.run` between two checkpoints, with in-process engines."""
    config = TrainerConfig(engine="torch", dtype=precision(job), micro_batch=job["micro_batch"])
    spec = ModelSpec(job["model"], "lm", None, 17)
    policy = LocalTrainer(spec, OptimizerConfig(), config)
    reference = LocalTrainer(spec, None, config)
    sampler = sampler_of(job)
    trusting = job["side"].endswith("log-probs")
    objective = PolicyObjective(
        loss=ClipLoss(), max_length=job["answer"], temperature=1.0, kl_coef=job["kl_coef"], entropy_coef=0.0,
        correction=CorrectionConfig(pi_old="sampler", level="off") if trusting else CorrectionConfig(),
    )  # fmt: skip
    made = 0

    def step() -> dict[str, float]:
        nonlocal made
        sampler.load_weights(policy.weights(), version=made)
        rollouts = roll_out(sampler, job, made)
        made += 1
        measured = Experience.of(rollouts)
        answers, sampled = measured.answers, measured.sequences
        old = sampled.fields["rollout_logprobs"] if trusting else policy.logprobs(sampled, temperature=1.0)
        ref = reference.logprobs(sampled, temperature=1.0)
        experience = Experience(answers, sampled.with_fields(old_logprobs=old, ref_logprobs=ref))
        [(advantages_BT, _)], _ = estimate_in_blocks(
            experience, [ALL], estimator=GRPOAdvantage(), group_size=job["group"], kl_coef=0.0
        )
        batch = experience.sequences.with_fields(advantages=experience.flatten(advantages_BT))
        metrics = policy.forward_backward(batch, objective)
        metrics |= policy.optim_step(learning_rate=job["learning_rate"])
        tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
        return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "mean_length": tokens / len(rollouts)}

    return step


def precision(job: dict[str, Any]) -> Precision:
    """The precision of all sides; weights stay in float32."""
    return "float32" if job["device"] == "cpu" else "bfloat16"


def sampler_of(job: dict[str, Any]) -> Sampler:
    """Open the sampler of the side, with batches wide enough for all answers at once, as in TRL."""
    rows = len(job["prompts"]) * job["group"]
    config: SamplerConfig = HFSamplerConfig(batch_size=rows, dtype=precision(job))
    if SAMPLERS[job["side"]] == "vllm":
        longest = max(map(len, job["prompts"])) + job["answer"]
        config = VllmSamplerConfig(
            dtype=precision(job), kv_cache_gib=0.5, gpu_memory_fraction=0.3, max_num_seqs=rows,
            max_model_len=max(256, longest), enforce_eager=job["device"] == "cpu",
        )  # fmt: skip
    threads = int(os.getenv("OMP_NUM_THREADS", "1"))
    sampler: Sampler = open_sampler(Path(job["model"]), config, threads=threads, transfer="")
    return sampler


def roll_out(sampler: Sampler, job: dict[str, Any], step: int) -> list[Rollout]:
    """The scored answers of a step, grouped by prompt."""
    numbered = [(number, asked) for number, asked in enumerate(job["prompts"]) for _ in range(job["group"])]
    requests = [SamplingRequest(ids(asked), derive_seed(17, step, i)) for i, (_, asked) in enumerate(numbered)]
    completions = sampler.generate(requests, SamplingConfig(temperature=1.0, max_tokens=job["answer"]))
    return [
        Rollout(
            Prompt(str(number), (Message("user", ""),), "", "benchmark"),
            request.prompt_ids,
            completion,
            share_of_even(completion.token_ids),
            {},
        )
        for (number, _), request, completion in zip(numbered, requests, completions, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
