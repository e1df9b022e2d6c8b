"""Configure rewards: named terms, how they are combined, and how the result is shaped."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.base import (
    FAILURES,
    OPERATIONAL,
    Config,
    FunctionName,
    HttpAddress,
    RenamedConfig,
    Seconds,
    added_option,
)
from rlhf_core.schema.secrets import HOLDS_SECRETS

# ---------------------------------------------------------------- terms

OnFailure = Literal["fail", "invalid"]
"""Treatment of a generation without a reward: it ends the stage or becomes an invalid rollout; it never scores 0."""


Compares = Literal["nothing", "group", "batch"]
"""Answers that a value is relative to: nothing; `group`, the other answers to its prompt, which form one call;
`batch`, all answers scored together (a step of `ppo`, a shard of `score`), which form one call. So a value never
depends on the number of workers or the batch size."""


class Term(RenamedConfig):
    """The weight and scale of a reward term. Its values are normalized, then clipped, then weighted."""

    weight: float = 1.0
    """Weight of the term in the reward."""
    weight_end: float | None = None
    """Weight from step `weight_steps` of policy optimization on; until then the weight changes linearly."""
    weight_steps: int = Field(0, ge=0)
    """Steps over which the weight changes to `weight_end`."""
    normalize: Literal["none", "running", "group"] = "none"
    """Normalization of the values: `running` uses all values of this term so far, `group` the values of the same
    prompt. It subtracts the mean and divides by the standard deviation; equal values become 0."""
    clip: float = Field(0.0, ge=0)
    """Bound to which absolute values are clipped; 0 does not clip."""
    sources: tuple[str, ...] = added_option(())
    """Sources of the prompts to which the term applies; empty for all. To other prompts it adds nothing, not 0."""

    @model_validator(mode="after")
    def _check_weight_schedule(self) -> Self:
        if (self.weight_end is None) != (self.weight_steps == 0):
            raise ValueError(
                f"weight_steps = {self.weight_steps}: a schedule has weight_end and weight_steps >= 1; give both or none"
            )
        return self


class RewardModelReward(Term):
    """The score of a trained reward model."""

    type: Literal["reward_model"] = "reward_model"
    model: str = "reward_model"
    """Name of the reward model among the inputs of the stage."""


class ProcessRewardModelReward(Term):
    """The step probabilities of a trained process reward model, reduced to one score per answer."""

    type: Literal["process_reward_model"] = "process_reward_model"
    model: str = "process_reward_model"
    """Name of the process reward model among the inputs of the stage."""
    reduce: Literal["model", "min", "mean", "last", "product"] = "model"
    """Reduction of the step probabilities to one score; `model` uses the reduction that the model was trained for."""


class EnsembleReward(Term):
    """One score from several reward models, so that no single one is exploited (arXiv 2310.02743)."""

    type: Literal["ensemble"] = "ensemble"
    models: tuple[str, ...] = Field(min_length=2)
    """Names of reward models among the inputs of the stage."""
    reduce: Literal["mean", "min", "mean_minus_std"] = "mean"
    """Reduction of the models' scores to one."""
    k: float = Field(1.0, ge=0)
    """Number of standard deviations that `mean_minus_std` subtracts."""


class EpisodeReward(Term):
    """The environment's reward, summed over an episode's spans. It does not apply to a completion without spans."""

    type: Literal["episode"] = "episode"


FunctionProtocol = Literal["auto", "generations", "columns", "openrlhf", "trl", "trl_text", "trl_messages"]


