"""Policy optimization: sample with vLLM, score, estimate advantages, update with a clipped loss, sync, repeat.

PPO (arXiv 1707.06347, as used in 2203.02155) with a value model, or an estimator without one, such as GRPO or RLOO: those
in `algorithms.advantage`, with the losses in `algorithms.policy`. One step, top to bottom in `run`, without the options:
  sampler.load_weights   the sampler mu takes the policy's weights
  sampler.generate       y ~ mu(. | x); with `ahead` mu may have the weights of steps before
  score                  the terms of `rewards`: reward models, functions, judges, servers
  measure                log pi_old, log pi_ref and values of every token, before the update
  estimate               A of every token, with the KL penalty in the rewards (`kl.in = "reward"`; else it is in the loss)
  update                 the loss: of `clip` E[min(rho A, clip(rho) A)], rho = pi / pi_old, corrected by pi_old / mu
  end_step               held-out evaluation and monitors, which may roll the models back or end the run
How a step is sampled (ahead of the training, in parts, in several rounds) is chosen by `open_rollouts`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rlhf_core.algorithms.distillation import normalized_weights
from rlhf_core.algorithms.token_math import AdaptiveKL, FixedKL
from rlhf_core.config.policy import DynamicSampling, KLAsLoss, PPOConfig, PtxConfig
from rlhf_core.config.teachers import PolicyDistillation
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.mixing import rows_at, shuffled_indices
from rlhf_core.data.shards import Drawn, RolloutLog
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.interfaces import Metrics, ModelSpec, Sampler, Trainer
from rlhf_core.models.loading import check_same_tokens, shared_vocabulary
from rlhf_core.rewards.scoring import Scorer, component_means, open_scorer
from rlhf_core.rollouts.answers import OpenEnvironments, StepSampler, open_environments
from rlhf_core.rollouts.guard import HeldOut, RunGuard, await_decision
from rlhf_core.rollouts.prompts import BandOrder, ordered_prompts, split_prompts
from rlhf_core.rollouts.scored_step import StepScorer, open_rollouts, rollout_metrics, with_greedy_rewards
from rlhf_core.rows import chosen
from rlhf_core.sampling.requests import stop_token_ids
from rlhf_core.stage.context import StageContext
from rlhf_core.store.checkpoints import Checkpoint
from rlhf_core.training.adamw import scheduled_rate
from rlhf_core.training.batching import averaged
from rlhf_core.training.experience import Experience, Lesson, rows_to_train, sampled_logprobs
from rlhf_core.training.exports import Exports
from rlhf_core.training.moving_reference import AdaptersOff, MovingReference
from rlhf_core.training.objectives.base import PolicyObjective, Scaled, SftObjective, ValueObjective
from rlhf_core.training.trainer import check_updated
from rlhf_core.types import (
    DemonstrationsRef,
    ModelRef,
    PolicyRef,
    PolicySample,
    ProcessRewardModelRef,
    Prompt,
    PromptsRef,
    Rollout,
    TokenSample,
    ValueSample,
    derive_seed,
    floats,
    token_samples,
)
from rlhf_core.user_code.dependencies import UserFunction

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


@dataclass(frozen=True)
class Parts:
    """What all steps of one run use, opened once."""

    config: PPOConfig
    context: StageContext
    models: Models
    sampler: StepSampler
    score: StepScorer
    guard: RunGuard
    estimator_function: UserFunction | None
    turn_weights: Mapping[str, float]
    """Weight of a turn's reward that is assigned to the turn itself, by source."""
    objective: PolicyObjective
    """The policy's objective; its `kl_coef` is set at each step."""
    demonstrated: Sequence[TokenSample]
    """Samples that `ptx` mixes into the updates."""
    ends: tuple[int, ...]
    exports: Exports
    band: BandOrder | None


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
        parts = open_parts(
            config, policy, reference, prompts, reward_models, demonstrations, teachers or {}, critic, context, leases
        )
        models, sampler, guard = parts.models, parts.sampler, parts.guard
        first, kl, metrics = start_or_resume(parts)
        for step in guard.steps(first):
            began = time.perf_counter()
            sampler.load_weights(models.policy.weights, version=step)
            drawn = sampler.generate(step)
            took = {"time/wait_for_rollouts": time.perf_counter() - began}
            rollouts = parts.score(step, drawn)
            sampled = sampling_metrics(parts, step, drawn, rollouts)
            if parts.band:
                parts.band.after(step, [one.prompt for one in drawn.generations], rollouts)
                sampled |= parts.band.metrics()
            began = time.perf_counter()
            rollouts, greedy = with_baseline(parts, step, rollouts)
            experience = measure(parts, rollouts)
            policy_rows, value_rows, estimated = estimate(parts, step, experience, greedy, kl.coef)
            updated = update(parts, step, policy_rows, value_rows, kl.coef)
            took["time/train"] = time.perf_counter() - began
            metrics = estimated | updated | sampled | component_means(rollouts) | models.scorer.logs()
            kl, metrics = end_step(parts, step, kl, metrics, took, rollouts)
        metrics = guard.export(models.policy) | metrics
    parts.exports.deliver(context.out)
    return context.commit(PolicyRef, metrics=metrics)


