"""The two loops differ in their reward models alone, and the table has a row for every round."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from benchmarks.online_rounds import ARMS, Result, loop, read, table
from pipelines.flows.graph import Stages
from pipelines.flows.profile import load_profile
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import ArtifactRef
from tests.support.starts import imagined_start, made

R = TypeVar("R", bound=ArtifactRef)


def test_both_loops_optimize_the_policy_alike_and_only_one_refreshes_the_reward_model() -> None:
    config = load_profile("tiny/online")
    called: dict[str, list[StageSpec]] = {}
    for arm, refresh in ARMS.items():
        specs = called.setdefault(arm, [])

        def run_stage(spec: StageSpec, kind: type[R], specs: list[StageSpec] = specs) -> R:
            specs.append(spec)
            return made(kind, spec.label)

        section = config.online.model_copy(update={"refresh": refresh})
        policies = loop(section, Stages(run_stage, 17, config.runtime), imagined_start(), arm)
        assert list(policies) == [f"{arm}_{number}" for number in range(1, section.rounds + 1)]
    steps = {arm: [spec.config for spec in specs if spec.name == "ppo"] for arm, specs in called.items()}
    assert steps["refreshed"] == steps["fixed"]
    assert {spec.name for spec in called["refreshed"]} - {spec.name for spec in called["fixed"]} == {
        "reward_model",
        "merge_preferences",
        "compare_reward_models",
    }


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.25, "high": mean + 0.25}


def result(seed: int, gold: float) -> Result:
    policies = {
        "sft": {"gold": interval(0.25)},
        "refreshed_1": {"gold": interval(gold), "kl": interval(4.0), "improvement": interval(0.5)},
        "fixed_1": {"gold": interval(gold - 0.5), "kl": interval(5.0)},
    }
    models = {f"{name}/accuracy{end}": 0.75 for name in ("before", "after") for end in ("", "_low", "_high")}
    return Result(seed, [], policies, [models])


def test_the_table_shows_the_latest_line_of_every_seed(tmp_path: Path) -> None:
    file = tmp_path / "online_rounds.jsonl"
    assert read(file, []) == []
    lines = [result(18, 1.5), result(17, 9.0), result(17, 2.5), Result(19, ["online.rounds=1"], {}, [])]
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in lines))
    rows = table(read(file, [])).splitlines()[2:]
    accuracy = "0.75 [0.75, 0.75]"
    assert rows == [
        "| 17 | 0 | 0.25 | 0.25 | | 0.0 | 0.0 | | |",
        f"| 17 | 1 | 2.50 | 2.00 | +0.50 [+0.25, +0.75] | 4.0 | 5.0 | {accuracy} | {accuracy} |",
        "| 18 | 0 | 0.25 | 0.25 | | 0.0 | 0.0 | | |",
        f"| 18 | 1 | 1.50 | 1.00 | +0.50 [+0.25, +0.75] | 4.0 | 5.0 | {accuracy} | {accuracy} |",
    ]
