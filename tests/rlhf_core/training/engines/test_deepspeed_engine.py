"""DeepSpeed in processes of its own: alone against the plain engine, and two ranks against one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.training.batching import reduce
from rlhf_core.training.engines.deepspeed_setup import deepspeed_config
from tests.rlhf_core.training.conftest import TINY
from tests.rlhf_core.training.ranks import finish, start_ranks
from tests.support.tolerances import assert_same_updates, near, of_training

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
STAGES = ("zero0", "zero1", "zero2")
SAVED = (*STAGES, "zero3")
STEPS = 5
RATES = [1e-3 * (step + 1) for step in range(STEPS)]
"""Those of the program."""
SAME = of_training(TINY, steps=STEPS)
"""1.4e-4. One rank adds the gradients of its micro-batches, two those of their shards: the same terms in another order."""


def of_a_run(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of what the program wrote."""
    return pytest.mark.engine(pytest.mark.slow(test))


@pytest.fixture(scope="session")
def runs(policy_folder: Path, tmp_path_factory) -> dict[str, Any]:
    """What the program saw alone and on each of two ranks; all three processes run at once."""
    out = tmp_path_factory.mktemp("deepspeed")
    compiled = {"TORCH_EXTENSIONS_DIR": str(out / "compiled")}
    where = {"folder": out / "said", **compiled}
    programs = start_ranks(PROGRAM, policy_folder, out, *SAVED, ranks=2, **where)
    programs += start_ranks(
        PROGRAM, policy_folder, out, "torch", *SAVED, ranks=0, warm=False, **where
    )  # as users have it
    said = [output + errors for output, errors in finish(programs)]
    made = {name: json.loads((out / f"{name}.json").read_text()) for name in ("rank0_of_1", "rank0_of_2", "rank1_of_2")}
    return {**made, "said": said, "out": out}


