"""Run by test_deepspeed_engine.py: `python deepspeed_program.py <policy> <out> <engine>...`, alone or as several ranks.

An engine is `torch` or `zero0` .. `zero3`. With each in turn it trains a policy and a
value model side by side, saves after step 2 of 5, goes on from there with new objects that sleep before each step, then from what the other number
of ranks saved (one and two of them run at once), and writes what it saw to <out>/rank<r>_of_<world>.json.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import TrainingError
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.training.engines import base
from rlhf_core.training.engines.base import Engine, open_engine
from rlhf_core.training.objectives.base import SftObjective, ValueObjective
from rlhf_core.training.state import rank_and_world, save_engine_settings
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.support.rounding import round_by_batch_if_asked
from tests.support.samples import ValueSample

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01)
# Rows per step: with two ranks the second one has nothing to do in the last step.
BATCHES = (6, 5, 7, 4, 1)
SFT, VALUE = SftObjective(pack_to=None), ValueObjective(clip=None)


def samples() -> list[ValueSample]:
    generator = random.Random(5)
    made = []
    for length in (9, 17, 5, 12, 21, 8, 14, 11, 6, 10):
        ids = tuple(generator.randrange(10, 320) for _ in range(length))
        returns = tuple(generator.uniform(-1, 1) for _ in ids)
        made.append(ValueSample(ids, (0, *(1,) * (length - 1)), (0.0,) * length, returns))
    return made


def train(trainer: LocalTrainer, objective: Any, first: int, last: int) -> list[dict[str, float]]:
    """Return per step the metrics of this rank's shard and of the update."""
    rank, world = rank_and_world()
    history = []
    for step in range(first, last):
        rows: list[Any] = samples()[step : step + BATCHES[step]]
        if objective is SFT:
            rows = [TokenSample(row.token_ids, row.loss_mask) for row in rows]
        made = trainer.forward_backward(rows[rank::world], objective, objective.denominators(rows))
        history.append({"shard": made, "update": trainer.optim_step(learning_rate=1e-3 * (step + 1))})
    return history


@contextmanager
def pair(policy: str, config: TrainerConfig) -> Iterator[tuple[list[tuple[LocalTrainer, Any]], list[Engine]]]:
    specs = ModelSpec(policy, "lm", None, 3), ModelSpec(policy, "value", None, 3)
    engines = [open_engine(spec, OPTIMIZER, config) for spec in specs]
    for parameter in (one for engine in engines for one in engine.module.parameters()):
        if not parameter.untyped_storage().resizable():  # mapped from the file, as on a GPU none is
            parameter.data = parameter.data.clone()
    trainers = [LocalTrainer(spec, OPTIMIZER, config, engine=e) for spec, e in zip(specs, engines, strict=True)]
    yield list(zip(trainers, (SFT, VALUE), strict=True)), engines
    for trainer in trainers:
        trainer.close()


def weights(trainer: LocalTrainer) -> list[float]:
    """Return some of the weights that this rank hands out: none but on rank 0."""
    payload = trainer.weights().payload
    return torch.cat([torch.zeros(0), *(payload[name].flatten().double() for name in sorted(payload))]).tolist()[::37]


def digest(engine: Engine) -> str:
    """Return the digest of the weights as this rank holds them."""
    return engine.stream().digest()


