"""Training on a made-up GPU: to the same bits as on the CPU, without mixed devices, and Python waits for it once a micro-batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.preference.answers import KTOLoss
from rlhf_core.algorithms.preference.dpo import DPOLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.loading import load_model
from rlhf_core.sequences import Sequences
from rlhf_core.stage.checkpoints import wait_for_parts
from rlhf_core.training.engines.base import TorchEngine
from rlhf_core.training.objectives.base import (
    BradleyTerryObjective,
    PolicyObjective,
    SftObjective,
    StepObjective,
    ValueObjective,
)
from rlhf_core.training.objectives.distillation import DistillationObjective
from rlhf_core.training.objectives.preference import KTOObjective, PairObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import AnswerSample, DistillationSample, StepSample
from tests.support.made_up_device import CPU, CUDA, made_up_device

POLICY = PolicyObjective(ClipLoss(), 24, temperature=0.7, kl_coef=0.1, entropy_coef=0.01, correction=CorrectionConfig())
OBJECTIVES: dict[str, tuple[str, Any]] = {
    "sft": ("lm", SftObjective(pack_to=None)),
    "packed": ("lm", SftObjective(pack_to=24)),
    "ppo": ("lm", POLICY),
    "value": ("value", ValueObjective(clip=0.2)),
    "reward": ("score", BradleyTerryObjective(centering_coef=0.01)),
    "steps": ("score", StepObjective()),
    "dpo": ("lm", PairObjective(DPOLoss(), nll_coef=0.1, length_alpha=0.5)),
    "kto": ("lm", KTOObjective(KTOLoss(), kl=0.1)),
    "distillation": ("lm", DistillationObjective(kind="jsd", jsd_beta=0.3, temperature=1.0, kl_weight=0.5)),
}
"""Name -> the model's head, and the objective."""
ROWS, BATCHES = 4, 3
"""Ten samples make three micro-batches; packed, 21 + 17 + 17 + 14 + 12 + 11 <= 4 * 24 tokens are one, and the rest another."""
IN_TRANSFORMERS, AT_THE_END = "models.forward._run", "training.trainer._Total.floats"
"""transformers looks in each forward pass whether positions restart in a row. It would not if it were given a mask, with
which attention is slower. At the end, the metrics of all micro-batches are read at once. Two micro-batches of pairs have
equal sides, which are computed once: these rows have a mask, and transformers does not look."""
OF_AN_UPDATE = "training.adamw.ClippedAdamW.step"
"""The norm of the gradient, once an update: an update that is not finite is skipped, and is not counted by AdamW."""
FURTHER = {"steps": {"algorithms.token_math.step_loss": BATCHES}}
"""Labels outside [0, 1] are an error that names them, also for a caller that computes them on the GPU."""


@pytest.fixture
def samples(policy_folder: Path, token_samples, policy_samples, value_samples, reward_pairs, preference_samples) -> Any:
    frozen = LocalTrainer(ModelSpec(str(policy_folder), "lm", None, 3), None, TrainerConfig(engine="torch"))
    tops = frozen.top_logprobs(token_samples, k=8, temperature=1.0)
    taught = [DistillationSample(row.token_ids, row.loss_mask, (top,)) for row, top in zip(token_samples, tops)]
    pairs = zip(token_samples, token_samples[1:] + token_samples[:1])
    return {
        "ppo": policy_samples,
        "value": value_samples,
        "reward": reward_pairs,
        "steps": [StepSample(row.token_ids, row.loss_mask, (0.5,) * len(row.token_ids)) for row in token_samples],
        "dpo": preference_samples,
        "kto": [AnswerSample(one, number % 2 > 0, -30.0, two, -31.0) for number, (one, two) in enumerate(pairs)],
        "distillation": taught,
    } | dict.fromkeys(("sft", "packed"), token_samples)


def loaded(folder: Path, name: str) -> nn.Module:
    """The model of an objective, on the CPU."""
    spec = ModelSpec(str(folder), OBJECTIVES[name][0], None, 3)  # type: ignore[arg-type]
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