class FunctionReward(Term):
    """A Python function of answers, run in its own processes; `rlhf_core.rewards.protocols` lists the allowed forms."""

    type: Literal["function"] = "function"
    function: FunctionName
    """Function as `package.module:function` or `path/to/file.py:function`."""
    arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}
    """Keyword arguments of the function. Write secrets as `"env:NAME"`: the function gets the value of that environment
    variable."""
    protocol: FunctionProtocol = "auto"
    """Calling convention of the function; `auto` infers it from the names of its parameters."""
    compares: Compares = "nothing"
    """Answers that a value is relative to: `group`, the other answers to its prompt, which then form one call;
    `batch`, all answers of a step (`ppo`) or shard (`score`), which then form one call."""
    timeout_s: Annotated[Seconds, FAILURES] = 60.0
    """Deadline, in seconds, of one batch; the process is killed after it."""
    batch_size: Annotated[int, Field(ge=0), FAILURES] = 0
    """Number of generations per call; 0 divides all of them among the workers, one call each."""
    workers: Annotated[int, Field(ge=1), FAILURES] = 1
    """Number of processes that run the function."""
    memory_mb: Annotated[int, Field(ge=0), FAILURES] = 0
    """Memory limit of one process, in MB; 0 shares half of the machine's memory among the workers."""
    retries: Annotated[int, Field(ge=0), FAILURES] = 0
    """Number of retries of a batch that raised, died or was late, after 0.5 s, 1 s, 2 s ..."""
    on_failure: Annotated[OnFailure, FAILURES] = "fail"
    """Treatment of answers for which the function fails: `fail` ends the run, `invalid` leaves them out with their
    group."""
    cache: Annotated[bool, OPERATIONAL] = False
    """Whether values are cached by content. Only for a function that gives the same answer the same value in any batch:
    not for one that is random or compares answers."""

    @model_validator(mode="after")
    def _check_batches_of_comparisons(self) -> Self:
        _check_cache(self.compares, cache=self.cache)
        if self.compares != "nothing" and self.batch_size:
            raise ValueError(f'batch_size = {self.batch_size}: compares = "{self.compares}" decides it; remove it')
        if self.compares == "batch" and self.workers > 1:
            raise ValueError(f'workers = {self.workers}: with compares = "batch" there is only one call; remove it')
        return self


class RemoteReward(Term):
    """Rewards from a server with OpenRLHF's `/get_reward` contract."""

    type: Literal["remote"] = "remote"
    urls: Annotated[tuple[HttpAddress, ...], Field(min_length=1), FAILURES, HOLDS_SECRETS]
    """Addresses of the server; several share the work. They are not part of the stage's key, `version` is. Write a
    secret in an address as `${env:NAME}`."""
    version: str = ""
    """Version of the reward, part of the stage's key: change it when the server scores differently."""
    compares: Literal["nothing", "group"] = "nothing"
    """Answers that a value is relative to: `group`, the other answers to its prompt, which then form one request."""
    timeout_s: Annotated[Seconds, FAILURES] = 180.0
    """Deadline, in seconds, of one request."""
    retries: Annotated[int, Field(ge=0), FAILURES] = 4
    """Number of retries of a failed request."""
    batch_size: Annotated[int, Field(ge=1), FAILURES] = 64
    """Number of answers per request."""
    token_env: Annotated[str, FAILURES, HOLDS_SECRETS] = ""
    """Environment variable with the bearer token; empty sends none."""
    on_failure: Annotated[OnFailure, FAILURES] = "fail"
    """Treatment of answers for which the server fails: `fail` ends the run, `invalid` leaves them out with their
    group."""
    cache: Annotated[bool, OPERATIONAL] = False
    """Whether values are cached by content."""

    @model_validator(mode="after")
    def _check_batches_of_comparisons(self) -> Self:
        _check_cache(self.compares, cache=self.cache)
        return self


class PatternVerdict(Config):
    """The score is the first group of the last match of `pattern` in the judge's answer."""

    type: Literal["pattern"] = "pattern"
    pattern: str = r"(?i)score[\s*_]*[:=][\s*_]*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group for the score; the default also matches a bold score: `**Score:** 8`."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"must be a regular expression ({error}); fix it") from error
        if groups != 1:
            raise ValueError(f"must have one group, not {groups}; put it around the score")
        return pattern


class JsonVerdict(Config):
    """The score is a field of the last JSON object in the judge's answer."""

    type: Literal["json"] = "json"
    field: str = "score"
    """Field of the judge's JSON that holds the score."""


class ChatServer(Config):
    """A language model at an OpenAI-compatible chat endpoint."""

    url: Annotated[HttpAddress, FAILURES, HOLDS_SECRETS]
    """Address of the server without `/chat/completions`, usually `http://host:port/v1`. Write a secret in it as
    `${env:NAME}`."""
    model: str
    """Name of the model on the server."""
    version: str = ""
    """Version of the model, part of the stage's key: change it when another one answers under the same name."""
    max_tokens: int = Field(512, ge=1)
    """Maximum number of tokens of a reply."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature."""
    concurrency: Annotated[int, Field(ge=1), FAILURES] = 16
    """Number of concurrent requests."""
    timeout_s: Annotated[Seconds, FAILURES] = 120.0
    """Deadline, in seconds, of one request."""
    retries: Annotated[int, Field(ge=0), FAILURES] = 4
    """Number of retries of a request after a fault of the network or the server."""
    token_env: Annotated[str, FAILURES, HOLDS_SECRETS] = ""
    """Environment variable with the bearer token (API key); empty sends none."""


