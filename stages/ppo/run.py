"""Policy optimization: sample with vLLM, score, estimate advantages, update with a clipped loss, sync, repeat.

PPO (arXiv 1707.06347, as used in 2203.02155) with a value model, or an estimator without one, such as GRPO or RLOO: those
in `algorithms.advantage`, with the losses in `algorithms.policy`. One step, top to bottom in `run` and `learn`, without the options:
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.algorithms.distillation import normalized_weights
from rlhf_core.algorithms.token_math import AdaptiveKL, FixedKL, kl_controller
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import KLAsLoss, PPOConfig, PtxConfig
from rlhf_core.config.teachers import PolicyDistillation
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import rows_at, shuffled_indices
from rlhf_core.data.shards import RolloutLog
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.interfaces import Metrics, ModelSpec, Objective, Sampler, Trainer
from rlhf_core.models.router_replay import check_router_replay
from rlhf_core.rewards.scoring import Scorer, component_means, open_scorer
from rlhf_core.rollouts.answers import OpenEnvironments, StepSampler, expect_weights, open_environments
from rlhf_core.rollouts.guard import HeldOut, RunGuard, await_decision
from rlhf_core.rollouts.prompts import BandOrder, open_band, ordered_prompts, split_prompts
from rlhf_core.rollouts.scored_step import open_rollouts, rollout_metrics, with_greedy_rewards
from rlhf_core.sampling.requests import stop_token_ids
from rlhf_core.sequences import Sequences, Subset
from rlhf_core.stage.checkpoints import Checkpoint
from rlhf_core.stage.context import StageContext
from rlhf_core.training.adamw import scheduled_rate
from rlhf_core.training.batching import averaged
from rlhf_core.training.experience import Experience, TeacherLogprobs, estimate_step
from rlhf_core.training.exports import Exports
from rlhf_core.training.moving_reference import AdaptersOff, MovingReference
from rlhf_core.training.objectives.base import PolicyObjective, Scaled, SftObjective, ValueObjective
from rlhf_core.training.skipped import check_updated
from rlhf_core.types import (
    DemonstrationsRef,
    ModelRef,
    PolicyRef,
    ProcessRewardModelRef,
    Prompt,
    PromptsRef,
    Rollout,
    TokenSample,
    derive_seed,
)

__all__ = ["PPOConfig", "run"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Models:
    """The engines of one run, leased from the runtime.

    Only gae has a `value_model`, and only a run with `kl.coef` > 0 a `reference`.
    """

    sampler: Sampler
    policy: Trainer
    reference: Trainer | MovingReference | AdaptersOff | None
    value_model: Trainer | None
    scorer: Scorer
    teachers: Mapping[str, Trainer]
    """Of a run with `distill`."""


@dataclass
class TrainingState:
    """The state that a checkpoint restores: models, rewards, sampler, order of prompts, and the KL controller."""

    models: Models
    sampler: StepSampler
    band: BandOrder | None
    kl: FixedKL | AdaptiveKL

    def save(self, folder: Path) -> None:
        """Write the parts that have files."""
        self.sampler.save(folder / "rollouts")
        self.models.policy.save(folder / "policy")
        if self.models.value_model:
            self.models.value_model.save(folder / "value_model")
        if isinstance(self.models.reference, MovingReference):
            self.models.reference.save(folder)

    def facts(self) -> dict[str, Any]:
        """The other parts, as JSON."""
        facts = {"kl": asdict(self.kl), "rewards": self.models.scorer.state()}
        return facts | {"band": self.band.state()} if self.band else facts

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load all parts except the sampler, which a rollback does not change."""
        self.models.policy.load(checkpoint.path / "policy")
        if self.models.value_model:
            self.models.value_model.load(checkpoint.path / "value_model")
        if isinstance(self.models.reference, MovingReference):
            self.models.reference.load(checkpoint.path)
        self.models.scorer.restore(checkpoint.state["rewards"])
        if self.band:
            self.band.restore(checkpoint.state["band"])
        self.kl = replace(self.kl, **checkpoint.state["kl"])

    def damage(self, folder: Path) -> str:
        """The first damaged file of a checkpoint, or ""."""
        value = self.models.value_model
        return self.models.policy.damage(folder / "policy") or (value.damage(folder / "value_model") if value else "")


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
        rows, held_out = split_prompts(
            config, ordered_prompts(config, context.path(prompts), key=context.label), key=context.label
        )
        context.tracker.dataset("prompts", prompts.digest, "training")
        context.tracker.input_model(policy.digest)
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
        guard = open_guard(config, models, sampler, chat, held_out, reward_models, environments, context, leases)
        ends = tuple(stop_token_ids(folder, tokenizer_eos=chat.eos_id))
        exports = Exports(config.exported_steps, context.work)
        state = TrainingState(models, sampler, band, kl_controller(config.kl.coef, config.kl.target, config.kl.horizon))
        first, metrics = start_or_resume(config, state, guard, context)
        for step in guard.steps(first):
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
            rollouts, updated = learn(
                config, state, rollouts, demonstrated, log,
                step=step, scale=guard.learning_rate_scale, context=context,
            )  # fmt: skip
            took["time/train"] = time.perf_counter() - began
            metrics = updated | sampled | component_means(rollouts) | models.scorer.logs()
            metrics = end_step(config, state, guard, exports, metrics, took, rollouts, step=step + 1, context=context)
        metrics = guard.export(models.policy) | metrics
    exports.deliver(context.out)
    return context.commit(PolicyRef, metrics=metrics)