def open_parts(
    config: PPOConfig,
    policy: PolicyRef,
    reference: PolicyRef,
    prompts: PromptsRef,
    reward_models: dict[str, ModelRef],
    demonstrations: DemonstrationsRef | None,
    teachers: Mapping[str, PolicyRef],
    critic: ModelRef | None,
    context: StageContext,
    leases: ExitStack,
) -> Parts:
    """Read the inputs and open all parts of the run; `leases` end them."""
    folder = context.path(policy)
    chat = ChatTemplate.load(folder)
    given = ordered_prompts(config, context.path(prompts), key=context.label)
    rows, held_out = split_prompts(config, given, key=context.label)
    context.tracker.dataset("prompts", prompts.digest, "training")
    context.tracker.input_model(policy.digest)
    demonstrated = demonstrated_samples(config.ptx, chat, demonstrations, context)
    # First, since a mistake in them shows in a second; the models take minutes.
    environments = open_environments(config, folder, leases, context)
    models = lease_models(config, policy, reference, reward_models, teachers, critic, context, leases)
    band = BandOrder(rows, config.band, seed=context.seed) if config.order == "band" else None
    rollouts = open_rollouts(
        config,
        models.sampler,
        models.scorer,
        chat,
        rows,
        RolloutLog(context.work / "rollouts"),
        seed=context.seed,
        environments=environments,
        band=band,
        note_failed=context.failed,
        apart=context.runtime.apart,
    )
    # Last, so that nothing is being sampled when the engines are given back.
    sampler, score = leases.enter_context(rollouts)
    guard = open_guard(config, models, sampler, chat, held_out, reward_models, environments, context, leases)
    return Parts(
        config=config,
        context=context,
        models=models,
        sampler=sampler,
        score=score,
        guard=guard,
        estimator_function=context.user_function(config.advantage),
        turn_weights={source: config.turn_weight(source) for source in {one.source for one in rows}},
        objective=open_objective(config, context),
        demonstrated=demonstrated,
        ends=tuple(stop_token_ids(folder, tokenizer_eos=chat.eos_id)),
        exports=Exports(config.exported_steps, context.work),
        band=band,
    )


def open_objective(config: PPOConfig, context: StageContext) -> PolicyObjective:
    """Return the objective of an update, with the KL coefficient 0 that each step sets."""
    return PolicyObjective(
        loss=config.loss,
        max_length=config.longest(config.sampling.max_tokens),
        temperature=config.sampling.temperature,
        kl_coef=0.0,
        entropy_coef=config.entropy_coef,
        correction=config.correction,
        kl_estimator=config.kl.estimator if isinstance(config.kl, KLAsLoss) else "k2",
        function=context.user_function(config.loss),
    )


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
    taught = {name: named_teacher(name, teachers, policy, context) for name in weighted}
    folder = str(context.path(policy))
    actor = ModelSpec(path=folder, head="lm", lora=config.lora, seed=context.seed)
    value_model: Trainer | None = None
    frozen: Trainer | MovingReference | AdaptersOff | None = None
    if config.uses_values:
        # By name, and not by the order of a mapping, which does not survive a file.
        scoring = {name: ref for name, ref in reward_models.items() if not isinstance(ref, PolicyRef)}
        names = sorted(scoring, key=lambda name: (isinstance(scoring[name], ProcessRewardModelRef), name))
        start = critic or (reward_models[names[0]] if names else policy)
        if critic:
            check_same_tokens(context.path(policy), context.path(critic), key=f"{context.label}.critic")
        spec = ModelSpec(path=str(context.path(start)), head="value", lora=config.value.lora, seed=context.seed)
        value_model = leases.enter_context(context.runtime.trainer("value_model", spec, config.value.optimizer))
    sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))
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