class JudgedTerm(Term):
    """A question about each answer, which a language model judges, with a rubric of the prompt or without one."""

    template: str
    """Text of the question. `{prompt}`, `{completion}` and `{label}` are filled in, with a `rubric_column` also `{rubric}` and
    `{criterion}`, and where a judge compares answers `{answers}` in place of `{completion}`; other braces stay."""
    rubric_column: str = added_option("")
    """Field of the prompt's label that holds its rubric: a text, or a list of criteria, each a text or
    `{criterion = ..., weight = ...}`. A template with `{rubric}` shows all of it. A template with `{criterion}` is
    asked once for each criterion, and the reward is sum(w * s) / sum(w > 0), with s the score from 0 (lowest) to 1
    (highest); a fault has a negative weight."""
    on_failure: Annotated[OnFailure, FAILURES] = "fail"
    """Treatment of answers for which the judge fails: `fail` ends the run, `invalid` leaves them out with their
    group."""

    @property
    def by_criterion(self) -> bool:
        """Whether each criterion of the rubric gets a separate question."""
        return "{criterion}" in self.template

    @property
    def answers_place(self) -> str:
        """The placeholder of the judged text."""
        return "{completion}"

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.answers_place not in self.template:
            raise ValueError(f"template: must hold {self.answers_place}, or every answer gets the same score; add it")
        shown = "{rubric}" in self.template or self.by_criterion
        if shown and not self.rubric_column:
            raise ValueError("template: shows a rubric, and no column holds one; set rubric_column")
        if self.rubric_column and not shown:
            key = f"rubric_column = {self.rubric_column!r}"
            raise ValueError(f"{key}: the template does not show it; put {{rubric}} or {{criterion}} into template")
        return self


class GenerativeReward(JudgedTerm):
    """The verdict of a policy as judge: a generative reward model (arXiv 2408.15240), from the graph or an earlier run.

    Nothing is sampled: the reward is sum(p * value) / sum(p), with p the probability of each reply in `verdicts`. So
    every answer gets a verdict, even if the policy would reply something else.
    """

    type: Literal["generative_reward_model"] = "generative_reward_model"
    model: str
    """Name of the policy among the reward models of the stage: the name of a step's policy, or `store:DIGEST`."""
    verdicts: dict[str, float] = Field({"Yes": 1.0, "No": 0.0}, min_length=2)
    """Values of the replies; a reply counts with its end-of-turn token."""

    @property
    def low(self) -> float:
        """The lowest value of a verdict."""
        return min(self.verdicts.values())

    @property
    def high(self) -> float:
        """The highest value of a verdict."""
        return max(self.verdicts.values())

    @model_validator(mode="after")
    def _check_verdicts(self) -> Self:
        if not all(text.strip() for text in self.verdicts) or not self.low < self.high < math.inf:
            rule = "must be texts with different, finite values"
            raise ValueError(f"verdicts = {self.verdicts}: {rule}; give {{Yes = 1.0, No = 0.0}}")
        return self