def measure(policy: str, config: TrainerConfig, folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = {}
    with pair(policy, config) as (trainers, engines):
        # Interleaved: each engine must keep to its own model.
        made["history"] = [[train(t, o, step, step + 1)[0] for t, o in trainers] for step in range(2)]
        for index, (trainer, _) in enumerate(trainers):
            trainer.save(folder / str(index))
        made["history"] += [[train(t, o, step, step + 1)[0] for t, o in trainers] for step in range(2, 5)]
        made["digests"] = [digest(engine) for engine in engines]
        made["handed_out"] = [trainer.weights().digest for trainer, _ in trainers]
        made["weights"] = [weights(trainer) for trainer, _ in trainers]
        made["skipped"] = skip(trainers[1][0])
        made["digest_after_skip"] = digest(engines[1])
        rows = [TokenSample(s.token_ids, s.loss_mask) for s in samples()]
        made["logprobs"] = logprob_rows(trainers[0][0], rows[:3])
        trainers[0][0].export(folder / "exported")
    with pair(policy, config) as (trainers, engines):
        for index, (trainer, _) in enumerate(trainers):
            trainer.load(folder / str(index))
        made["resumed_history"], made["moved"], made["left_over"] = [], [], []
        counts = [[getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()] for engine in engines]
        made["parameters"] = min(map(sum, counts))
        for step in range(2, 5):
            made["moved"].append([trainer.rest() for trainer, _ in trainers])
            storages = [tensor.untyped_storage() for engine in engines for tensor in engine.tensors()]
            # On CPU weights may be of a file that is mapped, which is no memory to give back.
            made["left_over"].append(sum(storage.nbytes() for storage in storages if storage.resizable()))
            for trainer, _ in trainers:
                trainer.wake()
            made["resumed_history"].append([train(t, o, step, step + 1)[0] for t, o in trainers])
        made["resumed_digests"] = [digest(engine) for engine in engines]
        made["refusal"] = refusal(trainers[0][0], folder / f"of_another_stage_{engines[0].rank}", config.zero_stage)
        for trainer, _ in trainers:
            trainer.rest()  # and is closed asleep
    return made


def resume_the_others(policy: str, config: TrainerConfig, folder: Path) -> dict[str, Any]:
    """Go on from a checkpoint of the other number of ranks, which is there once their folder has the file `done`."""
    deadline = time.monotonic() + 300
    while not (folder / "done").exists():
        assert time.monotonic() < deadline, folder
        time.sleep(0.1)
    made: dict[str, Any] = {}
    with pair(policy, config) as (trainers, engines):
        for index, (trainer, _) in enumerate(trainers):
            trainer.load(folder / str(index))
        made["history"] = [[train(t, o, step, step + 1)[0] for t, o in trainers] for step in range(2, 5)]
        made["digests"] = [digest(engine) for engine in engines]
        made["weights"] = [weights(trainer) for trainer, _ in trainers]
    made["left"] = sorted(path.name for path in folder.rglob("universal"))
    return made


def opened(policy: str) -> dict[str, list[Any]]:
    """Return by model what it computes when every rank reads a part of it, and when every rank reads all of it."""
    own, made = base.open_parts, {}
    ids_BL = torch.tensor([[10, 20, 30, 40], [50, 60, 70, 80]])
    for dtype in ("float32", "bfloat16"):
        for head in ("lm", "score", "value"):
            ways = []
            for open_parts in (own, lambda *_, **__: None):
                base.open_parts = open_parts
                engine = open_engine(ModelSpec(policy, head, None, 3), None, TrainerConfig(zero_stage=3, dtype=dtype))
                buffers = {name: (str(one.dtype), one.sum().item()) for name, one in engine.module.named_buffers()}
                with torch.no_grad():
                    output = engine.forward(lambda module: module(input_ids=ids_BL))
                numbers = (output if isinstance(output, torch.Tensor) else output.logits).double().flatten()
                ways.append([numbers.tolist()[::7], buffers, engine.stream().digest()])
                engine.close()
            made[f"{head} {dtype}"] = ways
    base.open_parts = own
    return made


def refusal(trainer: LocalTrainer, folder: Path, stage: int) -> str:
    """Return what the trainer says of a checkpoint of stage 3, or of 0 if it is at 3 itself."""
    folder.mkdir(exist_ok=True)
    save_engine_settings(folder, {"zero_stage": 0 if stage == 3 else 3, "workers": 8})
    try:
        trainer.load(folder)
    except TrainingError as error:
        return str(error)
    return ""


def skip(trainer: LocalTrainer) -> list[float]:
    """Return `skipped` of a step in which rank 0 alone sees a return that is not a number."""
    rank, world = rank_and_world()
    rows = samples()[:4]
    rows[0] = replace(rows[0], returns=(float("nan"),) * len(rows[0].returns))
    trainer.forward_backward(rows[rank::world], VALUE, VALUE.denominators(rows))
    return [trainer.optim_step(learning_rate=1e-3)["skipped"]]


def config_of(engine: str) -> TrainerConfig:
    settings: dict[str, Any] = {"engine": "torch"} if engine == "torch" else {"zero_stage": int(engine[-1])}
    return TrainerConfig(**settings, micro_batch=3)


def main() -> None:
    policy, out, engines = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    round_by_batch_if_asked()
    rank, world = rank_and_world()
    made = {engine: measure(policy, config_of(engine), out / f"{engine}_of_{world}") for engine in engines}
    if rank == 0:
        for engine in engines:
            (out / f"{engine}_of_{world}" / "done").touch()
    if "zero3" in made:
        made["zero3"]["opened"] = opened(policy)
    for engine in [name for name in engines if name != "torch"]:
        made[engine]["others"] = resume_the_others(policy, config_of(engine), out / f"{engine}_of_{3 - world}")
    (out / f"rank{rank}_of_{world}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
