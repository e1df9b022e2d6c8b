"""Run by test_bfloat16.py: `python bfloat16_program.py <policy> <out> <engine>...`, alone or as several ranks.

With each engine (`torch`, `zero1` .. `zero3`) in bfloat16 it compares a policy with its reference, trains it, saves and
resumes, and writes what it saw to <out>/<engine>_<rank>.json.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.stage.checkpoints import wait_for_parts
from rlhf_core.training.objectives.base import PolicyObjective, SftObjective
from rlhf_core.training.state import rank_and_world
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.support.rounding import round_by_batch_if_asked
from tests.support.samples import PolicySample

OPTIMIZER = OptimizerConfig(weight_decay=0.01)
SFT = SftObjective(pack_to=None)
PPO = PolicyObjective(ClipLoss(), 24, temperature=1.0, kl_coef=0.1, entropy_coef=0.01, correction=CorrectionConfig())
STEPS, SAVED = 6, 3


def samples() -> list[TokenSample]:
    generator = random.Random(11)
    return [
        TokenSample(tuple(generator.randrange(10, 320) for _ in range(length)), (0, *(1,) * (length - 1)))
        for length in (5, 17, 9, 12, 8, 21)
    ]


def at_step_0(policy: LocalTrainer, reference: LocalTrainer) -> dict[str, Any]:
    """Return the log-probs of both, and what the policy's first pass with gradients says of them; its gradient goes."""
    rank, world = rank_and_world()
    own = samples()[rank::world]
    said, theirs = (logprob_rows(trainer, own) for trainer in (policy, reference))
    rows = [
        PolicySample(s.token_ids, s.loss_mask, old, old, ref, tuple(0.5 * bit for bit in s.loss_mask))
        for s, old, ref in zip(own, said, theirs, strict=True)
    ]
    counts = PPO.denominators(samples())
    metrics = policy.forward_backward(rows, PPO, counts)
    policy.optim_step(learning_rate=0.0)
    rows_of = {"policy": said, "reference": theirs}
    return rows_of | {"metrics": metrics}


def train(trainer: LocalTrainer, first: int, last: int) -> list[dict[str, float]]:
    rank, world = rank_and_world()
    rows, history = samples(), []
    for _ in range(first, last):
        made = trainer.forward_backward(rows[rank::world], SFT, SFT.denominators(rows))
        history.append(made | trainer.optim_step(learning_rate=3e-3))
    return history


def tensors(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return every tensor in a state, with the names on the way to it."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [found for name, item in pairs for found in tensors(item, f"{path}/{name}")]


def masters(folder: Path) -> list[tuple[str, str, bool]]:
    """Return the float weights and moments in a checkpoint: their name, dtype, and whether bfloat16 would hold them."""
    found = []
    for file in sorted(folder.rglob("*.pt")):
        if not file.name.startswith("random_state"):
            # DeepSpeed's own small classes are in some: they are not read, as the trainer would.
            with torch.serialization.safe_globals(deepspeed_types()):
                state = torch.load(file, weights_only=True, map_location="cpu")
            for name, tensor in tensors(state):
                if tensor.is_floating_point() and tensor.numel() > 100:
                    rounded = bool((tensor.float() == tensor.bfloat16().float()).all())
                    found.append((f"{file.name}{name}", str(tensor.dtype), rounded))
    return found


def deepspeed_types() -> list[Any]:
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def measure(policy: str, engine: str, folder: Path) -> dict[str, Any]:
    kind: dict[str, Any] = {"engine": "torch"} if engine == "torch" else {"zero_stage": int(engine[-1])}
    config = TrainerConfig(**kind, micro_batch=2, dtype="bfloat16")
    spec = ModelSpec(policy, "lm", None, 3)
    trainer, reference = LocalTrainer(spec, OPTIMIZER, config), LocalTrainer(spec, None, config)
    made: dict[str, Any] = {"at_step_0": at_step_0(trainer, reference)}
    reference.close()
    made["history"] = train(trainer, 0, SAVED)
    trainer.save(folder / "checkpoint")
    made["history"] += train(trainer, SAVED, STEPS)
    made["digest"] = trainer.weights().digest
    trainer.export(folder / "exported")
    trainer.close()
    again = LocalTrainer(spec, OPTIMIZER, config)
    again.load(folder / "checkpoint")
    made["resumed"] = train(again, SAVED, STEPS)
    made["resumed_digest"] = again.weights().digest
    again.close()
    wait_for_parts(folder / "checkpoint")
    made["masters"] = masters(folder / "checkpoint")
    return made


def main() -> None:
    policy, out, engines = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    round_by_batch_if_asked()
    torch.set_num_threads(1)
    rank, _ = rank_and_world()
    for engine in engines:
        (out / f"{engine}_{rank}.json").write_text(json.dumps(measure(policy, engine, out / engine)))


if __name__ == "__main__":
    main()