class JudgeReward(JudgedTerm, ChatServer):
    """The score that a language model gives as a judge, through an OpenAI-compatible chat endpoint."""

    type: Literal["judge"] = "judge"
    compares: Literal["nothing", "group"] = added_option("nothing")
    """Answers that a score is relative to: `group`, all answers to the prompt, which the judge then sees in one
    question and scores in one reply. Answers of failed episodes are not shown; if only one answer remains, it is scored
    alone."""
    orders: int = added_option(2, ge=1)
    """Number of times that a group is shown, each in another order; a score is the mean over them. The second order is the
    first one reversed, so that a preference for early or late places cancels."""
    verdict: Annotated[PatternVerdict | JsonVerdict, Field(discriminator="type")] = PatternVerdict()
    """Pattern or field with the score in the judge's answer. If answers are compared, it holds the list of their
    scores, in the order shown."""
    low: float = 0.0
    """Lowest accepted score."""
    high: float = 10.0
    """Highest accepted score; a score outside `low` to `high` is a failure. Scores are not scaled, except scores of a
    `{criterion}`."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    corrections: Annotated[int, Field(ge=0), FAILURES] = 2
    """Number of times that a reply without a score is answered with a request for one; after them it is a failure."""
    cache: Annotated[bool, OPERATIONAL] = False
    """Whether values are cached by content."""

    @property
    def answers_place(self) -> str:
        """The placeholder of the judged text."""
        return "{answers}" if self.compares == "group" else "{completion}"

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low}: must be below high = {self.high}; swap them")
        return self

    @model_validator(mode="after")
    def _check_comparison(self) -> Self:
        _check_cache(self.compares, cache=self.cache)
        if self.compares == "nothing":
            if self.orders != 2:
                raise ValueError(
                    f'orders = {self.orders}: one answer has no order; remove it, or set compares = "group"'
                )
            return self
        if self.by_criterion:
            raise ValueError('template: {criterion} is for one answer; with compares = "group" show {rubric}')
        if self.verdict == PatternVerdict():
            remedy = 'set verdict = {type = "json", field = "scores"}, or a pattern whose group holds the list'
            raise ValueError(f'verdict: reads one score, and compares = "group" needs one for each answer; {remedy}')
        return self


RewardSpec = Annotated[
    RewardModelReward
    | ProcessRewardModelReward
    | EnsembleReward
    | EpisodeReward
    | FunctionReward
    | RemoteReward
    | JudgeReward
    | GenerativeReward,
    Field(discriminator="type"),
]


def models_of(term: Term) -> list[tuple[str, str]]:
    """The key and the name of each model that a term needs among the inputs of the stage.

    >>> models_of(EnsembleReward(models=("one", "two")))
    [('models[0]', 'one'), ('models[1]', 'two')]
    """
    match term:
        case RewardModelReward() | ProcessRewardModelReward() | GenerativeReward():
            return [("model", term.model)]
        case EnsembleReward():
            return [(f"models[{index}]", model) for index, model in enumerate(term.models)]
        case _:
            return []


# ---------------------------------------------------------------- composition and shaping


class WeightedSum(Config):
    """The sum of weight * term."""

    type: Literal["weighted_sum"] = "weighted_sum"


class GatedProduct(Config):
    """The weighted sum of the other terms, multiplied by gates in [0, 1]: g * sum + (1 - g) * closed."""

    type: Literal["gated_product"] = "gated_product"
    gates: tuple[str, ...] = Field(min_length=1)
    """Names of the terms whose product is g; their weights are not used."""
    closed: float = 0.0
    """Reward of a closed gate. It must be below every reward of an open gate, or failing the gate pays off."""


class Gdpo(Config):
    """The weighted sum of terms, each first normalized within the answers to a prompt (arXiv 2601.05242).

    So a term on a large scale does not drown out the others. The paper then normalizes over the batch: use the
    advantage `reinforce++-baseline`, not `grpo`, which would divide by the spread of the sum again.
    """

    type: Literal["gdpo"] = "gdpo"


Composition = Annotated[WeightedSum | GatedProduct | Gdpo, Field(discriminator="type")]


class OverlongPenalty(Config):
    """DAPO's soft penalty for answers close to the length limit (arXiv 2503.14476 eq. 13)."""

    max_tokens: int = Field(ge=1)
    """Length limit in tokens; answers of this length lose `factor`."""
    buffer_tokens: int = Field(ge=1)
    """Number of tokens before the limit over which the penalty grows linearly."""
    factor: float = Field(1.0, gt=0)
    """Largest penalty."""

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongPenalty:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens = {self.buffer_tokens}: must be <= max_tokens = {self.max_tokens}; lower it"
            )
        return self


class TruncatedReward(Config):
    """Reward of truncated answers; the change is the component `truncated`."""

    type: Literal["scale", "penalty", "value"] = "penalty"
    """`scale` multiplies a reward above 0 by `amount` (a negative one is unchanged, since scaling would soften it),
    `penalty` subtracts `amount`, `value` replaces the reward by `amount`."""
    amount: float = 1.0
    """Factor, size of the penalty, or reward, depending on `type`."""

    @model_validator(mode="after")
    def _check_amount(self) -> TruncatedReward:
        if self.type == "scale" and not 0 <= self.amount < 1:
            raise ValueError(f"amount = {self.amount}: a scale must be in [0, 1); choose a part of the reward")
        if self.type == "penalty" and self.amount <= 0:
            raise ValueError(f"amount = {self.amount}: a penalty is subtracted and must be > 0; give its size")
        return self