def named_teacher(name: str, teachers: Mapping[str, PolicyRef], policy: PolicyRef, context: StageContext) -> ModelSpec:
    """Return the model of a teacher; ConfigError if it is missing, or if its vocabulary is not that of `policy`."""
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
    """Return the guard of a run; `leases` hold the engines of its independent rewards."""
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


def demonstrated_samples(
    ptx: PtxConfig | None, chat: ChatTemplate, demonstrations: DemonstrationsRef | None, context: StageContext
) -> list[TokenSample]:
    """Return the tokens of the demonstrations that `ptx` mixes into the updates; [] without `ptx`."""
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


def sampling_metrics(parts: Parts, step: int, drawn: Drawn, rollouts: Sequence[Rollout]) -> Metrics:
    """Return `rollout/*` of what was sampled for a step."""
    config = parts.config
    return rollout_metrics(
        step,
        drawn,
        rollouts,
        prompts_per_step=config.prompts_per_step,
        group_size=config.samples_per_prompt,
        episodes=bool(config.agent or config.agents),
        dynamic_sampling=config.ahead if isinstance(config.ahead, DynamicSampling) else None,
        ahead=parts.sampler.ahead,
        ends=parts.ends,
        stop=config.sampling.stop,
        apart=parts.context.runtime.apart,
    )


def with_baseline(parts: Parts, step: int, rollouts: Sequence[Rollout]) -> tuple[Sequence[Rollout], tuple[float, ...]]:
    """Return the rollouts that have the baseline of their estimator, and the greedy rewards of one that compares with them."""
    config, models, failed = parts.config, parts.models, parts.context.failed
    if config.estimator is None or not config.estimator.asks_greedy:
        return rollouts, ()
    size = config.samples_per_prompt
    return with_greedy_rewards(
        models.sampler, rollouts, config.sampling, models.scorer, step=step, group_size=size, note_failed=failed
    )


def measure(parts: Parts, rollouts: Sequence[Rollout]) -> Experience:
    """Return the rollouts with log pi_old, log pi_ref and the value of every token, all from before the update."""
    config, models = parts.config, parts.models
    samples = parts.context.runtime.apart(token_samples, rollouts)
    temperature = config.sampling.temperature
    bypass = config.correction.pi_old == "sampler"
    lessons = lessons_of(config.distill, models.teachers, rollouts, samples, temperature) if config.distill else ()
    policy, reference, value_model = models.policy, models.reference, models.value_model
    old, ref, values = parts.context.runtime.together(
        lambda: sampled_logprobs(rollouts) if bypass else policy.logprobs(samples, temperature=temperature),
        lambda: reference.logprobs(samples, temperature=temperature) if reference else (),
        lambda: value_model.values(samples) if value_model else (),
    )
    return Experience(rollouts, samples, old, ref, values, lessons)


def lessons_of(
    config: PolicyDistillation,
    teachers: Mapping[str, Trainer],
    rollouts: Sequence[Rollout],
    samples: Sequence[TokenSample],
    temperature: float,
) -> tuple[Lesson, ...]:
    """Return the log-probs of each teacher for the samples that it teaches: all, or those of its sources."""
    lessons = []
    for name, weight in normalized_weights(config.teachers):
        sources = config.route.get(name, ())
        rows = [at for at, one in enumerate(rollouts) if not config.route or one.prompt.source in sources]
        made = teachers[name].logprobs(chosen(samples, rows), temperature=temperature) if rows else []
        logprobs = dict(zip(rows, made, strict=True))
        taught = tuple(logprobs.get(at, floats(())) for at in range(len(samples)))
        lessons.append(Lesson(name, 1.0 if config.route else weight, taught))
    return tuple(lessons)