def lease_models(
    config: PPOConfig,
    policy: PolicyRef,
    reference: PolicyRef,
    reward_models: dict[str, ModelRef],
    teachers: Mapping[str, PolicyRef],
    critic: ModelRef | None,
    context: StageContext,
    leases: ExitStack,
) -> Models:
    """Lease the engines: the value model starts from `critic`, else from a reward model if there is one, else from the policy."""
    weighted = config.distill.teachers if config.distill else {}
    taught = {name: teacher_spec(name, teachers, policy, context) for name in weighted}
    folder = context.path(policy)
    if config.router_replay:
        check_router_replay(folder, key=f"{context.label}.router_replay")
    actor = ModelSpec(path=str(folder), head="lm", lora=config.lora, seed=context.seed)
    value_model: Trainer | None = None
    frozen: Trainer | MovingReference | AdaptersOff | None = None
    if config.uses_values:
        # By name, and not by the order of a mapping, which does not survive a file.
        scoring = {name: ref for name, ref in reward_models.items() if not isinstance(ref, PolicyRef)}
        names = sorted(scoring, key=lambda name: (isinstance(scoring[name], ProcessRewardModelRef), name))
        start = critic or (reward_models[names[0]] if names else policy)
        if critic:
            from rlhf_core.models.loading import check_same_tokens  # imports peft, which only workers need otherwise

            check_same_tokens(context.path(policy), context.path(critic), key=f"{context.label}.critic")
        spec = ModelSpec(path=str(context.path(start)), head="value", lora=config.value.lora, seed=context.seed)
        value_model = leases.enter_context(context.runtime.trainer("value_model", spec, config.value.optimizer))
    sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))
    expect_weights(sampler)  # each step begins with a load
    trained = leases.enter_context(context.runtime.trainer("policy", actor, config.optimizer))
    if config.kl.reference_sync:
        start_path, sync = context.path(reference), config.kl.reference_sync
        frozen = MovingReference(context.runtime, start_path, context.work, sync, seed=context.seed, leases=leases)
    elif config.uses_reference and config.lends_reference(reference.digest, policy.digest):
        frozen = AdaptersOff(trained)
    elif config.uses_reference:
        spec = ModelSpec(path=str(context.path(reference)), head="lm", lora=None, seed=context.seed)
        frozen = leases.enter_context(context.runtime.trainer("reference", spec, None))
    scorer = leases.enter_context(open_scorer(config.rewards, reward_models, context, config.agent_keys()))
    teaching = {
        name: leases.enter_context(context.runtime.trainer("teacher", spec, None)) for name, spec in taught.items()
    }
    return Models(
        sampler=sampler, policy=trained, reference=frozen, value_model=value_model, scorer=scorer, teachers=teaching
    )


def teacher_spec(name: str, teachers: Mapping[str, PolicyRef], policy: PolicyRef, context: StageContext) -> ModelSpec:
    """The model of a teacher. Raises ConfigError if it is missing, or if its vocabulary is not that of `policy`."""
    from rlhf_core.models.loading import shared_vocabulary  # imports peft, as above

    key = f"{context.label}.distill.teachers.{name}"
    if name not in teachers:
        raise ConfigError(key, None, "is not among the given teachers", "give a policy of this name")
    folder = context.path(teachers[name])
    shared_vocabulary(context.path(policy), folder, key=key)
    context.tracker.input_model(teachers[name].digest)
    return ModelSpec(path=str(folder), head="lm", lora=None, seed=context.seed)


