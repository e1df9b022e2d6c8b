"""ZeRO 3 with a vocabulary of 150,000: ranks whose LM heads have more or less to do make the same collective calls.

The head is computed a few tokens at a time: 55 here, 27 for distillation, and four times as many in use. Each rank has
rows of its own lengths, so their numbers of chunks differ, from rank to rank and from step to step.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models import forward
from rlhf_core.training.batching import reduce
from rlhf_core.training.objectives.base import PolicyObjective, SftObjective
from rlhf_core.training.objectives.distillation import DistillationObjective
from rlhf_core.types import DistillationSample, TokenSample, TopLogprobs
from tests.rlhf_core.training.ranks import load, run_ranks
from tests.support.samples import PolicySample
from tests.support.tolerances import assert_same_movement, roundings

PROGRAM = Path(__file__).with_name("wide_head_program.py")
VOCABULARY = 150_000
LENGTHS = ((20, 115, 5, 15), (60,), (15, 57))
"""Of the rows of each step, dealt out in turn: in the second only the first rank has any."""
ALONE = TrainerConfig(engine="torch", micro_batch=2)
SHARED = TrainerConfig(engine="deepspeed", zero_stage=3, micro_batch=2)


def model_folder(folder: Path, *, tied: bool) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        # Logits of a few units: log-probs that differ from each other.
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def rows() -> list[list[TokenSample]]:
    """Return the samples of each step; one row of the last has no token to learn from."""
    generator = random.Random(5)
    steps = [
        [
            TokenSample(tuple(generator.randrange(VOCABULARY) for _ in range(length)), (0, *(1,) * (length - 1)))
            for length in lengths
        ]
        for lengths in LENGTHS
    ]
    steps[-1][0] = replace(steps[-1][0], loss_mask=(0,) * LENGTHS[-1][0])
    return steps


def told(sample: TokenSample) -> DistillationSample:
    """Return `sample` with 4 likeliest tokens of a made-up teacher."""
    generator = np.random.default_rng(len(sample.token_ids))
    count = sum(sample.loss_mask)
    ids = np.stack([generator.choice(VOCABULARY, 4, replace=False) for _ in range(count)] or [np.empty(4)])[:count]
    logprobs = np.log(np.tile(np.array([0.4, 0.3, 0.15, 0.1], dtype=np.float32), (count, 1)))
    top = TopLogprobs(logprobs, ids.astype(np.int32), logprobs[:, 0])
    return DistillationSample(sample.token_ids, sample.loss_mask, (top,))


def judged(sample: TokenSample) -> PolicySample:
    generator = random.Random(len(sample.token_ids))

    def row(low: float, high: float) -> tuple[float, ...]:
        return tuple(generator.uniform(low, high) if masked else 0.0 for masked in sample.loss_mask)

    return PolicySample(
        sample.token_ids, sample.loss_mask, row(-13, -11), row(-12.5, -11.5), row(-12.5, -11.5), row(-1, 1)
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Any]:
    case, steps = load(PROGRAM).Case, rows()
    measured = steps[0]
    sft = SftObjective(pack_to=None)
    distillation = DistillationObjective("forward", jsd_beta=0.5, temperature=1.0, kl_weight=0.7)
    ppo = PolicyObjective(
        ClipLoss(), 512, temperature=0.9, kl_coef=0.1, entropy_coef=0.01, correction=CorrectionConfig()
    )
    recomputed = SHARED.model_copy(update={"gradient_checkpointing": True})
    own, tied = (
        ModelSpec(model_folder(tmp_path_factory.mktemp(name), tied=name == "tied"), "lm", None, 3)
        for name in ("own", "tied")
    )
    adapters = LoraConfig(rank=2, target_modules=("q_proj", "lm_head"))
    return {
        "own_head": case(own, SHARED, sft, steps, measured),
        "tied_head_recomputed": case(tied, recomputed, sft, steps, measured),
        "distillation": case(own, recomputed, distillation, [[told(s) for s in step] for step in steps], measured),
        "ppo": case(tied, SHARED, ppo, [[judged(s) for s in step] for step in steps], measured),
        "adapted_head": case(replace(own, lora=adapters), SHARED, sft, steps, measured),
        "frozen": case(tied, SHARED, sft, steps, measured, frozen=True),
    }


@pytest.fixture(scope="module")
def alone(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What one rank of the plain engine makes of the cases."""
    torch.set_num_threads(1)
    program = load(PROGRAM)
    checkpointed = {name: case.config.gradient_checkpointing for name, case in cases.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "LOGPROB_ELEMENTS", program.ELEMENTS)
        return {
            name: program.made(
                replace(case, config=ALONE.model_copy(update={"gradient_checkpointing": checkpointed[name]}))
            )
            for name, case in cases.items()
        }


def assert_one_rank(made: list[dict[str, Any]], one: dict[str, Any], name: str) -> None:
    """Raise AssertionError unless the ranks together say what one rank does.

    A log-prob is a sum over the vocabulary, whose 150,000 terms of one sign are added up in blocks of at least 16 lanes by a
    tree: 1,000 roundings are far more than that and the way through the small model take. A norm has twice as many, squares
    and gradients. What a rank's share is lost by, one in seven rows and more, is 1e-1.
    """
    share = roundings(1000)
    ranks = len(made)
    for step, whole in enumerate(one["steps"]):
        said = reduce([part["steps"][step][0] for part in made])
        assert said == pytest.approx(whole[0], rel=share, abs=share), (name, step)
        for part in made:
            for update, expected in zip(part["steps"][step][1:], whole[1:], strict=True):
                assert update == pytest.approx(expected, rel=4 * share), (name, step)
    for kind in ("logprobs", "top"):
        for index, expected in enumerate(one.get(kind, [])):
            own = np.array(made[index % ranks][kind][index // ranks])
            np.testing.assert_allclose(
                own, np.array(expected), rtol=share, atol=share, err_msg=f"{name}: {kind} {index}"
            )
    assert made[0]["weights"].keys() == one["weights"].keys(), name
    if one["weights"]:
        assert any(not weight.equal(one["start"][key]) for key, weight in one["weights"].items()), name
    for key, weight in one["weights"].items():
        assert_same_movement(made[0]["weights"][key], weight, one["start"][key], name=f"{name}: {key}")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, None), pytest.param(4, ["tied_head_recomputed"], marks=pytest.mark.full)]
)
def test_several_ranks_are_one_rank(cases, alone, tmp_path, ranks, names):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    chosen = {name: cases[name] for name in names or cases}
    for name, made in run_ranks(PROGRAM, chosen, tmp_path, ranks=ranks).items():
        assert_one_rank(made, alone[name], name)
        most, parameters = made[0]["whole"]
        # a weight, with the two matrices of its adapter
        assert most <= (3 if name == "adapted_head" else 1) < parameters, name