class RewardsConfig(RenamedConfig):
    """Terms, each normalized and clipped -> composition -> running normalization -> clip -> penalties for length."""

    terms: dict[str, RewardSpec] = {"reward_model": RewardModelReward()}
    """Terms of the reward by name; `reward_components` keeps their raw values."""
    composition: Composition = WeightedSum()
    """Combination of the terms into one reward."""
    normalize: Literal["none", "running"] = "none"
    """Normalization of the reward: `running` subtracts the mean and divides by the standard deviation of all rewards
    so far."""
    clip: float = Field(0.0, ge=0)
    """Bound to which the absolute reward is clipped; 0 does not clip."""
    overlong: OverlongPenalty | None = None
    """Penalty for long answers."""
    truncated: TruncatedReward | None = added_option(None)
    """Reward of truncated answers, before the penalty for long ones."""

    @model_validator(mode="after")
    def _check_terms(self) -> RewardsConfig:
        if "overlong" in self.terms:
            raise ValueError("terms.overlong = {...}: the overlong penalty uses this name; give the term another")
        if self.truncated and "truncated" in self.terms:
            raise ValueError("terms.truncated = {...}: rewards.truncated uses this name; give the term another")
        gates = set(self.composition.gates) if isinstance(self.composition, GatedProduct) else set()
        unknown = sorted(gates - set(self.terms))
        if unknown:
            raise ValueError(
                f"composition.gates = {unknown}: must be names of terms; the terms are {sorted(self.terms)}"
            )
        weights = [spec.weight or spec.weight_end for name, spec in self.terms.items() if name not in gates]
        if self.terms and not any(weights):
            raise ValueError("terms = {...}: no term has a weight, so every reward would be equal; give one a weight")
        own = sorted(name for name, spec in self.terms.items() if spec.normalize != "none")
        if isinstance(self.composition, Gdpo) and own:
            raise ValueError(f"terms.{own[0]}.normalize: gdpo normalizes every term itself; remove it")
        scaled = sorted(name for name in gates if self.terms[name].normalize != "none")
        if scaled:
            raise ValueError(f"terms.{scaled[0]}.normalize: a gate must stay in [0, 1]; remove it")
        return self


def _some_terms(rewards: RewardsConfig) -> RewardsConfig:
    if not rewards.terms:
        raise ValueError("terms = {}: there is nothing to score with; add a term")
    return rewards


Rewards = Annotated[RewardsConfig, AfterValidator(_some_terms)]
"""Rewards with a term. A policy that learns from teachers alone has none, and each of its rewards is 0."""


def what_moves_rewards(rewards: RewardsConfig) -> str:
    """The first setting that scales a reward by other answers, or ""."""
    if rewards.normalize != "none":
        return f"rewards.normalize = {rewards.normalize!r}"
    if isinstance(rewards.composition, Gdpo):
        return f"rewards.composition.type = {rewards.composition.type!r}"
    for name, term in rewards.terms.items():
        if term.normalize != "none" and (term.weight or term.weight_end):
            return f"rewards.terms.{name}.normalize = {term.normalize!r}"
    return ""


def check_sources(
    rewards: RewardsConfig, sources: Collection[str], *, known: Collection[str] = (), key: str = "rewards"
) -> None:
    """Raise ConfigError for one of `sources` without a term, and for a term of a source that is not `known`.

    `sources` are the sources whose prompts are rewarded, `known` all sources of the prompts, if they are more.
    """
    for name, term in rewards.terms.items():
        for source in term.sources:
            if source not in (known or sources):
                rule = f"no prompt has this source; {nearest(source, sorted(known or sources))}"
                raise ConfigError(f"{key}.terms.{name}.sources = {list(term.sources)}: {rule}")
    gates = rewards.composition.gates if isinstance(rewards.composition, GatedProduct) else ()
    terms = {name: term for name, term in rewards.terms.items() if name not in gates}
    counting = [term for term in terms.values() if term.weight or term.weight_end]
    for source in sorted(sources) if rewards.terms else ():
        if not any(not term.sources or source in term.sources for term in counting):
            rule, remedy = (
                "no term with a weight applies to prompts of this source",
                "add it to the `sources` of a term",
            )
            raise ConfigError(f"{key}.terms", source, rule, remedy)


def what_compares_answers(rewards: RewardsConfig) -> str:
    """The first setting that makes the value of a term relative to other answers, or ""."""
    for name, term in rewards.terms.items():
        counts = term.weight or term.weight_end
        if counts and isinstance(term, FunctionReward | RemoteReward | JudgeReward) and term.compares != "nothing":
            return f"rewards.terms.{name}.compares = {term.compares!r}"
    return ""


def _check_cache(compares: Compares, *, cache: bool) -> None:
    if cache and compares != "nothing":
        raise ValueError(
            f'cache = true: with compares = "{compares}" an answer\'s value depends on the other answers; remove it'
        )