@pytest.fixture
def alone(runs: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = runs["rank0_of_1"]
    return made


@pytest.fixture
def two_ranks(runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [runs["rank0_of_2"], runs["rank1_of_2"]]


def losses(history: list[Any]) -> list[float]:
    return [made["shard"]["loss"] for step in history for made in step]


def norms(history: list[Any]) -> list[float]:
    return [made["update"]["grad_norm"] for step in history for made in step]


@of_a_run
def test_zero_0_is_the_plain_engine_to_the_bit(alone):
    assert alone["zero0"]["history"] == alone["torch"]["history"]
    assert alone["zero0"]["digests"] == alone["torch"]["digests"]
    assert alone["zero0"]["logprobs"] == alone["torch"]["logprobs"]
    assert len(losses(alone["zero0"]["history"])) == 10
    assert losses(alone["zero0"]["history"])[0] > 5.0


@of_a_run
def test_zero_1_follows_the_plain_engine(alone):
    plain, partitioned = alone["torch"], alone["zero1"]
    assert losses(partitioned["history"]) == near(losses(plain["history"]), SAME)
    assert norms(partitioned["history"]) == near(norms(plain["history"]), SAME)
    for one, other in zip(partitioned["weights"], plain["weights"], strict=True):
        assert_same_updates(one, other, shape=TINY, rates=RATES)


@of_a_run
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_are_one_rank(stage, alone, two_ranks):
    """The second rank has no sample in the last step."""
    one, (left, right) = alone[stage], (rank[stage] for rank in two_ranks)
    for whole, first, second in zip(one["history"], left["history"], right["history"], strict=True):
        for a, b, c in zip(whole, first, second, strict=True):
            assert reduce([b["shard"], c["shard"]]) == near(a["shard"], SAME)
            assert b["update"] == c["update"]
            assert b["update"] == near(a["update"], SAME)
    assert left["digests"] == right["digests"]
    for a, b in zip(one["weights"], left["weights"], strict=True):
        assert_same_updates(a, b, shape=TINY, rates=RATES)
    assert right["history"][4][0]["shard"] == {}


@of_a_run
@pytest.mark.parametrize("stage", ("torch", *SAVED))
def test_training_resumes_bitwise_and_what_sleeps_gives_all_its_memory_back(stage, alone, two_ranks):
    """The resumed run sleeps before every step, the first one never."""
    ranks = [alone] if stage == "torch" else [alone, *two_ranks]
    for made in (rank[stage] for rank in ranks):
        assert made["resumed_history"] == made["history"][2:] and made["resumed_digests"] == made["digests"]
        assert made["left_over"] == [0, 0, 0]
        assert made["moved"][0] == made["moved"][1] == made["moved"][2]
    # Bytes a parameter, at least: on CPU what was loaded, weights and a moment, may be of a file that is mapped. ZeRO 1 and 2
    # have a second copy of the weights, ZeRO 3 gradients as well.
    bytes_of = {"torch": 4, "zero0": 4, "zero1": 8, "zero2": 8, "zero3": 12}
    assert min(alone[stage]["moved"][0]) >= alone[stage]["parameters"] * bytes_of[stage]


@of_a_run
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_one_rank_alone_sees_as_not_a_number_is_skipped_by_all(stage, alone, two_ranks):
    for made in (alone[stage], *(rank[stage] for rank in two_ranks)):
        assert made["skipped"] == [1.0]
        assert made["digest_after_skip"] == made["digests"][1]


@of_a_run
@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_alone_hands_out_the_weights(stage, alone, two_ranks):
    left, right = (rank[stage] for rank in two_ranks)
    for made in (alone[stage], left):
        assert made["handed_out"] == made["digests"]
    assert right["weights"] == [[], []]


@of_a_run
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_another_zero_stage_is_refused(stage, alone, two_ranks):
    for made, workers in ((alone[stage], 1), *((rank[stage], 2) for rank in two_ranks)):
        own = {"zero_stage": int(stage[-1]), "workers": workers}
        start = f"checkpoint = {{'zero_stage': 3, 'workers': 8}}: this run has {own}; resume with the settings of the checkpoint"
        assert made["refusal"].startswith(start)


@of_a_run
@pytest.mark.parametrize("stage", SAVED)
def test_training_goes_on_with_another_number_of_ranks(stage, alone, two_ranks):
    """Two steps on one rank and three on two are five on one, and the other way round."""
    left, right = (rank[stage]["others"] for rank in two_ranks)
    for whole, first, second in zip(alone[stage]["history"][2:], left["history"], right["history"], strict=True):
        for a, b, c in zip(whole, first, second, strict=True):
            assert reduce([b["shard"], c["shard"]]) == near(a["shard"], SAME)
            assert b["update"] == c["update"]
    assert left["digests"] == right["digests"]
    merged = alone[stage]["others"]
    for whole, again in zip(alone[stage]["history"][2:], merged["history"], strict=True):
        for a, b in zip(whole, again, strict=True):
            assert b["shard"] == near(a["shard"], SAME)
    for made in (left, merged):
        for a, b in zip(alone[stage]["weights"], made["weights"], strict=True):
            assert_same_updates(a, b, shape=TINY, rates=RATES)
        assert made["left"] == []


@of_a_run
def test_a_model_of_which_each_rank_reads_a_part_is_the_model_that_each_reads_whole(alone, two_ranks):
    """To the bit, with RoPE's frequencies in float32; on two ranks as on one."""
    for made in (alone, *two_ranks):
        for name, (parts, whole) in made["zero3"]["opened"].items():
            assert parts == whole, name
            assert {dtype for dtype, _ in parts[1].values()} == {"torch.float32"}, name
            assert parts[2] == alone["zero3"]["opened"][name][0][2], name


@of_a_run
def test_every_stage_exports_the_same_files(runs):
    out: Path = runs["out"]
    names = sorted(file.name for file in (out / "torch_of_1" / "exported").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    plain = (out / "torch_of_1" / "exported" / "model.safetensors").read_bytes()
    assert (out / "zero0_of_1" / "exported" / "model.safetensors").read_bytes() == plain
    assert sorted(file.name for file in (out / "zero1_of_1" / "exported").iterdir()) == names


@of_a_run
def test_deepspeed_says_nothing_when_all_is_well(runs):
    lines = [line.lower() for said in runs["said"] for line in said.splitlines()]
    # It warns of the accelerator if it must guess one, because DS_ACCELERATOR is not set before the import.
    assert [line for line in lines if "deepspeed" in line or "accelerator" in line] == []


@of_a_run
def test_nothing_is_compiled(runs):
    """The first run on a node need not wait minutes for collectives that torch has, too."""
    assert not (runs["out"] / "compiled").exists()


def test_clipping_is_left_to_the_optimizer_where_deepspeed_would_not_check_the_norm():
    optimizer = OptimizerConfig(max_grad_norm=0.5)
    assert deepspeed_config(optimizer, TrainerConfig(), stage=0, trained=1)["gradient_clipping"] == 0.0
    assert deepspeed_config(optimizer, TrainerConfig(), stage=1, trained=1)["gradient_clipping"] == 0.5


def test_offloading_needs_a_partitioned_optimizer():
    config = TrainerConfig(offload_optimizer=True)
    with pytest.raises(ConfigError, match="offload_optimizer = True: ZeRO stage 0 keeps the optimizer on its device"):
        deepspeed_config(OptimizerConfig(), config, stage=0, trained=1)
    assert deepspeed_config(OptimizerConfig(), config, stage=2, trained=10**9)["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 200_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }


def test_gradients_are_summed_in_the_precision_that_is_asked_for():
    for config, dtype in (
        (TrainerConfig(dtype="bfloat16"), None),
        (TrainerConfig(dtype="bfloat16", fp32_reduce=True), "fp32"),
    ):
        assert deepspeed_config(OptimizerConfig(), config, stage=1, trained=1).get("communication_data_type") == dtype
    with pytest.raises(ValueError, match="fp32_reduce = true: has no effect with dtype = 'float32'; remove it"):
        TrainerConfig(fp32_reduce=True)


def test_groups_keep_their_weight_decay_and_parameters_count_their_own_steps():
    from rlhf_core.training.engines.deepspeed_engine import _own_groups_and_steps  # seconds, for this test alone

    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with _own_groups_and_steps(optimizer):  # inside, what DeepSpeed's stage 3 does
        shared = torch.tensor(3.0)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": shared,
                    "exp_avg": torch.zeros(2),
                    "exp_avg_sq": torch.zeros(2),
                }
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [float(optimizer.state[parameter]["step"]) for parameter in (first, second)] == [4.0, 4.0]
