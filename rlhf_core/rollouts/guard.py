"""Guard a run of policy optimization: evaluate, monitor, stop early, roll back to the last checkpoint without alarms, or pause.

Without `[ppo.evaluate]` and `[[ppo.monitors]]` a guard does nothing. A rollback restores the models of an earlier
checkpoint and goes on with the next step and its prompts: steps are counted on, so a run ends after `steps` of them.

Held-out prompts are answered with the same seeds at every evaluation, so that two evaluations differ by the policy alone.
They are scored with the rewards that train (not normalized, with their final weights) and, if there are some, with rewards
that do not.

A run pauses until a person has decided whether it goes on: it saves a checkpoint and ends as waiting. The pause is a part of
that checkpoint, and what was decided one of the report: a run whose answer came at once and one whose answer came a week
later have the same result.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

from rlhf_core.agents.episodes import Episode
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import RewardsConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics, Sampler, Trainer, Weights
from rlhf_core.monitoring.bands import Action, History, MonitorConfig
from rlhf_core.rewards.scoring import Scorer, component_means
from rlhf_core.rollouts.answers import OpenEnvironments, StepSampler, answers
from rlhf_core.schema.base import keyed
from rlhf_core.stage.checkpoints import Checkpoint
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.failures import Counts
from rlhf_core.stage.gate_decisions import GateAnswer, GateDecisions, Question
from rlhf_core.types import Generation, Prompt, Rollout, chunks, derive_seed

# ---------------------------------------------------------------- held out


@dataclass(frozen=True)
class Measured:
    """The metrics of an evaluation, and by the name of a mean the scores of each prompt, NaN where there is none."""

    metrics: Metrics
    samples: dict[str, tuple[float, ...]]


class HeldOut:
    """The held-out prompts with the engines that answer and score them; `measure` is called by who has the sampler."""

    def __init__(
        self,
        config: HeldOutConfig,
        prompts: Sequence[Prompt],
        *,
        engine: Sampler,
        chat: ChatTemplate,
        sampling: SamplingConfig,
        seed: int,
        environments: OpenEnvironments,
        scorer: Scorer,
        independent: Scorer | None,
        note_failed: Callable[[int, Counts], None],
    ) -> None:
        self.config = config
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._environments = environments
        self._scorer = scorer
        self._independent = independent
        self._note_failed = note_failed
        chat_of = environments.templates(chat)
        self._work = [
            Episode(
                prompt, chat_of(prompt).prompt_ids(prompt.messages), derive_seed(seed, "held-out", prompt.id, number)
            )
            for prompt in prompts
            for number in range(config.samples)
        ]

    def sample(self) -> list[Generation]:
        """Return the answers of the policy that the engine holds, those to a prompt together."""
        drawn = answers(self._engine, self._chat, self._work, self._sampling, self._environments)
        return [Generation(one.prompt, ids, made) for one, (ids, made) in zip(self._work, drawn, strict=True)]

    def score(self, step: int, generations: Sequence[Generation]) -> Measured:
        """Return the figures of the answers: `eval/reward/*`, `eval/independent/*`, length, truncation, diversity."""
        made = [one.completion for one in generations]
        metrics = {
            "eval/length": fmean(completion.action_mask.count(1) for completion in made),
            "eval/truncated": fmean(completion.finish_reason == "length" for completion in made),
            "eval/unique": len({completion.text for completion in made}) / len(made),
        }
        samples = {}
        failed: dict[str, tuple[int, int]] = {}
        scorers = {"reward": self._scorer} | ({"independent": self._independent} if self._independent else {})
        for name, scorer in scorers.items():
            scorer.at_step(2**31)  # with the final weights of the terms, so that two evaluations can be compared
            rollouts = scorer(generations)
            values = self._by_prompt(rollouts)
            samples[f"eval/{name}/mean"] = values
            metrics |= _summary(f"eval/{name}", values)
            metrics |= _components(name, component_means(rollouts))
            failed |= _counts(name, scorer.failed())
        self._note_failed(-1 - step, failed)  # a number of its own: the training of the step has counts, too
        return Measured(metrics, samples)

    def _by_prompt(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        groups = chunks(rollouts, self.config.samples)
        return tuple(_mean([one.reward for one in group if not one.invalid]) for group in groups)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _summary(name: str, values: Sequence[float]) -> Metrics:
    """Return the mean over the prompts that have a score and its standard error; NaN if none has."""
    scored = [value for value in values if not math.isnan(value)]
    error = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
    return {f"{name}/mean": _mean(scored), f"{name}/stderr": error}


def _components(name: str, means: Metrics) -> Metrics:
    """Return the means of terms; rewards that train and independent ones may have terms of one name."""
    return {f"eval/{name}_component/{key.removeprefix('reward_component/')}": mean for key, mean in means.items()}


def _counts(name: str, failed: Counts) -> dict[str, tuple[int, int]]:
    """Return the failures by path in the configuration; independent rewards are not below `rewards`.

    Both score the same episodes, so those that failed are counted once.
    """
    if name == "reward":
        return dict(failed)
    terms = {path: count for path, count in failed.items() if path.startswith("rewards.")}
    return {f"evaluate.independent.{path.removeprefix('rewards.')}": count for path, count in terms.items()}


# ---------------------------------------------------------------- best


@dataclass(frozen=True)
class Best:
    """The best value so far, its step (-1 before the first), and the number of evaluations since.

    >>> Best().after(0, 1.5).after(10, 2.0).after(20, 1.9)
    Best(value=2.0, step=10, since=1)
    """

    value: float = -math.inf
    step: int = -1
    since: int = 0

    def after(self, step: int, value: float) -> Self:
        """Return the best after another evaluation; a value that is not a number is no better than any other."""
        if value > self.value:
            return replace(self, value=value, step=step, since=0)
        return replace(self, since=self.since + 1)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        return asdict(self) | {"value": self.value if self.step >= 0 else None}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        return cls(since=state["since"]) if state["step"] < 0 else cls(**state)


# ---------------------------------------------------------------- watch


@dataclass(frozen=True)
class Alarm:
    """Finding of a monitor at a step, and its action; `text` is "rollout/length 3.1 < 6 for 3 steps"."""

    step: int
    monitor: str
    action: Action
    text: str
    learning_rate_factor: float = 1.0
    kl_coef_factor: float = 1.0


class Watch:
    """The monitors of a run with the history that they read; `state` and `restore` are for checkpoints.

    >>> from rlhf_core.monitoring.bands import Band
    >>> watch = Watch([Band(metric="rollout/length", low=6.0, for_steps=2, action="stop")], looks=0)
    >>> watch.observe(1, {"rollout/length": 3.1}), watch.observe(2, {"rollout/length": 3.1})[0].text
    ([], 'rollout/length 3.1 < 6 for 2 steps')
    """

    def __init__(self, monitors: Sequence[MonitorConfig], *, looks: int) -> None:
        self._monitors = {monitor.label: monitor for monitor in monitors}
        self._looks = looks
        self._history = History(dict.fromkeys(name for monitor in monitors for name in monitor.reads()))
        self._streaks = dict.fromkeys(self._monitors, 0)
        self._rollbacks = dict.fromkeys(self._monitors, 0)
        self._accepted: set[str] = set()
        """Monitors whose alarm a person has accepted until it clears."""

    @property
    def quiet(self) -> bool:
        """Return whether no acting monitor has an unaccepted alarm at the last step."""
        acting = [name for name, one in self._monitors.items() if one.action != "warn" and name not in self._accepted]
        return not any(self._streaks[name] for name in acting)

    def observe(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, Sequence[float]] | None = None
    ) -> list[Alarm]:
        """Return the alarms of a step, the most severe first; `samples` are the scores of each held-out prompt."""
        self._history.add(step, metrics)
        if samples:
            self._history.add_samples(step, samples)
        alarms = []
        for name, monitor in self._monitors.items():
            if step <= monitor.after or not any(read in metrics for read in monitor.reads()):
                continue
            found = monitor.check(self._history, looks=self._looks)
            self._streaks[name] = self._streaks[name] + 1 if found else 0
            if not found:
                self._accepted.discard(name)
            if self._streaks[name] == monitor.for_steps:
                alarms.append(self._alarm(step, monitor, found))
        severity = ("stop", "rollback", "pause", "warn")
        return sorted(alarms, key=lambda alarm: severity.index(alarm.action))

    def complaints(self) -> dict[str, float]:
        """Return `monitor/<name>`: for how many steps in a row each monitor has had a complaint."""
        return {f"monitor/{name}": float(streak) for name, streak in self._streaks.items()}

    def accept(self, monitor: str) -> None:
        """Accept a monitor's alarm, as a person decided; it is not raised again until it clears."""
        self._accepted.add(monitor)

    def rolled_back(self, alarm: Alarm, *, to: int) -> None:
        """Drop the history after step `to`, and count the rollback."""
        self._history.forget_after(to)
        self._streaks = dict.fromkeys(self._streaks, 0)
        self._accepted.clear()
        self._rollbacks[alarm.monitor] += 1

    def missing(self) -> list[str]:
        """Return the metrics of monitors that no step had so far."""
        return self._history.missing()

    def check_metrics(self, logged: Iterable[str], *, only: str = "", later: Sequence[str] = ()) -> None:
        """Raise ConfigError if a monitor reads a metric that steps do not have.

        Looks at names that begin with `only`; `later` are prefixes of metrics that come later.
        """
        for number, monitor in enumerate(self._monitors.values()):
            for name in monitor.reads():
                if name.startswith(only) and name not in logged and not name.startswith(tuple(later)):
                    known = ", ".join(sorted(one for one in logged if not one.startswith(("time/", "monitor/"))))
                    rule = "no step of this run has such a metric, so the monitor would never find anything"
                    raise ConfigError(f"ppo.monitors[{number}].metric", name, rule, f"choose one of {known}")

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        kept = {"history": self._history.state(), "streaks": self._streaks, "rollbacks": self._rollbacks}
        return kept | ({"accepted": sorted(self._accepted)} if self._accepted else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history.restore(state["history"])
        self._streaks, self._rollbacks = dict(state["streaks"]), dict(state["rollbacks"])
        self._accepted = set(state["accepted"]) if "accepted" in state else set()

    def _alarm(self, step: int, monitor: MonitorConfig, found: str) -> Alarm:
        name, streak = monitor.label, self._streaks[monitor.label]
        text = f"{found} for {streak} {monitor.unit}{'s' * (streak > 1)}"
        if monitor.action != "rollback":
            return Alarm(step, name, monitor.action, text)
        if self._rollbacks[name] >= monitor.max_rollbacks:
            return Alarm(step, name, "stop", f"{text}, after {self._rollbacks[name]} rollbacks")
        return Alarm(step, name, "rollback", text, monitor.learning_rate_factor, monitor.kl_coef_factor)


def plain(alarm: Alarm) -> dict[str, Any]:
    """Return an alarm for JSON."""
    return asdict(alarm)


# ---------------------------------------------------------------- Pause a run of policy optimization until a person has decided whether it goes on

PAUSED = "paused"


@dataclass(frozen=True)
class Pause:
    """The alarms of a step at which a person has to decide; their monitors are named by the first."""

    alarms: tuple[Alarm, ...]

    @property
    def text(self) -> str:
        """Return the finding."""
        return "; ".join(f"monitor {one.monitor}: {one.text} at step {one.step}" for one in self.alarms)

    def question(self, context: StageContext) -> Question:
        """Return the question: may the computation of this key continue after the finding at this step?"""
        condition = {"after": context.label, "step": self.alarms[0].step, "found": self.text}
        return Question(gate=self.alarms[0].monitor, condition=condition, digest=context.key, found=self.text)

    def answer(self, context: StageContext) -> GateAnswer:
        """Return the decision; raise StageWaiting, with the question as its condition, if there is none."""
        question = self.question(context)
        request = GateDecisions(context.store.shared).find(question.id)
        if request is None or request.answer is None:
            context.checkpoints.settle()  # before the engines are released, because they may still be writing
            context.wait(
                f"{self.text}: paused, approve to go on, reject to end with the best checkpoint", asking(question)
            )
        return request.answer

    def state(self) -> list[dict[str, Any]]:
        """Return the state for a checkpoint (JSON)."""
        return [plain(alarm) for alarm in self.alarms]

    @classmethod
    def restored(cls, state: Sequence[Mapping[str, Any]]) -> Self:
        return cls(tuple(Alarm(**alarm) for alarm in state))


def asking(question: Question) -> dict[str, Any]:
    """Return the condition under which a stage waits for the answer to a question."""
    return {"question": question.model_dump()}


def await_decision(context: StageContext) -> None:
    """Raise StageWaiting before leasing engines if the newest checkpoint pauses and the decision is missing."""
    newest = context.checkpoints.latest()
    if newest is not None and "guard" in newest.state and PAUSED in newest.state["guard"]:
        Pause.restored(newest.state["guard"][PAUSED]).answer(context)


# ---------------------------------------------------------------- guard

logger = logging.getLogger(__name__)

REPORT = "monitors.json"
NOTHING = Measured({}, {})


class RunGuard:
    """Evaluates and watches one run; `state` and `restore` are for checkpoints.

    >>> for step in guard.steps(first):                                            # doctest: +SKIP
    ...     metrics |= guard.after_step(step + 1, metrics, policy.weights)
    """

    def __init__(
        self,
        context: StageContext,
        sampler: StepSampler,
        held_out: HeldOut | None,
        monitors: Sequence[MonitorConfig],
        *,
        steps: int,
        first_update: int,
        rewards: RewardsConfig,
    ) -> None:
        """Guard a run of `steps` steps on `rewards`, whose first update of the policy is in step `first_update`, from 1."""
        self._context = context
        self._sampler = sampler
        self._held_out = held_out
        self._evaluate = held_out.config if held_out else None
        self._monitors = monitors
        self._steps = steps
        self._first_update = first_update
        self._rewards = rewards
        self._watch = Watch(monitors, looks=1 + math.ceil(steps / self._evaluate.every) if self._evaluate else 0)
        self.acts = held_out is not None
        """Whether the guard may roll back, so that the best checkpoint without alarms is kept besides the newest."""
        self.checkpoints = context.checkpoints.keeping(best=1) if self.acts else context.checkpoints
        self.target: Checkpoint | None = None
        """The checkpoint that the last step is to be rolled back to."""
        self.candidate: float | None = None
        """The metric of the checkpoint after the last step; None if nothing may return to it."""
        self._best = Best()
        self._rates = {"learning_rate": 1.0, "kl_coef": 1.0}
        self._pause: Pause | None = None
        self._ended: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []

    # ------------------------------------------------------------ the loop of the stage

    @property
    def learning_rate_scale(self) -> float:
        """Return the product of the factors of all rollbacks."""
        return self._rates["learning_rate"]

    def steps(self, first: int) -> Iterator[int]:
        """Yield the steps from `first` on, until the run ends."""
        for step in range(first, self._steps):
            if self._ended:
                return
            yield step

    def before_training(self, weights: Callable[[], Weights]) -> Metrics:
        """Return the evaluation of the policy before any update; {} if nothing is evaluated.

        Raises ConfigError for a monitor of what evaluations do not have.
        """
        if self._idle:
            return {}
        measured = self._measure(0, weights)
        self._watch.check_metrics({*measured.metrics, *self._components()}, only="eval/")
        self._judge(0, measured.metrics)
        self._watch.observe(0, measured.metrics, measured.samples)
        return measured.metrics

    def after_step(self, step: int, metrics: Metrics, weights: Callable[[], Weights]) -> Metrics:
        """Evaluate if due, run the monitors and act on them; return the added metrics of the step.

        Afterwards `target` is the step to roll back to, and `steps` ends if the run does.
        """
        self.target = None
        if self._idle:
            return {}
        every = self._evaluate.every if self._evaluate else 0
        due = every and (step % every == 0 or step == self._steps)
        measured = self._measure(step, weights) if due else NOTHING
        if step == self._first_update:
            # Where every answer was cut off and is masked, the step has no update.
            not_updated = () if "policy/loss" in metrics else ("policy/", "value/")
            self._watch.check_metrics(metrics, later=("eval/", "reward_extra/", *not_updated))
        alarms = self._watch.observe(step, metrics | measured.metrics, measured.samples)
        complaints = self._watch.complaints()
        self._judge(step, measured.metrics)
        for alarm in alarms:
            if alarm.action == "warn":
                self._note(alarm, "warned")
        acting = [alarm for alarm in alarms if alarm.action != "warn"]
        if acting:
            self._act(acting)
        elif due and self._evaluate and 0 < self._evaluate.patience <= self._best.since:
            text = f"no better {self._evaluate.best_by} since step {self._best.step}"
            self._end(step, text, export=self._evaluate.export)
        return measured.metrics | complaints

    def saves(self, step: int) -> bool:
        """Return whether the step requires a checkpoint: after a new best, a rollback, a pause or the end."""
        new_best = self.candidate is not None
        return (
            bool(self._ended)
            or self._pause is not None
            or self.target is not None
            or new_best
            or (step == 0 and self.acts)
        )

    def decide(self) -> None:
        """Continue or end as decided about a pause; raise StageWaiting without a decision.

        Call it when the checkpoint of the step is written. Who decided, when and why is in the tags and not in the
        report, whose content must not depend on it.
        """
        if self._pause is None:
            return
        pause, answer = self._pause, self._pause.answer(self._context)
        self._pause = None
        best = self.checkpoints.best()
        ends = answer.answer == "reject"
        where = f", step {best.step} is the result" if best else ""
        done = f"rejected: stopped{where}" if ends else "approved: goes on"
        for alarm in pause.alarms:
            self._note(alarm, f"paused, {done}", said=f" ({answer})")
            self._watch.accept(alarm.monitor)
        if ends:
            self._end(pause.alarms[0].step, f"monitor {pause.alarms[0].monitor}", export="best")

    def kl_factor(self, checkpoint: Checkpoint) -> float:
        """Return the factor of the KL coefficient in a checkpoint to which the run was rolled back."""
        return float(self._rates["kl_coef"] / checkpoint.state["guard"]["rates"]["kl_coef"])

    def export(self, policy: Trainer) -> Metrics:
        """Export the chosen weights, with the report of the monitors; return the final metrics of the guard."""
        folder, done = self._context.out, self._ended["step"] if self._ended else self._steps
        if self._idle:
            policy.export(folder)
            return {"steps": float(done)}
        for name in self._watch.missing():
            logger.warning(
                "%s: no step had the metric %s, so its monitor never found anything", self._context.label, name
            )
        export = self._ended["export"] if self._ended else self._evaluate.export if self._evaluate else "last"
        chosen = self.checkpoints.best() if export == "best" else None
        if chosen is not None:
            policy.load(chosen.path / "policy")
        policy.export(folder)
        exported = chosen.step if chosen else done
        self._write_report(folder / REPORT, exported)
        counts = {"alarms": float(len(self._events)), "stopped_early": float(bool(self._ended))}
        return {"steps": float(done), "exported_step": float(exported)} | counts

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON); {} for a guard that does nothing."""
        if self._idle:
            return {}
        return {
            "guard": {
                "watch": self._watch.state(),
                "best": self._best.state(),
                "rates": self._rates,
                "ended": self._ended,
                "events": self._events,
                "evaluations": self._evaluations,
            }
            | ({PAUSED: self._pause.state()} if self._pause else {})
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._idle:
            return
        kept = state["guard"]
        self._watch.restore(kept["watch"])
        self._best = Best.restored(kept["best"])
        self._rates, self._ended = dict(kept["rates"]), dict(kept["ended"])
        self._events, self._evaluations = list(kept["events"]), list(kept["evaluations"])
        self._pause = Pause.restored(kept[PAUSED]) if PAUSED in kept else None

    # ------------------------------------------------------------ private

    @property
    def _idle(self) -> bool:
        return self._evaluate is None and not self._monitors

    def _measure(self, step: int, weights: Callable[[], Weights]) -> Measured:
        if self._held_out is None:
            return NOTHING
        generations = self._sampler.borrow(weights, version=step, job=self._held_out.sample)
        measured = self._held_out.score(step, generations)
        self._evaluations.append({"step": step} | measured.metrics)
        return measured

    def _components(self) -> list[str]:
        """Return the metrics of terms, which an evaluation has only if they apply to one of its answers."""
        evaluate = self._evaluate
        scored = {"reward": self._rewards, "independent": evaluate.independent if evaluate else None}
        return [
            f"eval/{name}_component/{term}"
            for name, rewards in scored.items()
            if rewards
            for term in [
                *rewards.terms,
                *["truncated"] * bool(rewards.truncated),
                *["overlong"] * bool(rewards.overlong),
            ]
        ]

    def _judge(self, step: int, metrics: Metrics) -> None:
        """Set `candidate` to the value of a new best evaluation, if no monitor objects; else to None."""
        self.candidate = None
        if self._evaluate is None or not metrics:
            return
        name = self._evaluate.best_by
        if name not in metrics:
            rule = f"evaluations have no such metric, but {', '.join(sorted(metrics))}"
            raise ConfigError("ppo.evaluate.metric", name, rule, "choose one of these")
        after = self._best.after(step, metrics[name] if self._watch.quiet else math.nan)
        self.candidate = after.value if after.step == step else None
        self._best = after

    def _act(self, alarms: list[Alarm]) -> None:
        alarm = alarms[0]  # the most severe
        if alarm.action == "pause":
            self._pause = Pause(tuple(alarms))
            return
        target = self.checkpoints.best()
        last = alarm.step == self._steps
        if alarm.action == "stop" or last or target is None:
            where = f", step {target.step} is the result" if target else ""
            self._note(alarm, f"stopped{where}")
            self._end(alarm.step, f"monitor {alarm.monitor}", export="best")
            return
        self.target = target
        self._rates = {
            "learning_rate": self._rates["learning_rate"] * alarm.learning_rate_factor,
            "kl_coef": self._rates["kl_coef"] * alarm.kl_coef_factor,
        }
        self._watch.rolled_back(alarm, to=target.step)
        self._best = replace(self._best, since=0)
        factors = {"learning rate": alarm.learning_rate_factor, "KL coefficient": alarm.kl_coef_factor}
        changed = "".join(f", {name} x{factor:g}" for name, factor in factors.items() if factor != 1)
        self._note(alarm, f"rolled back to step {target.step}{changed}")

    def _end(self, step: int, why: str, *, export: str) -> None:
        self._ended = {"step": step, "why": why, "export": export}
        logger.warning("%s: ends at step %d of %d: %s", self._context.label, step, self._steps, why)

    def _note(self, alarm: Alarm, done: str, *, said: str = "") -> None:
        text = f"monitor {alarm.monitor}: {alarm.text} at step {alarm.step}: {done}"
        logger.warning("%s: %s", self._context.label, text)
        self._events.append(plain(alarm) | {"done": done, "message": text})
        rows = [[event["step"], event["monitor"], event["message"]] for event in self._events]
        self._context.tracker.table("monitors", ["step", "monitor", "message"], rows)
        self._context.tracker.set_tags({f"monitor.{alarm.monitor}": text + said})

    def _write_report(self, file: Path, exported: int) -> None:
        report = {
            "exported_step": exported,
            "ended": self._ended,
            "events": self._events,
            "evaluations": self._evaluations,
            "monitors": [keyed(monitor) for monitor in self._monitors],
        }
        file.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        self._context.tracker.file(file, "")
