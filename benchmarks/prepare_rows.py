"""What `prepare_data` costs next to `datasets.map`, which applies the chat template and tokenizes twice a row.

    python -m benchmarks.prepare_rows --rows 20000 --workers 1 2
    python -m benchmarks.prepare_rows --rows 200000 --sides roomy datasets

The rows are invented word problems with the lengths of GSM8K: 560 characters and 150 tokens. Sides: `roomy` is the stage
with limits that most rows meet by their number of characters, `tight` with limits for which every row is tokenized, `long`
the stage with 20 more rows of 5 MB, and `datasets` the other library, which neither cleans, splits nor checks rows. Each
side is a process: CPU seconds and seconds include its start, the peak is its largest resident set. `--workers` is the
number of threads of the tokenizer, and of processes of `datasets`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

LIMITS = {"roomy": (512, 1024), "tight": (140, 280), "long": (512, 1024)}  # tokens of a prompt, and of a row
SIDES = (*LIMITS, "datasets")
INPUTS = "inputs"
"""Made in a process, too: the peak of a process is at least that of the one which starts it."""
VOCABULARY = 16_000
LONG_ROWS, LONG_CHARACTERS = 20, 5_000_000
_TRAINED_ON = 5_000  # rows of which the tokenizer learns its pieces


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process has used."""

    cpu_seconds: float
    seconds: float
    peak_mib: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each side and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["roomy", "tight", "datasets"])
    parser.add_argument("--compute", nargs=3, metavar=("SIDE", "FOLDER", "WORKERS"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.compute:
        compute(asked.compute[0], Path(asked.compute[1]), workers=int(asked.compute[2]), rows=asked.rows)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(INPUTS, folder, workers=1, rows=asked.rows)
        print("| side | rows | workers | CPU s | s | rows a second | peak MiB |\n|---|--:|--:|--:|--:|--:|--:|")
        for side in asked.sides:
            for workers in asked.workers:
                cost = measure(side, folder, workers=workers, rows=asked.rows)
                print(
                    f"| {side} | {asked.rows:,} | {workers} | {cost.cpu_seconds:.1f} | {cost.seconds:.1f} "
                    f"| {asked.rows / cost.seconds:,.0f} | {cost.peak_mib:,.0f} |",
                    flush=True,
                )


# ---------------------------------------------------------------- inputs


def make_inputs(folder: Path, *, rows: int) -> None:
    """Write rows, the same with long ones, and a small model whose tokenizer has learned from them."""
    from rlhf_core.config.models import InitModel
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    made = [json.dumps(row) + "\n" for row in problems(rows, seed=0)]
    (folder / "rows.jsonl").write_text("".join(made), encoding="utf-8")
    long = [{"question": f"{number} " + "long " * (LONG_CHARACTERS // 5), "answer": "1"} for number in range(LONG_ROWS)]
    with (folder / "long.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines([*made, *(json.dumps(row) + "\n" for row in long)])
    texts = (text for row in problems(_TRAINED_ON, seed=0) for text in row.values())
    train_tokenizer(texts, vocab_size=VOCABULARY, folder=folder / "model")
    shape = InitModel(vocab_size=VOCABULARY, hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64)
    initialize_llama(shape, folder / "model", seed=0)


def problems(count: int, *, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows of a question and its answer, in invented words of which few are frequent."""
    rng = random.Random(seed)
    syllables = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 3)))) for _ in range(20_000)]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))

    def sentence(number: int) -> str:
        chosen = rng.choices(words, cum_weights=weights, k=13)
        return f"{' '.join(chosen[:6]).capitalize()} {number} {' '.join(chosen[6:])}."

    for row in range(count):
        numbers = [rng.randint(2, 99) for _ in range(3)]
        steps = [f"{sentence(one)[:-1]} {one} + {row} = <<{one}+{row}={one + row}>>{one + row}." for one in numbers]
        yield {
            "question": f"{' '.join(map(sentence, numbers))} How many are {row}?",
            "answer": "\n".join([*steps, f"#### {numbers[-1] + row}"]),
        }


# ---------------------------------------------------------------- sides


def measure(side: str, folder: Path, *, workers: int, rows: int) -> Cost:
    """Compute a side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prepare_rows", "--rows", str(rows)]
    command += ["--compute", side, str(folder), str(workers)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(workers), "HF_HOME": str(folder / "cache")}
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read() if process.stderr else b""
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(errors.decode())
    return Cost(used.ru_utime + used.ru_stime, time.monotonic() - began, used.ru_maxrss / 1024)


def compute(side: str, folder: Path, *, workers: int, rows: int) -> None:
    """Do the work of a side, or make the inputs of all."""
    if side == INPUTS:
        make_inputs(folder, rows=rows)
    elif side == "datasets":
        map_rows(folder, workers)
    else:
        prepare(side, folder)


def prepare(side: str, folder: Path) -> None:
    """Run the stage in a new store."""
    from rlhf_core.config.data import Files, Source, Use
    from rlhf_core.config.models import PretrainedModel
    from rlhf_core.config.runtime import RuntimeConfig
    from rlhf_core.runtime.local_runtime import LocalRuntime
    from rlhf_core.stage.run import execute
    from rlhf_core.store.artifacts import ArtifactStore
    from rlhf_core.tracking.memory import MemoryStageTracker
    from stages.prepare_data import PrepareDataConfig
    from stages.table import STAGES

    path = folder / ("long.jsonl" if side == "long" else "rows.jsonl")
    prompt, whole = LIMITS[side]
    config = PrepareDataConfig(
        data=Files(sources=(Source(name="problems", path=str(path), use=Use(demonstrations=1.0)),)),
        model=PretrainedModel(path=str(folder / "model")),
        max_prompt_tokens=prompt,
        max_tokens=whole,
    )
    spec = STAGES["prepare_data"].spec(config, {}, label="prepare_data", seed=0, engines={}, callables=())
    with tempfile.TemporaryDirectory(dir=folder) as store:
        runtime = LocalRuntime(RuntimeConfig(type="local"))
        execute(ArtifactStore(Path(store)), spec, runtime=runtime, tracker=MemoryStageTracker(), progress=_no_progress)


def map_rows(folder: Path, workers: int) -> None:
    """Map the rows to the tokens of their prompt and of the whole conversation."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder / "model"))

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        asked = [{"role": "user", "content": row["question"]}]
        whole = [*asked, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(whole, tokenize=False)
        return {
            "prompt_ids": tokenizer(prompt, add_special_tokens=False)["input_ids"],
            "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
        }

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=cache)
        rows.map(tokens, num_proc=workers if workers > 1 else None)


def _no_progress(done: int, total: int, message: str) -> None:
    return None


if __name__ == "__main__":
    main()
