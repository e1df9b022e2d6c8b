"""Train for several epochs on a fixed dataset (SFT, reward models, DPO), resumable from any checkpoint.

The samples of a step depend only on the seed and the step, so the step is the position in the data.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.mixing import shuffled_indices
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import Metrics, ModelSpec, Objective, Trainer
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.context import StageContext
from rlhf_core.training.adamw import scheduled_rate
from rlhf_core.training.exports import Exports
from rlhf_core.training.skipped import count_skipped
from rlhf_core.types import derive_seed

logger = logging.getLogger(__name__)

LookAhead: TypeAlias = Callable[[Trainer, Sequence[Any]], tuple[Objective, list[Any]]]


@runtime_checkable
class Carried(Protocol):
    """A look-ahead with state that is kept from step to step, and in checkpoints."""

    def __call__(self, trainer: Trainer, samples: Sequence[Any]) -> tuple[Objective, list[Any]]:
        """Process the samples of a training step."""

    def evaluated(self, trainer: Trainer, samples: Sequence[Any]) -> tuple[Objective, list[Any]]:
        """Process the samples of an evaluation, without changing the state."""

    def state(self) -> Mapping[str, Any]:
        """Its state as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` of a checkpoint."""


@dataclass(frozen=True)
class FitResult:
    """The number of optimizer steps, and the evaluation metrics before (`initial`) and after (`final`) training."""

    steps: int
    initial: Metrics
    final: Metrics


def total_steps(samples: int, loop: LoopConfig) -> int:
    """Count the exact number of optimizer steps of `loop` over `samples` samples."""
    steps = math.ceil(samples / loop.batch_size) * loop.epochs  # the last batch of an epoch may be smaller
    return min(steps, loop.max_steps) if loop.max_steps else steps


def batch_at(step: int, samples: Sequence[Any], *, batch_size: int, seed: int) -> list[Any]:
    """Select the samples of optimizer step `step`. `seed` orders each epoch, whose last batch may be smaller."""
    per_epoch = math.ceil(len(samples) / batch_size)
    epoch, position = divmod(step, per_epoch)  # step = epoch * per_epoch + position
    order = shuffled_indices(len(samples), derive_seed(seed, "order", epoch))
    return [samples[i] for i in order[position * batch_size : (position + 1) * batch_size]]


def fit(
    trainer: Trainer,
    samples: Mapping[str, Sequence[Any]],
    objective: Objective,
    optimizer: OptimizerConfig,
    loop: LoopConfig,
    context: StageContext,
    *,
    look_ahead: LookAhead | None = None,
    exports: Exports | None = None,
) -> FitResult:
    """Train on `samples["train"]` and evaluate on `samples["eval"]`, from the newest checkpoint of this stage's key if any.

    `look_ahead` receives all samples of a step (or of an evaluation) first, and may change them and the objective. The
    state of a `Carried` one is in the checkpoints. `exports` are written on the way.

    The trainer ends with the last weights, or with the best ones if `loop.keep_best` is set.
    """
    train, evaluation = samples["train"], samples["eval"]
    _check(train, evaluation, optimizer, loop, context.label)
    steps = total_steps(len(train), loop)
    carried = look_ahead if isinstance(look_ahead, Carried) else None
    evaluated_ahead = carried.evaluated if carried else look_ahead
    checkpoints = context.checkpoints.keeping(best=loop.keep_best)
    checkpoint = checkpoints.to_resume(trainer.damage)
    if checkpoint is None:
        first, initial, skipped_in_a_row = 0, _evaluate(trainer, evaluation, objective, evaluated_ahead), 0
        context.metrics(0, initial)
    else:
        trainer.load(checkpoint.path)
        first, initial = checkpoint.step, dict(checkpoint.state["initial"])
        skipped_in_a_row = int(checkpoint.state["skipped_in_a_row"])
        if carried:
            carried.restore(checkpoint.state["carried"])
    for step in range(first, steps):
        batch = batch_at(step, train, batch_size=loop.batch_size, seed=context.seed)
        now, batch = look_ahead(trainer, batch) if look_ahead else (objective, batch)
        metrics = trainer.forward_backward(batch, now)
        metrics |= trainer.optim_step(learning_rate=scheduled_rate(optimizer, step, steps))
        skipped_in_a_row = count_skipped(skipped_in_a_row, metrics, label=context.label, step=step)
        done = step + 1
        if done % loop.log_every == 0:
            context.metrics(done, {f"train/{name}": value for name, value in metrics.items()})
        context.progress(done, steps, f"loss {metrics['loss']:.4f}")
        evaluated = None
        if done % loop.eval_every == 0 or done == steps:
            evaluated = _evaluate(trainer, evaluation, objective, evaluated_ahead)
            context.metrics(done, evaluated)
        if exports:
            exports.after_step(done, trainer)
        due = done % loop.checkpoint_every == 0 or done == steps or (evaluated and loop.keep_best)
        stop = context.stopping()  # read once: a request that comes after the save waits for the next step
        if due or stop:
            state = {"initial": initial, "skipped_in_a_row": skipped_in_a_row, "final": evaluated or {}}
            state |= {"carried": dict(carried.state())} if carried else {}
            with checkpoints.saving(done, state, metric=-evaluated["eval/loss"] if evaluated else None) as folder:
                trainer.save(folder)
        if stop:
            context.stop()
    return _finish(trainer, checkpoints, context.label, loop, steps, initial)


def fit_and_measure(
    model: ModelSpec,
    samples: Mapping[str, Sequence[Any]],
    objective: Objective,
    optimizer: OptimizerConfig,
    loop: LoopConfig,
    measure: Callable[[Trainer], Metrics],
    context: StageContext,
) -> tuple[FitResult, Metrics]:
    """Train a reward model with `fit` and export it: the result, and the metrics of `measure` on the exported weights.

    In bfloat16, merged adapters give other scores than separate adapters; a model with them is loaded again.
    """
    with context.runtime.trainer("reward_model", model, optimizer) as trainer:
        result = fit(trainer, samples, objective, optimizer, loop, context)
        trainer.export(context.out)
        if model.lora is None:
            return result, measure(trainer)
    merged = replace(model, path=str(context.out), lora=None)
    with context.runtime.trainer("reward_model", merged, None) as trainer:
        return result, measure(trainer)


def _check(
    train: Sequence[Any], evaluation: Sequence[Any], optimizer: OptimizerConfig, loop: LoopConfig, label: str
) -> None:
    """Raise ConfigError for settings that contradict each other, TrainingError where nothing is left to train on."""
    if loop.keep_best and optimizer.ema_decay:
        rule = "checkpoints are evaluated with their own weights, but the result would be an average"
        raise ConfigError(f"{label}.loop.keep_best", loop.keep_best, rule, "set it or ema_decay to 0")
    if loop.keep_best and not evaluation:
        rule = "no held-out rows are left, so no checkpoint is the best"
        raise ConfigError(f"{label}.loop.keep_best", loop.keep_best, rule, "hold rows out, or set it to 0")
    if not train:
        raise TrainingError(
            f"{label}.data", 0, "no training samples are left", "see the validation report of prepare_data"
        )


def _finish(
    trainer: Trainer, checkpoints: Checkpoints, label: str, loop: LoopConfig, steps: int, initial: Metrics
) -> FitResult:
    chosen = (checkpoints.best() if loop.keep_best else None) or checkpoints.latest()
    if chosen is None:
        raise TrainingError(f"{label}.checkpoints", None, "the last checkpoint is missing", "run the stage again")
    if chosen.step != steps:
        trainer.load(chosen.path)
    return FitResult(steps=steps, initial=initial, final=dict(chosen.state["final"]))


def _evaluate(trainer: Trainer, samples: Sequence[Any], objective: Objective, look_ahead: LookAhead | None) -> Metrics:
    if not samples:
        return {}
    if look_ahead:
        objective, samples = look_ahead(trainer, samples)
    return {f"eval/{name}": value for name, value in trainer.loss(samples, objective).items()}