def estimate(
    parts: Parts, step: int, experience: Experience, greedy: Sequence[float], kl_coef: float
) -> tuple[Sequence[PolicySample], Sequence[ValueSample], Metrics]:
    """Return the rows of the policy and of the value model (`rows_to_train`), made where the columns of the step are."""
    return parts.context.runtime.apart(
        rows_to_train,
        experience,
        parts.config,
        function=parts.estimator_function,
        turn_weights=parts.turn_weights,
        greedy=greedy,
        kl_coef=kl_coef,
        seed=derive_seed(parts.context.seed, "loss_choice", step),
    )


def update(
    parts: Parts, step: int, policy_rows: Sequence[PolicySample], value_rows: Sequence[ValueSample], kl_coef: float
) -> Metrics:
    """Make `epochs * minibatches` optimizer steps on the rows; return their metrics `averaged`.

    The policy waits for the value model's warm-up; its learning rate is scheduled over the steps that are left, times
    the scale of the guard. Some demonstrations are mixed into each of its updates, if there are any (PPO-ptx).
    Without rows, where every answer of the step was cut off and is masked, there is no update.
    """
    config, context, models, ptx = parts.config, parts.context, parts.models, parts.config.ptx
    policy_objective = replace(parts.objective, kl_coef=kl_coef if isinstance(config.kl, KLAsLoss) else 0.0)
    value_objective = ValueObjective(clip=config.value.clip or None)
    value_rate = scheduled_rate(config.value.optimizer, step, config.steps)
    frozen = config.value.warmup_steps if models.value_model else 0
    history: list[Metrics] = []
    if not policy_rows:
        logger.warning("%s: every answer of step %d was cut off and is masked: no update", context.label, step)
    for epoch in range(config.epochs):
        order = shuffled_indices(len(policy_rows), derive_seed(context.seed, "minibatches", step, epoch))
        count = min(config.minibatches, len(policy_rows))  # fewer rollouts than that where many were invalid
        for i in range(count):
            rows = order[i::count]

            def train_value(rows: Sequence[int] = rows) -> Metrics:
                if models.value_model is None:
                    return {}
                made = models.value_model.forward_backward(chosen(value_rows, rows), value_objective)
                made |= models.value_model.optim_step(learning_rate=value_rate)
                return {f"value/{name}": value for name, value in made.items()}

            def train_policy(
                rows: Sequence[int] = rows, number: int = (step * config.epochs + epoch) * config.minibatches + i
            ) -> Metrics:
                if step < frozen:
                    return {}
                metrics: Metrics = {}
                made = models.policy.forward_backward(chosen(policy_rows, rows), policy_objective)
                if ptx:
                    batch = rows_at(number, parts.demonstrated, count=ptx.batch_size, seed=context.seed)
                    mixed = models.policy.forward_backward(batch, Scaled(SftObjective(pack_to=None), ptx.coef))
                    metrics["ptx/nll"] = mixed["nll"]
                rate = scheduled_rate(config.optimizer, step - frozen, config.steps - frozen)
                made |= models.policy.optim_step(learning_rate=parts.guard.learning_rate_scale * rate)
                return metrics | {f"policy/{name}": value for name, value in made.items()}

            history.append(
                {
                    name: value
                    for made in context.runtime.together(train_value, train_policy)
                    for name, value in made.items()
                }
            )
    check_updated(history, label=context.label, step=step)
    if isinstance(models.reference, MovingReference):
        models.reference.after_step(step + 1, models.policy)
    return averaged(history)


def end_step(
    parts: Parts, step: int, kl: FixedKL | AdaptiveKL, metrics: Metrics, took: Metrics, rollouts: Sequence[Rollout]
) -> tuple[FixedKL | AdaptiveKL, Metrics]:
    """Evaluate, record, and save; return the KL controller and the metrics. The run may stop here, or be rolled back."""
    config, context, models, guard = parts.config, parts.context, parts.models, parts.guard
    valid = len(rollouts) / (config.prompts_per_step * config.samples_per_prompt)
    metrics = metrics | {"kl/coef": kl.coef, "rollout/valid": valid}
    if models.reference:
        kl = kl.updated(metrics["kl/per_sequence"], len(rollouts))
    parts.exports.after_step(step + 1, models.policy)
    metrics |= guard.after_step(step + 1, metrics, models.policy.weights)
    record(parts, step + 1, metrics, took, rollouts)
    kl = rolled_back(parts, kl)
    stop = context.stopping()
    save(parts, step + 1, kl, metrics, stop=stop)
    if stop:
        context.stop()
    guard.decide()
    return kl, metrics