def opened(module: nn.Module, dtype: str, device: torch.device) -> LocalTrainer:
    """A trainer of a model on a device, with micro-batches of `ROWS` rows."""
    config = TrainerConfig(engine="torch", dtype=dtype, micro_batch=ROWS)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(learning_rate=1e-3)
    compute_dtype = getattr(torch, dtype)
    engine = TorchEngine(module.to(device), optimizer, device=device, rank=0, compute_dtype=compute_dtype)
    return LocalTrainer(ModelSpec("", "lm", None, 3), optimizer, config, engine=engine)


def step(trainer: LocalTrainer, name: str, samples: Any) -> dict[str, float]:
    return trainer.forward_backward(samples[name], OBJECTIVES[name][1]) | trainer.optim_step(learning_rate=1e-3)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in OBJECTIVES), ("ppo", "float32")])
def test_a_step_is_that_of_the_cpu_and_waits_once_for_each_micro_batch(name, dtype, samples, policy_folder):
    here, there = (loaded(policy_folder, name) for _ in range(2))
    trainer = opened(here, dtype, CPU)
    expected = [step(trainer, name, samples) for _ in range(2)]
    with made_up_device() as device:
        trainer = opened(there, dtype, CUDA)
        device.staged_bytes = 0  # as if batches were large
        device.waits.clear()
        made = [trainer.forward_backward(samples[name], OBJECTIVES[name][1])]
        waits = dict(device.waits)
        device.waits.clear()
        made[0] |= trainer.optim_step(learning_rate=1e-3)
        waits_of_step = dict(device.waits)
        made.append(step(trainer, name, samples))
    assert made == expected
    batches = {"packed": 2, "reward": 1}.get(name, BATCHES)
    assert waits == {IN_TRANSFORMERS: batches, AT_THE_END: 1} | FURTHER.get(name, {})
    assert waits_of_step == {OF_AN_UPDATE: 1}


def saved_and_loaded(trainer: LocalTrainer, out: Path, samples: Any) -> tuple[Any, ...]:
    """What a policy is after a step: the second step from its checkpoint, its weights for a sampler, and its log-probs."""
    step(trainer, "ppo", samples)
    trainer.save(out)
    wait_for_parts(out)
    second = step(trainer, "ppo", samples)
    trainer.load(out)
    assert step(trainer, "ppo", samples) == second
    rows = Sequences.of(samples["sft"])
    return second, trainer.weights(), trainer.logprobs(rows, temperature=0.7)


def test_checkpoints_weights_for_a_sampler_and_logprobs_are_those_of_the_cpu(samples, policy_folder, tmp_path):
    here, there = (loaded(policy_folder, "ppo") for _ in range(2))
    second, weights, logprobs = saved_and_loaded(opened(here, "bfloat16", CPU), tmp_path / "cpu", samples)
    with made_up_device() as device:
        trainer = opened(there, "bfloat16", CUDA)
        made, sent, measured = saved_and_loaded(trainer, tmp_path / "gpu", samples)
        strays = [tuple(one.shape) for one in trainer._engine.tensors() if one.dim() and not device.holds(one)]
        assert not any(device.holds(one) for one in sent.payload.values())
        device.waits.clear()
        trainer.logprobs(Sequences.of(samples["sft"]), temperature=0.7)
        waits = dict(device.waits)
    assert (made, sent.digest, strays) == (second, weights.digest, [])
    assert np.array_equal(measured, logprobs)
    # the log-probs of each micro-batch go to host memory, where the advantages are computed
    assert waits == {IN_TRANSFORMERS: BATCHES, "training.trainer.LocalTrainer.logprobs.<locals>.compute": BATCHES}


def test_the_made_up_gpu_refuses_mixed_devices_and_counts_waits():
    with made_up_device() as device:
        there, here = torch.arange(4.0, device="cuda"), torch.arange(4.0)
        assert (device.holds(there), there.device, device.holds(here)) == (True, CUDA, False)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            there + here
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            there.numpy()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (there @ there.to("cuda")).dtype == torch.bfloat16
        assert not device.waits
        moved = here.to("cuda", non_blocking=True)
        assert device.holds(moved + there) and not device.waits
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + there.sum()  # on CUDA only a CPU tensor without dimensions may be mixed
        assert device.holds(there + here.sum()) and not device.waits