def open_guard(
    config: PPOConfig,
    models: Models,
    sampler: StepSampler,
    chat: ChatTemplate,
    held_out: Sequence[Prompt],
    reward_models: dict[str, ModelRef],
    environments: OpenEnvironments,
    context: StageContext,
    leases: ExitStack,
) -> RunGuard:
    """Open the guard of a run; `leases` hold the engines of its independent rewards."""
    evaluated: HeldOut | None = None
    if config.evaluate is not None:
        independent = config.evaluate.independent
        evaluated = HeldOut(
            config.evaluate,
            held_out,
            engine=models.sampler,
            chat=chat,
            sampling=config.sampling,
            seed=context.seed,
            environments=environments,
            scorer=models.scorer.comparable(),
            independent=leases.enter_context(open_scorer(independent, reward_models, context)) if independent else None,
            note_failed=context.failed,
        )
    return RunGuard(
        context,
        sampler,
        evaluated,
        config.monitors,
        steps=config.steps,
        first_update=1 + (config.value.warmup_steps if models.value_model else 0),
        rewards=config.rewards,
    )


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
    scale: float,
    context: StageContext,
) -> tuple[Sequence[Rollout], Metrics]:
    """Measure the rollouts of a step, estimate their advantages, and update the models.

    Returns the rollouts that were used: all, or the ones with a greedy answer if the estimator compares with it (remax).
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
        config, models, batch, estimate.rows, objective, demonstrated, step=step, scale=scale, context=context
    )
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
    the `scale` of the guard. Some demonstrations are mixed into each of its updates, if there are any (PPO-ptx).
    Without rows, if every answer of the step was cut off and is masked, there is no update.
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
    """Make one optimizer step on the sum of losses of (batch, objective), the first one and that of demonstrations, if any."""
    metrics, *mixed = [trainer.forward_backward(batch, objective) for batch, objective in losses]
    metrics |= trainer.optim_step(learning_rate=learning_rate)
    named = {f"{role}/{name}": value for name, value in metrics.items()}
    return {"ptx/nll": mixed[0]["nll"]} | named if mixed else named


def end_step(
    config: PPOConfig,
    state: TrainingState,
    guard: RunGuard,
    exports: Exports,
    metrics: Metrics,
    took: Metrics,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    context: StageContext,
) -> Metrics:
    """Evaluate, record, and save; return the metrics. The run may stop here, or be rolled back."""
    policy = state.models.policy
    valid = len(rollouts) / (config.prompts_per_step * config.samples_per_prompt)
    metrics = metrics | {"kl/coef": state.kl.coef, "rollout/valid": valid}
    if state.models.reference:
        state.kl = state.kl.updated(metrics["kl/per_sequence"], len(rollouts))
    exports.after_step(step, policy)
    metrics |= guard.after_step(step, metrics, policy.weights)
    record(config, metrics, took, rollouts, step=step, context=context)
    if guard.target is not None:
        state.restore(guard.target)
        state.kl = replace(state.kl, coef=state.kl.coef * guard.kl_factor(guard.target))
    stop = context.stopping()
    if stop or step % config.checkpoint_every == 0 or step == config.steps or guard.saves(step):
        save(state, guard, metrics, step=step)
    if stop:
        context.stop()
    guard.decide()
    return metrics


def start_or_resume(
    config: PPOConfig, state: TrainingState, guard: RunGuard, context: StageContext
) -> tuple[int, Metrics]:
    """Load the newest checkpoint into the state and the guard; return the first step to make and the last metrics.

    Without a checkpoint the run starts at step 0.
    """
    checkpoint = context.checkpoints.to_resume(state.damage)
    if checkpoint is None:
        context.metrics(0, guard.before_training(state.models.policy.weights))
        if guard.saves(0):
            save(state, guard, {}, step=0)
        return 0, {}
    state.sampler.load(checkpoint.path / "rollouts", checkpoint.step)
    guard.restore(checkpoint.state)
    guard.decide()
    state.restore(checkpoint)
    return checkpoint.step, dict(checkpoint.state["metrics"])


def save(state: TrainingState, guard: RunGuard, metrics: Metrics, *, step: int) -> None:
    """Write a checkpoint. The log has the rollouts made since the last one."""
    facts = state.facts() | {"metrics": metrics} | guard.state()
    with guard.checkpoints.saving(step, facts, metric=guard.candidate) as folder:
        state.save(folder)


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