def start_or_resume(parts: Parts) -> tuple[int, FixedKL | AdaptiveKL, Metrics]:
    """Return the first step to make, the KL controller and the last metrics.

    From the newest checkpoint, which is loaded into the models, the scorer, the sampler and the guard; from step 0 if
    there is none.
    """
    config, context, models, guard = parts.config, parts.context, parts.models, parts.guard
    checkpoint = context.checkpoints.to_resume(partial(damage, models))
    if checkpoint is None:
        kl: FixedKL | AdaptiveKL = FixedKL(coef=config.kl.coef)
        if config.kl.target > 0:
            kl = AdaptiveKL(coef=config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
        context.metrics(0, guard.before_training(models.policy.weights))
        save(parts, 0, kl, {}, stop=False)
        return 0, kl, {}
    parts.sampler.load(checkpoint.path / "rollouts", checkpoint.step)
    guard.restore(checkpoint.state)
    guard.decide()
    kl = restored(parts, checkpoint)
    return checkpoint.step, kl, dict(checkpoint.state["metrics"])


def damage(models: Models, folder: Path) -> str:
    """Return which file of a checkpoint is not what was written, or ""."""
    value = models.value_model
    return models.policy.damage(folder / "policy") or (value.damage(folder / "value_model") if value else "")


def restored(parts: Parts, checkpoint: Checkpoint) -> FixedKL | AdaptiveKL:
    """Load a checkpoint into the models, the scorer and the order of prompts; return its KL controller."""
    models, adaptive = parts.models, parts.config.kl.target > 0
    models.policy.load(checkpoint.path / "policy")
    if models.value_model:
        models.value_model.load(checkpoint.path / "value_model")
    if isinstance(models.reference, MovingReference):
        models.reference.load(checkpoint.path)
    models.scorer.restore(checkpoint.state["rewards"])
    if parts.band:
        parts.band.restore(checkpoint.state["band"])
    return (AdaptiveKL if adaptive else FixedKL)(**checkpoint.state["kl"])


def rolled_back(parts: Parts, kl: FixedKL | AdaptiveKL) -> FixedKL | AdaptiveKL:
    """Take the models back to the guard's target, if there is one; return the KL controller to go on with."""
    guard = parts.guard
    if guard.target is None:
        return kl
    kl = restored(parts, guard.target)
    return replace(kl, coef=kl.coef * guard.kl_factor(guard.target))


def save(parts: Parts, step: int, kl: FixedKL | AdaptiveKL, metrics: Metrics, *, stop: bool) -> None:
    """Write a checkpoint when it is due, or when the stage is to stop. The log has the rollouts made since the last one."""
    config, models, guard = parts.config, parts.models, parts.guard
    due = step > 0 and (step % config.checkpoint_every == 0 or step == config.steps)
    if not (due or stop or guard.saves(step)):
        return
    state = {"kl": asdict(kl), "rewards": models.scorer.state(), "metrics": metrics} | guard.state()
    if parts.band:
        state["band"] = parts.band.state()
    with guard.checkpoints.saving(step, state, metric=guard.candidate) as folder:
        parts.sampler.save(folder / "rollouts")
        models.policy.save(folder / "policy")
        if models.value_model:
            models.value_model.save(folder / "value_model")
        if isinstance(models.reference, MovingReference):
            models.reference.save(folder)


def record(parts: Parts, step: int, metrics: Metrics, took: Metrics, rollouts: Sequence[Rollout]) -> None:
    """Log a step's metrics with the seconds that its parts `took`, and every `table_every` steps a table of rollouts."""
    config, context = parts.config, parts.context
    context.metrics(step, metrics | took)
    distance = f"  kl {metrics['kl/per_sequence']:.2f}" if "kl/per_sequence" in metrics else ""
    context.progress(step, config.steps, f"reward {metrics['reward/mean']:.3f}{distance}")
    if step % config.table_every == 0 or step == config.steps:
        rows = [
            [one.prompt.messages[-1].content, one.completion.text, one.reward, len(one.completion.token_ids)]
            for one in rollouts[:16]
        ]
        context.tracker.table(f"samples/step_{step:05d}", ["prompt", "completion", "reward", "tokens"], rows)
