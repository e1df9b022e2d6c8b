"""Training in bfloat16, the precision of every server profile: the plain engine alone, ZeRO 1 to 3 on two ranks.

What is compared for equality is computed in the same process from the same rows, so it holds on any machine.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rlhf_core.training.ranks import finish, start_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("bfloat16_program.py")
STAGES = ("zero1", "zero2", "zero3")
ENGINES = ("torch", *STAGES)


@pytest.fixture(scope="module")
def runs(policy_folder: Path, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What the program saw with each engine, rank by rank."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    out = tmp_path_factory.mktemp("bfloat16")
    programs = start_ranks(PROGRAM, policy_folder, out, *STAGES, ranks=2, folder=out / "said")
    finish([*programs, *start_ranks(PROGRAM, policy_folder, out, "torch", ranks=0, folder=out / "said")])
    made = {}
    for engine in ENGINES:
        files = sorted(out.glob(f"{engine}_*.json"))
        made[engine] = [json.loads(file.read_text()) | {"folder": str(out / engine)} for file in files]
    return made


def joined(ranks: list[dict[str, Any]], of: str) -> list[float]:
    """Return a summed metric of all ranks, step by step."""
    return [sum(step[of] for step in steps) for steps in zip(*(rank["history"] for rank in ranks), strict=True)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_policy_that_is_its_reference_says_what_it_says(engine, runs):
    """Exactly: the same weights in the same precision, in the same micro-batches."""
    assert len(runs[engine]) == (1 if engine == "torch" else 2)
    for rank in runs[engine]:
        first = rank["at_step_0"]
        assert first["policy"] == first["reference"]
        assert (first["metrics"]["ref_kl"], first["metrics"]["kl_loss"]) == (0.0, 0.0)
        assert min(min(row) for row in first["policy"]) < -4.0


@pytest.mark.parametrize("engine", STAGES)
def test_every_stage_follows_the_plain_engine(engine, runs):
    """Both keep float32 weights for updates, and DeepSpeed's start from rounded ones and compute in bfloat16 throughout.

    A bfloat16 has 8 bits, so a rounding is up to 2^-9 of a number; the mean over 66 tokens of the roundings of a few
    layers stays below 1 % at first, and the paths part slowly.
    """
    plain, own = joined(runs["torch"], "loss"), joined(runs[engine], "loss")
    assert own[0] == pytest.approx(plain[0], rel=1e-2)
    assert own == pytest.approx(plain, rel=5e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_resumes_bitwise(engine, runs):
    for rank in runs[engine]:
        assert rank["resumed"] == rank["history"][3:]
        assert rank["resumed_digest"] == rank["digest"]


@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_hold_float32_weights_that_bfloat16_would_not(engine, runs):
    found = runs[engine][0]["masters"]
    kept = {
        "torch": lambda name: "/parameters/" in name,
        "zero1": lambda name: "single_partition_of_fp32_groups" in name,
        "zero2": lambda name: "single_partition_of_fp32_groups" in name,
        "zero3": lambda name: "fp32_flat_groups" in name,
    }[engine]
    weights = [(dtype, rounded) for name, dtype, rounded in found if kept(name)]
    assert weights and all(dtype == "torch.float32" for dtype, _ in weights)
    assert not any(rounded for _, rounded in weights)
    moments = [dtype for name, dtype, _ in found if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert moments and set(moments) == {"torch.float32"}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_is_of_the_weights_that_compute(engine, runs):
    """The plain engine's are float32; DeepSpeed's are the bfloat16 ones, as every sampler sees them."""
    from safetensors.torch import load_file

    folder = Path(runs[engine][0]["folder"]) / "exported"
    wanted = "float32" if engine == "torch" else "bfloat16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == wanted
    dtypes = {str(tensor.dtype) for file in folder.glob("*.safetensors") for tensor in load_file(file).values()}
    assert dtypes == {f"torch.{wanted}"}
