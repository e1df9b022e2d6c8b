"""Policy optimization: sample with vLLM, score, estimate advantages, update with a clipped loss, sync, repeat.

PPO (arXiv 1707.06347, as used in 2203.02155) with a value model, or an estimator without one, such as GRPO or RLOO. See
`algorithms.advantage`, and `algorithms.policy` for the losses. One step, top to bottom in `run` and `learn`, without options:
  sampler.load_weights   the sampler mu takes the policy's weights
  sampler.generate       y ~ mu(. | x); with `ahead` mu may have the weights of steps before
  score                  the terms of `rewards`: reward models, functions, judges, servers
  measure                log pi_old, log pi_ref and values of every token, before the update
  estimate_step          A of every token, with the KL penalty in the rewards (`kl.in = "reward"`; else it is in the loss)
  update                 the loss: of `clip` E[min(rho A, clip(rho) A)], rho = pi / pi_old, corrected by pi_old / mu
  end_step               held-out evaluation and monitors, which may roll the models back or end the run
How a step is sampled (ahead of the training, in parts, in several rounds) is chosen by `open_rollouts`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.algorithms.distillation import normalized_weights
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import KLAsLoss, PPOConfig, PtxConfig
from rlhf_core.config.teachers import PolicyDistillation
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import rows_at, shuffled_indices
from rlhf_core.data.shards import RolloutLog
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.interfaces import Metrics, Objective, Trainer
from rlhf_core.rewards.scoring import component_means
from rlhf_core.rollouts.answers import open_environments
from rlhf_core.rollouts.held_out import NO_EVALUATION
from rlhf_core.rollouts.monitors import await_decision
from rlhf_core.rollouts.prompts import open_band, ordered_prompts, split_prompts
from rlhf_core.rollouts.scored_step import open_rollouts, rollout_metrics, with_greedy_rewards
from rlhf_core.sampling.requests import stop_token_ids
from rlhf_core.sequences import Sequences, Subset
from rlhf_core.stage.context import StageContext
from rlhf_core.training.adamw import scheduled_rate
from rlhf_core.training.batching import averaged
from rlhf_core.training.experience import Experience, TeacherLogprobs, estimate_step
from rlhf_core.training.exports import Exports
from rlhf_core.training.moving_reference import MovingReference
from rlhf_core.training.objectives.base import PolicyObjective, Scaled, SftObjective, ValueObjective
from rlhf_core.training.skipped import check_updated
from rlhf_core.types import (
    DemonstrationsRef,
    ModelRef,
    PolicyRef,
    PromptsRef,
    Rollout,
    TokenSample,
    derive_seed,
)
from stages.ppo.models import Models, lease_models, open_held_out
from stages.ppo.state import TrainingState, export_result

__all__ = ["PPOConfig", "run"]

logger = logging.getLogger(__name__)


def run(
    config: PPOConfig,
    *,
    policy: PolicyRef,
    reference: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, ModelRef],
    demonstrations: DemonstrationsRef | None = None,
    teachers: dict[str, PolicyRef] | None = None,
    critic: ModelRef | None = None,
    context: StageContext,
) -> PolicyRef:
    """Optimize `policy` on `prompts` for the rewards, or to be like `teachers`, held near `reference`; return the new policy."""
    await_decision(context)
    with ExitStack() as leases:
        folder = context.path(policy)
        chat = ChatTemplate.load(folder)
        rows, kept_out = split_prompts(
            config, ordered_prompts(config, context.path(prompts), key=context.label), key=context.label
        )
        demonstrated = load_demonstrations(config.ptx, chat, demonstrations, context)
        # First, since a mistake in them shows in a second; the models take minutes.
        environments = open_environments(config, folder, leases, context)
        models = lease_models(config, policy, reference, reward_models, teachers or {}, critic, context, leases)
        band = open_band(config, rows, seed=context.seed)
        log = RolloutLog(context.work / "rollouts")
        leases.callback(log.wait)  # a retry of a failed run would write the same step
        # Last, so that nothing is being sampled when the engines are given back.
        sampler, score = leases.enter_context(open_rollouts(
            config, models.sampler, models.scorer, chat, rows, log,
            seed=context.seed, environments=environments, band=band, note_failed=context.failed,
        ))  # fmt: skip
        held_out = open_held_out(config, models, chat, kept_out, reward_models, environments, context, leases)
        ends = tuple(stop_token_ids(folder, tokenizer_eos=chat.eos_id))
        exports = Exports(config.exported_steps, context.work)
        state = TrainingState.open(config, models, sampler, band, held_out, context)
        first, metrics = start_or_resume(state, context)
        for step in range(first, config.steps):
            if state.best.ended:
                break
            began = time.perf_counter()
            sampler.load_weights(models.policy.weights, version=step)
            drawn = sampler.generate(step)
            took = {"time/wait_for_rollouts": time.perf_counter() - began}
            rollouts = score(step, drawn)
            sampled = rollout_metrics(step, drawn, rollouts, config, ahead=sampler.ahead, ends=ends)
            if band:
                band.after(step, [one.prompt for one in drawn.generations], rollouts)
                sampled |= band.metrics()
            began = time.perf_counter()
            rollouts, updated = learn(config, state, rollouts, demonstrated, log, step=step, context=context)
            took["time/train"] = time.perf_counter() - began
            metrics = updated | sampled | component_means(rollouts) | models.scorer.logs()
            metrics = end_step(config, state, exports, metrics, took, rollouts, step=step + 1, context=context)
        metrics = export_result(config, state, context) | metrics
    exports.deliver(context.out)
    return context.commit(PolicyRef, metrics=metrics)


def load_demonstrations(
    ptx: PtxConfig | None, chat: ChatTemplate, demonstrations: DemonstrationsRef | None, context: StageContext
) -> list[TokenSample]:
    """Load the demonstrations that `ptx` mixes into the updates; [] without `ptx`."""
    if ptx is None:
        return []
    if demonstrations is None:
        raise ConfigError("ppo.ptx", ptx.coef, "there are no demonstrations to mix in", "provide some")
    rows = read_demonstrations(context.path(demonstrations) / "train.parquet")
    samples = [sample for row in rows for sample in chat.examples(row.messages, max_length=ptx.max_length)]
    if not samples:
        rule = "leaves no tokens of the demonstrations to train on"
        raise DataError("ppo.ptx.max_length", ptx.max_length, rule, "raise it")
    return samples


def learn(
    config: PPOConfig,
    state: TrainingState,
    rollouts: Sequence[Rollout],
    demonstrated: Sequence[TokenSample],
    log: RolloutLog,
    *,
    step: int,
    context: StageContext,
) -> tuple[Sequence[Rollout], Metrics]:
    """Measure the rollouts of a step, estimate their advantages, and update the models.

    Returns the used rollouts: all, or only those with a greedy answer if the estimator compares with it (remax).
    """
    models, greedy, sampling = state.models, tuple[float, ...](), config.at(step).sampling
    if config.estimator and config.estimator.asks_greedy:
        rollouts, greedy = with_greedy_rewards(
            models.sampler, rollouts, sampling, models.scorer,
            step=step, group_size=config.samples_per_prompt, note_failed=context.failed,
        )  # fmt: skip
    measured = measure(config, models, rollouts, sampling.temperature, together=context.runtime.together)
    turn_weights = {source: config.turn_weight(source) for source in {one.prompt.source for one in rollouts}}
    estimate = models.policy.compute(
        partial(
            estimate_step, answers=measured.answers, teachers=measured.teachers, config=config,
            function=context.user_function(config.advantage), greedy=greedy, kl_coef=state.kl.coef,
            turn_weights=[turn_weights[one.prompt.source] for one in rollouts],
            seed=derive_seed(context.seed, "loss_choice", step),
        ),
        measured.sequences,
    )  # fmt: skip
    batch = measured.sequences.with_fields(advantages=estimate.advantages, returns=estimate.returns)
    log.wait()  # an update follows from rollouts that a resumed run finds again
    objective = policy_objective(config, context, sampling, kl_coef=state.kl.coef)
    updated = update(
        config, models, batch, estimate.rows, objective, demonstrated,
        step=step, scale=state.monitors.rates["learning_rate"], context=context,
    )  # fmt: skip
    return rollouts, estimate.metrics | updated


def measure(
    config: PPOConfig,
    models: Models,
    rollouts: Sequence[Rollout],
    temperature: float,
    *,
    together: Callable[..., list[Any]],
) -> Experience:
    """Measure log pi_old, log pi_ref and the value of every token before the update."""
    sampled = Experience.of(rollouts)
    sampled = replace(sampled, sequences=models.policy.keep(sampled.sequences))
    sequences = sampled.sequences
    tokens = Subset(sequences.select_fields(), np.arange(len(sequences)))
    routed = replace(tokens, sequences=sequences.select_fields("routed_experts"))
    bypass = config.correction.pi_old == "sampler"
    old, ref, values = together(
        lambda: (
            sequences.fields["rollout_logprobs"] if bypass else models.policy.logprobs(routed, temperature=temperature)
        ),
        lambda: models.reference.logprobs(tokens, temperature=temperature) if models.reference else None,
        lambda: models.value_model.values(tokens) if models.value_model else None,
    )
    outputs = {"old_logprobs": old, "ref_logprobs": ref, "old_values": values}
    sequences = sequences.with_fields(**{name: values_S for name, values_S in outputs.items() if values_S is not None})
    taught = (
        measure_teachers(config.distill, models.teachers, rollouts, sequences, temperature) if config.distill else ()
    )
    return replace(sampled, sequences=sequences, teachers=taught)


def measure_teachers(
    config: PolicyDistillation,
    teachers: Mapping[str, Trainer],
    rollouts: Sequence[Rollout],
    sequences: Sequences,
    temperature: float,
) -> tuple[TeacherLogprobs, ...]:
    """Compute the log-probs of each teacher for the sequences that it teaches: all, or those from its sources."""
    measured = []
    for name, weight in normalized_weights(config.teachers):
        sources = config.route.get(name, ())
        teaches = np.array([not config.route or one.prompt.source in sources for one in rollouts])
        logprobs = sequences.fields["old_logprobs"].copy()
        if teaches.any():
            taught = Subset(sequences.select_fields(), np.flatnonzero(teaches))
            logprobs[np.repeat(teaches, sequences.lengths)] = teachers[name].logprobs(taught, temperature=temperature)
        measured.append(TeacherLogprobs(name, 1.0 if config.route else weight, logprobs, teaches))
    return tuple(measured)


def policy_objective(
    config: PPOConfig, context: StageContext, sampling: SamplingConfig, *, kl_coef: float
) -> PolicyObjective:
    """The objective of a step. `kl_coef` is in the loss, or in the rewards already."""
    return PolicyObjective(
        loss=config.loss,
        max_length=config.longest(sampling.max_tokens),
        temperature=sampling.temperature,
        kl_coef=kl_coef if isinstance(config.kl, KLAsLoss) else 0.0,
        entropy_coef=config.entropy_coef,
        correction=config.correction,
        kl_estimator=config.kl.estimator if isinstance(config.kl, KLAsLoss) else "k2",
        function=context.user_function(config.loss),
    )


def update(
    config: PPOConfig,
    models: Models,
    batch: Sequences,
    rows: NDArray[np.int64],
    objective: PolicyObjective,
    demonstrated: Sequence[TokenSample],
    *,
    step: int,
    scale: float,
    context: StageContext,
) -> Metrics:
    """Make `epochs * minibatches` optimizer steps on these rows of the batch; return their metrics `averaged`.

    The policy waits for the value model's warm-up; its learning rate is scheduled over the steps that are left, times
    the `scale` of rollbacks. Some of the demonstrations, if given, are mixed into each of its updates (PPO-ptx).
    Without rows, because every answer of the step was cut off and is masked, nothing is updated.
    """
    frozen = config.value.warmup_steps if models.value_model else 0
    value_rate = scheduled_rate(config.value.optimizer, step, config.steps)
    policy_rate = (
        scale * scheduled_rate(config.optimizer, step - frozen, config.steps - frozen) if step >= frozen else 0
    )
    history: list[Metrics] = []
    if not len(rows):
        logger.warning("%s: every answer of step %d was cut off and is masked: no update", context.label, step)
    for epoch in range(config.epochs):
        order = shuffled_indices(len(rows), derive_seed(context.seed, "minibatches", step, epoch))
        count = min(config.minibatches, len(rows))  # fewer rollouts than that where many were invalid
        for i in range(count):
            drawn, number = rows[order[i::count]], (step * config.epochs + epoch) * config.minibatches + i
            work = []
            if models.value_model:
                value_objective = ValueObjective(clip=config.value.clip or None)
                part = Subset(batch.select_fields("old_values", "returns"), drawn)
                work.append(partial(train, "value", models.value_model, [(part, value_objective)], value_rate))
            if step >= frozen:
                read = batch.select_fields(*objective.reads)
                losses: list[tuple[Any, Any]] = [(Subset(read, drawn), objective)]
                if ptx := config.ptx:
                    shown = rows_at(number, demonstrated, count=ptx.batch_size, seed=context.seed)
                    losses.append((shown, Scaled(SftObjective(pack_to=None), ptx.coef)))
                work.append(partial(train, "policy", models.policy, losses, policy_rate))
            history.append({name: one for made in context.runtime.together(*work) for name, one in made.items()})
    check_updated(history, label=context.label, step=step)
    if isinstance(models.reference, MovingReference):
        models.reference.after_step(step + 1, models.policy)
    return averaged(history)


def train(role: str, trainer: Trainer, losses: Sequence[tuple[Any, Objective]], learning_rate: float) -> Metrics:
    """Make one optimizer step on the sum of losses of (batch, objective): the rollouts, then any demonstrations."""
    metrics, *mixed = [trainer.forward_backward(batch, objective) for batch, objective in losses]
    metrics |= trainer.optim_step(learning_rate=learning_rate)
    named = {f"{role}/{name}": value for name, value in metrics.items()}
    return {"ptx/nll": mixed[0]["nll"]} | named if mixed else named


def end_step(
    config: PPOConfig,
    state: TrainingState,
    exports: Exports,
    metrics: Metrics,
    took: Metrics,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    context: StageContext,
) -> Metrics:
    """Evaluate, record, and save; return the metrics. The run may stop here, pause, or be rolled back."""
    monitors, best, last = state.monitors, state.best, step == config.steps
    valid = len(rollouts) / (config.prompts_per_step * config.samples_per_prompt)
    metrics = metrics | {"kl/coef": state.kl.coef, "rollout/valid": valid}
    if state.models.reference:
        state.kl = state.kl.updated(metrics["kl/per_sequence"], len(rollouts))
    exports.after_step(step, state.models.policy)
    evaluation = NO_EVALUATION
    if state.held_out and state.held_out.is_due(step, last=last):
        evaluation = state.held_out.evaluate(step, state.sampler, state.models.policy.weights)
    if step == 1 + (config.value.warmup_steps if state.models.value_model else 0):  # the first update of the policy
        monitors.check_metrics(metrics)
    alarms = monitors.observe(step, metrics | evaluation.metrics, evaluation.samples)
    metrics |= evaluation.metrics | monitors.complaints()
    new_best = best.judge(step, evaluation.metrics, quiet=monitors.quiet)
    target = monitors.act(alarms, best, last=last)
    if evaluation.metrics and all(alarm.action == "warn" for alarm in alarms):
        best.end_without_better(step)
    record(config, metrics, took, rollouts, step=step, context=context)
    if target is not None:
        state.restore(target)
        state.kl = replace(state.kl, coef=state.kl.coef * monitors.kl_factor(target))
    stop = context.stopping()
    due = stop or last or step % config.checkpoint_every == 0
    if due or target is not None or new_best is not None or monitors.paused or best.ended:
        state.save(metrics, step=step, metric=new_best)
    if stop:
        context.stop()
    monitors.decide(best, context)
    return metrics


def start_or_resume(state: TrainingState, context: StageContext) -> tuple[int, Metrics]:
    """Load the newest checkpoint into the state; return the first step to make and the last metrics.

    Without a checkpoint the run starts at step 0, and the policy is evaluated before any update.
    """
    checkpoint = context.checkpoints.to_resume(state.damage)
    if checkpoint is not None:
        state.resume(checkpoint, context)
        return checkpoint.step, dict(checkpoint.state["metrics"])
    if state.held_out:
        evaluation = state.held_out.evaluate(0, state.sampler, state.models.policy.weights)
        new_best = state.best.judge(0, evaluation.metrics, quiet=state.monitors.quiet)
        state.monitors.observe(0, evaluation.metrics, evaluation.samples)
        context.metrics(0, evaluation.metrics)
        state.save({}, step=0, metric=new_best)
    return 0, {}


def record(
    config: PPOConfig, metrics: Metrics, took: Metrics, rollouts: Sequence[Rollout], *, step: int, context: StageContext
) -> None:
    """Log a step's metrics with the seconds that its parts `took`, and every `table_every` steps a table of rollouts."""
    context.metrics(step, metrics | took)
    distance = f"  kl {metrics['kl/per_sequence']:.2f}" if "kl/per_sequence" in metrics else ""
    context.progress(step, config.steps, f"reward {metrics['reward/mean']:.3f}{distance}")
    if step % config.table_every == 0 or step == config.steps:
        rows = [
            [one.prompt.messages[-1].content, one.completion.text, one.reward, len(one.completion.token_ids)]
            for one in rollouts[:16]
        ]
        context.tracker.table(f"samples/step_{step:05d}", ["prompt", "completion", "reward", "tokens"], rows)
